// The PythonRunner: what becomes of an op, of one that the TraceGraph knows (validate, hand out, publish) and of any
// other.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <typeinfo>
#include "openmp.h"
#include "step.h"

namespace coexec {
namespace {
c10::DispatchKeySet below(c10::DispatchKeySet ks) {
  return ks & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
}

c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

} // namespace

void Step::handle(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  uint64_t location = op_location();
  close_barrier();
  if (phase == Phase::Coexec && it_->full())
    fall_back("too long", op_info(op)->name, location);
  if (phase == Phase::Coexec && follow(op, ks, stack, location))
    return;
  const OpInfo* info = op_info(op);
  if (info->pass_through) {
    run_now(op, ks, stack);
    return;
  }
  if (info->in_python) {
    op.redispatchBoxed(below(ks), stack);
    return;
  }
  if (info->decompose) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CompositeImplicitAutograd), stack);
    return;
  }
  if (uint64_t known = op_place(); known != location) {
    location = known;
    if (phase == Phase::Coexec && follow(op, ks, stack, location))
      return;
  }
  if (by_elements(*info, ks, stack, location))
    return;
  if (phase == Phase::Coexec)
    fall_back("new path", info->name, location);
  OpIdentity id = identify(info, location);
  stats.traced_ops++;
  {
    bool guard = place(location).guarded;
    PausedGuard inside_kernel(*this);
    recorder.record(info, id, guard, op, ks, stack);
  }
  remember_sequence(id.uid);
}

bool Step::follow(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack, uint64_t location) {
  const auto* schema = &op.schema();
  Node *waiting = nullptr, *other_shapes = nullptr;
  for (const Child& c : current_->children) {
    Node& n = program.at(c.id);
    if (n.info->schema != schema || n.location != location || !in_turn(n))
      continue;
    auto args = torch::jit::last(*stack, n.info->args.size());
    if (!match(n, args))
      continue;
    switch (n.kind) {
      case Kind::Fetch:
        fetch(n, op, ks, stack);
        return true;
      case Kind::Sync: // it fits any inputs: only where no other node of the op does
        waiting = &n;
        continue;
      case Kind::Host:
        host(n, op, ks, stack);
        return true;
      default:
        break;
    }
    if (views_the_outside(n)) { // it happens at once, whatever the shapes are
      view(n, nullptr, op, ks, stack);
      return true;
    }
    const Variant* v = find_variant(n, args);
    if (!v)
      v = infer_variant(n, args);
    if (!v) {
      other_shapes = &n;
      continue;
    }
    if (n.kind == Kind::View)
      view(n, v, op, ks, stack);
    else
      compute(n, *v, stack);
    return true;
  }
  if (waiting) {
    match(*waiting, torch::jit::last(*stack, waiting->info->args.size()));
    sync(*waiting, op, ks, stack);
    return true;
  }
  if (other_shapes) {
    note_untold(*other_shapes);
    fall_back("new shapes", other_shapes->info->name, location);
  }
  return false;
}

// Shapes without end that no meta kernel tells must not be fallbacks without end: Python waits at the op instead. With
// a meta kernel it is the ways to lie in memory that are new, and these come to an end.
void Step::note_untold(const Node& n) {
  constexpr int kEnough = 12, kNeverTold = 4;
  int& count = untold_[mix(n.location, n.info->name_hash)];
  count += cannot_be_told(n) ? kNeverTold : 1;
  if (count >= kEnough)
    recorder.untold.insert(mix(n.location, n.info->name_hash));
}

// A view of memory from outside is an ordinary tensor, made by the op itself.
bool Step::views_the_outside(const Node& n) const {
  return n.kind == Kind::View && n.info->is_view && (in_.empty() || !in_[0].record);
}

void Step::take(int32_t child) {
  if (Child* c = current_->child(child); c && !c->taken) {
    c->taken = true;
    stats.edges_taken++;
  }
}

// The op is validated: it becomes the latest entry of the log. The caller fills the entry and publishes it.
void Step::advance(Node& n) {
  Entry& e = it_->next_entry();
  e.node = &n;
  e.variant = nullptr;
  e.args.clear(); // an iteration that failed left those of its ops that never ran
  e.patches.clear();
  e.awaited = false;
  bool again = passed_[n.id];
  passed_[n.id] = true;
  met_[n.pair]++;
  e.first_sid = again && n.makes_memory() ? it_->new_sids(static_cast<int32_t>(n.outputs.size())) : n.slot_base;
  path.push_back(n.id);
  take(n.id);
  current_ = &n;
  stats.ops++;
  remember_sequence(n.uid);
}

// An argument from outside of which the GraphRunner gets a copy: other code can change the memory before the graph
// runs, or the PythonRunner itself will (host ops). Not of what the op writes, whether its schema says so or not.
bool Step::takes_copy(const Node& n, const In& in, size_t k) {
  bool written = std::find(n.writes.begin(), n.writes.end(), static_cast<int16_t>(k)) != n.writes.end();
  return !written && (n.args[in.arg].snapshot || is_foreign(storage_of(*in.tensor)));
}

// What is copied for the graph must have what the graph has yet to write to it.
void Step::await_writes_to_copied(const Node& n) {
  if (external_writes_.empty())
    return;
  for (size_t k = 0; k < in_.size(); k++)
    if (!in_[k].record && takes_copy(n, in_[k], k))
      if (auto w = external_writes_.find(storage_of(*in_[k].tensor)); w != external_writes_.end())
        wait(w->second + 1, Wait::Sync, n.location);
}

// An argument from outside, as the GraphRunner may hold it.
Patch Step::pass_on(Node& n, const In& in, size_t k, const Geometry* geometry) {
  auto* s = storage_of(*in.tensor);
  if (geometry->offset != in.tensor->storage_offset())
    geometry = intern_of(*in.tensor->unsafeGetTensorImpl());
  Patch p{in.arg, in.element, static_cast<int16_t>(k), kExternal, -1, geometry,
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(s)};
  if (!takes_copy(n, in, k)) {
    if (overlap_allowed_)
      foreign_use_.reads.insert(s);
    if (s->nbytes() <= kStateBytes)
      small_reads_.push_back({it_->size(), &n, in.arg, s});
    return p;
  }
  stats.feeds++;
  at::Tensor copy = copy_as_it_lies(in.tensor->storage(), *geometry);
  p.geometry = intern_of(*copy.unsafeGetTensorImpl());
  p.external = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_of(copy));
  return p;
}

void Step::prepare_args(Node& n, const Variant& v, Entry& e, torch::jit::Stack* stack) {
  for (size_t k = 0; k < in_.size(); k++) {
    const In& in = in_[k];
    if (in.record)
      e.patches.push_back({in.arg, in.element, static_cast<int16_t>(k), in.slot, in.record->sid, in.geometry, {}});
    else
      e.patches.push_back(pass_on(n, in, k, v.inputs[k]));
  }
  auto n_args = n.info->args.size();
  auto first = stack->size() - n_args;
  e.args.clear();
  e.args.reserve(n_args);
  for (size_t i = 0; i < n_args; i++) {
    const Arg& a = n.args[i];
    if (a.type == Arg::Tensor)
      e.args.emplace_back();
    else if (a.type == Arg::List && n.info->args[i].cls == ArgClass::TensorList)
      e.args.emplace_back(c10::List<at::Tensor>(std::vector<at::Tensor>(a.present.size())));
    else if (a.type == Arg::List) {
      c10::List<std::optional<at::Tensor>> l;
      for (bool p : a.present)
        l.push_back(p ? std::optional<at::Tensor>(at::Tensor()) : std::nullopt);
      e.args.emplace_back(std::move(l));
    } else {
      e.args.push_back((*stack)[first + i]);
    }
  }
}

at::Tensor Step::hand_out(Node& n, const Variant& v, size_t k, c10::ArrayRef<c10::IValue> args) {
  const Output& o = n.outputs[k];
  if (!o.defined)
    return at::Tensor();
  if (o.same_arg >= 0)
    return args[o.same_arg].toTensor();
  int32_t slot = n.slot_base + static_cast<int32_t>(k);
  int64_t index = it_->size();
  if (o.alias < 0) {
    int32_t sid = it_->entry(index).first_sid + static_cast<int32_t>(k);
    auto t = make_placeholder(it_, sid, {v.outputs[k], slot, index}, v.nbytes[k], n.info->allocates);
    it_->set_sid(slot, sid);
    it_->track(record_of(*t.unsafeGetTensorImpl()));
    record_of(*t.unsafeGetTensorImpl())->last_write = index;
    return t;
  }
  auto* r = in_[o.alias].record;
  TORCH_INTERNAL_ASSERT(r, "coexec: ", n.info->name, " returned memory from outside that it was not given");
  int32_t known = r->slot_of(v.outputs[k]);
  if (known < 0) {
    r->views.push_back({v.outputs[k], slot, index});
    it_->set_sid(slot, r->sid);
  }
  return make_placeholder_view(*in_[o.alias].tensor, known < 0 ? slot : known, v.outputs[k]);
}

// All that the op returns: tensors and lists of tensors.
c10::SmallVector<c10::IValue, 3> Step::hand_out_returns(Node& n, const Variant& v, c10::ArrayRef<c10::IValue> args) {
  c10::SmallVector<c10::IValue, 3> results;
  size_t k = 0;
  for (int32_t r : n.returns) {
    if (r < 0) {
      results.emplace_back(hand_out(n, v, k++, args));
      continue;
    }
    c10::List<at::Tensor> l;
    l.reserve(r);
    for (int32_t j = 0; j < r; j++)
      l.push_back(hand_out(n, v, k++, args));
    results.emplace_back(std::move(l));
  }
  return results;
}

void Step::compute(Node& n, const Variant& v, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, n.info->args.size());
  await_writes_to_copied(n);
  advance(n);
  int64_t index = it_->size();
  Entry& e = it_->entry(index);
  e.variant = &v;
  prepare_args(n, v, e, stack);
  foreign_use_.draws |= n.info->random;
  bool foreign_write = false;
  for (int16_t w : n.writes) {
    if (n.info->bumps_version)
      in_[w].tensor->unsafeGetTensorImpl()->bump_version();
    if (in_[w].record) {
      in_[w].record->last_write = index;
    } else {
      auto* s = storage_of(*in_[w].tensor);
      external_writes_[s] = index;
      note_pending_write(s, it_, index);
      key_until_written(*in_[w].tensor);
      foreign_write |= is_foreign(s);
    }
  }
  e.awaited = foreign_write;
  auto results = hand_out_returns(n, v, args);
  if (describing)
    describe(n, &v, e, args);
  torch::jit::drop(*stack, n.info->args.size());
  for (auto& r : results)
    stack->push_back(std::move(r));
  it_->publish(n.info->heavy);
  if (foreign_write) // the next line of Python may read that memory without PyTorch
    wait(index + 1, Wait::ForeignWrite, n.location);
}

void Step::run_now(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard g(kKey);
  op.redispatchBoxed(below(ks), stack);
}

// Views of memory that will be written are met by other threads, too. One of a tensor that has the key inherits it: it
// is noted all the same, or nobody would take it away.
void Step::note_keyed_views(const c10::IValue& result) {
  auto one = [&](const at::Tensor& t) {
    clear_stale_key(t.unsafeGetTensorImpl());
    key_until_written(t);
  };
  if (result.isTensor() && result.toTensor().defined())
    one(result.toTensor());
  else if (result.isTensorList())
    for (const at::Tensor& t : result.toTensorList())
      one(t);
}

void Step::view(
    Node& n, const Variant* v, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  auto n_args = n.info->args.size();
  StorageRecord* r = in_.empty() ? nullptr : in_[0].record;
  bool in_place = !n.outputs.empty() && n.outputs[0].same_arg >= 0 && n.info->handle->hasTag(at::Tag::inplace_view);
  advance(n);
  it_->entry(it_->size()).variant = v;
  if (!r) { // metadata only, on real memory
    if (describing)
      describe(n, v, it_->entry(it_->size()), torch::jit::last(*stack, n_args));
    bool pending = !in_.empty() && external_writes_.count(storage_of(*in_[0].tensor));
    it_->publish(false);
    run_now(op, ks, stack);
    if (pending)
      for (const auto& x : torch::jit::last(*stack, n.info->n_returns))
        note_keyed_views(x);
    return;
  }
  if (in_place) { // t_(), squeeze_() ...: changes this very tensor's geometry, touches no memory
    at::Tensor self = *in_[0].tensor;
    run_now(op, ks, stack);
    const auto* g = v->outputs[0];
    int32_t known = r->slot_of(g);
    if (known < 0) {
      r->views.push_back({g, n.slot_base, it_->size()});
      it_->set_sid(n.slot_base, r->sid);
    }
    if (typeid(*self.unsafeGetTensorImpl()) == typeid(PlaceholderImpl)) {
      auto* p = static_cast<PlaceholderImpl*>(self.unsafeGetTensorImpl());
      p->geometry = g;
      p->slot = known < 0 ? n.slot_base : known;
    }
    if (describing)
      describe(n, v, it_->entry(it_->size()), {});
    it_->publish(false);
    return;
  }
  auto args = torch::jit::last(*stack, n_args);
  auto results = hand_out_returns(n, *v, args);
  if (describing)
    describe(n, v, it_->entry(it_->size()), args);
  torch::jit::drop(*stack, n_args);
  for (auto& x : results)
    stack->push_back(std::move(x));
  it_->publish(false);
}

// Is what the run published at `index` the value that Python reads there?
bool Step::publishes(const SegmentRun& run, int64_t index, const Node& n, const In& in) {
  const auto& fetches = run.segment->fetches;
  return std::any_of(fetches.begin(), fetches.end(), [&](const SegmentCheck& c) {
    return c.position == index - run.base && run.segment->nodes[c.position] == n.id && c.slot == in.slot &&
        c.sid == in.record->sid;
  });
}

at::Tensor Step::fetched_value(const Node& n, const In& in, int64_t index) {
  at::Tensor value;
  int64_t needed = in.record->last_write + 1;
  double waited_s = it_->wait_done_or_published(needed, index, &value);
  if (it_->done() < needed && value.defined()) {
    // From inside a compiled graph that runs ahead. It counts only if the graph was started with what Python meant.
    std::optional<std::string> why;
    it_->with_run([&](const SegmentRun& run) {
      why = disagreement(*it_, run, run.base, index);
      if (!why && !publishes(run, index, n, in))
        why = "another value is read";
    });
    if (!why) {
      note_wait(Wait::Fetch, n.location, waited_s);
      return value;
    }
    it_->void_run(*why);
  }
  wait(needed, Wait::Fetch, n.location, waited_s);
  return tensor_over(it_->memory(in.record->sid), *in.geometry);
}

// Output Fetching: a value goes to Python; the tensor stays a placeholder.
void Step::fetch(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  In in = in_[0];
  advance(n);
  int64_t index = it_->size();
  if (describing)
    describe(n, nullptr, it_->entry(index), torch::jit::last(*stack, 1));
  it_->publish(false);
  stats.fetches++;
  if (in.record) {
    stack->back() = fetched_value(n, in, index);
  } else if (in.tensor->unsafeGetTensorImpl()->has_storage()) {
    auto w = external_writes_.find(storage_of(*in.tensor));
    if (w != external_writes_.end())
      wait(w->second + 1, Wait::Fetch, n.location);
  }
  run_now(op, ks & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

// Python waits and the op runs on real tensors: sizes that depend on data, custom ops, sparse tensors ...
void Step::sync(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  wait(it_->size(), Wait::Sync, n.location);
  it_->prevent_run();
  resolve_inputs();
  run_unpublished(n, op, ks, stack);
  release_openmp_workers();
}

// Ops that read what a HOST op is about to write get a copy from the next iteration on. No trace showed that they need
// one: each took one part of this path.
void Step::await_readers(const c10::StorageImpl* s) {
  for (const auto& r : small_reads_)
    if (r.storage == s) {
      r.node->args[r.arg].snapshot = true;
      wait(r.index + 1, Wait::Sync, r.node->location);
    }
}

// Done by Python, which waits for nothing: all its arguments are ordinary tensors. Only on a path where the graph has
// yet to write one of them it waits for that.
void Step::host(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  for (const auto& in : in_)
    if (in.tensor->unsafeGetTensorImpl()->has_storage())
      if (auto w = external_writes_.find(storage_of(*in.tensor)); w != external_writes_.end())
        wait(w->second + 1, n.info->is_fetch ? Wait::Fetch : Wait::Sync, n.location);
  for (int16_t w : n.writes)
    await_readers(storage_of(*in_[w].tensor));
  run_unpublished(n, op, ks, stack);
  if (n.info->always_sync) // of any size
    release_openmp_workers();
}

// The GraphRunner must not pass an op that Python is still doing: it would read memory that the op writes, or draw
// random numbers that the op draws first. So the entry is published afterwards, also if the op raised.
void Step::run_unpublished(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  advance(n);
  try {
    PausedGuard inside_kernel(*this);
    if (n.kind == Kind::Host)
      for (int16_t w : n.writes)
        note_host_write(in_[w]);
    run_now(op, ks, stack);
  } catch (...) {
    it_->publish(false);
    it_->allow_run();
    throw;
  }
  it_->publish(false);
  it_->allow_run();
}
} // namespace coexec
