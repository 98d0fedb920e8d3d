#include "step.h"
#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <typeinfo>

namespace coexec {
namespace {

c10::DispatchKeySet below(c10::DispatchKeySet ks) {
  return ks & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
}

c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}
} // namespace

namespace {
struct PausedGuard {
  explicit PausedGuard(Step& s) : step(s), before(s.paused) {
    step.paused = true;
  }
  ~PausedGuard() {
    step.paused = before;
  }
  Step& step;
  bool before;
};
} // namespace

Step*& active_step() {
  static thread_local Step* s = nullptr;
  return s;
}

Step::Step() : graph(&program) {}

Step::~Step() {
  for (auto& l : locations)
    for (auto& f : l.second.chain)
      Py_DECREF(f.code);
}

// ---------------------------------------------------------------------------------------------- iteration boundaries

// The memory of an iteration is used again once neither the GraphRunner nor a placeholder refers to it.
std::shared_ptr<Iteration> Step::fresh_iteration() {
  for (auto& i : iterations_)
    if (i.use_count() == 1) {
      i->reset(program.slots());
      return i;
    }
  auto i = std::make_shared<Iteration>();
  i->reset(program.slots());
  if (iterations_.size() < 3)
    iterations_.push_back(i);
  return i;
}

void Step::begin(Phase p, const std::vector<at::Tensor>& step_arguments, int frame_levels, bool lazy) {
  frame_ = step_frame(frame_levels);
  phase = p;
  fallback.reset();
  has_trace = p == Phase::Trace;
  step_arguments_.clear();
  for (const auto& t : step_arguments) {
    auto* impl = t.unsafeGetTensorImpl();
    step_arguments_.emplace_back(); // keeps its place: predictions go by position
    if (is_special(*impl) || record_of(*impl))
      continue;
    auto* s = impl->unsafe_storage().unsafeGetStorageImpl();
    step_arguments_.back() = {
        c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(s)), s,
        intern_of(*impl)};
  }
  uid_of_sequence_.clear();
  sequence_base_ = at::sequence_number::peek();
  last_backward_uid_ = 0;
  if (p == Phase::Trace) {
    recorder.begin(argument_storages());
  } else {
    it_ = fresh_iteration();
    it_->lazy = lazy;
    current_ = &program.at(kStart);
    path.clear();
    log_index_.assign(program.size(), -1);
    barrier_open_ = false;
    description.clear();
    external_descriptions.clear();
    external_writes_.clear();
    graph.start(it_, segments, step_arguments_);
  }
  active_step() = this;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

// The memory of an ordinary tensor will be written by the GraphRunner: readers in other threads must meet the key.
void Step::key_until_written(const at::Tensor& t) {
  if (t.key_set().has(kKey))
    return;
  set_key(t.unsafeGetTensorImpl());
  keyed_.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(t.unsafeGetTensorImpl()));
}

// From now on these locations get real memory at once (recorded as HOST ops).
void Step::learn_native_fills() {
  for (int32_t sid : it_->native_fills)
    if (const Node& n = program.at(program.node_of_slot(sid)); n.info->allocates)
      recorder.native_fills.insert(n.location);
  it_->native_fills.clear();
}

void Step::key_until_left(const at::Tensor& t) {
  if (t.key_set().has(kKey) && typeid(*t.unsafeGetTensorImpl()) != typeid(PlaceholderImpl))
    keyed_.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(t.unsafeGetTensorImpl()));
}

void Step::drop_keys() {
  for (auto& w : keyed_)
    if (auto t = w.lock())
      clear_stale_key(t.get());
  keyed_.clear();
}

std::vector<c10::StorageImpl*> Step::argument_storages() const {
  std::vector<c10::StorageImpl*> storages;
  for (const auto& a : step_arguments_)
    storages.push_back(a.storage);
  return storages;
}

void Step::leave() {
  drop_keys();
  describing = false;
  described_storages_.clear();
  if (it_) {
    forget_pending_writes(it_.get());
    learn_native_fills();
    if (!fallback)
      learn_survivors();
  }
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  active_step() = nullptr;
  phase = Phase::Off;
  it_.reset();
  step_arguments_.clear();
}

void Step::finish() {
  std::exception_ptr error;
  close_barrier();
  if (phase == Phase::Coexec) {
    try {
      const auto& c = current_->children;
      if (std::find(c.begin(), c.end(), kEnd) == c.end())
        fall_back("early end", "return", 0);
      else
        complete_iteration();
    } catch (...) {
      error = std::current_exception();
      settle();
    }
  }
  recorder.complete = !error;
  leave();
  if (error)
    std::rethrow_exception(error);
}

void Step::complete_iteration() {
  wait(it_->size(), Wait::StepEnd);
  it_->close();
  resolve_all();
}

// The user's code raised. A kernel's error that eager would have raised earlier takes precedence: it is thrown.
void Step::abort() {
  std::exception_ptr error;
  try {
    if (phase == Phase::Coexec)
      fall_back("exception", "raise", 0);
  } catch (...) {
    error = std::current_exception();
    settle();
  }
  recorder.complete = false;
  leave();
  if (error)
    std::rethrow_exception(error);
}

// After an error or a signal during a wait: eager's state, without raising again.
void Step::settle() {
  if (phase != Phase::Coexec)
    return;
  try {
    fall_back("exception", "raise", 0);
  } catch (...) { // the kernel's error; the caller rethrows what came first
  }
}

void Step::drain() {
  if (phase != Phase::Coexec)
    return;
  close_barrier();
  it_->wait_done(it_->size(), false);
}

void Step::abandon() {
  if (phase == Phase::Coexec)
    resolve_all();
  leave();
}

// ------------------------------------------------------------------------------------------------------------ location

uint64_t Step::op_location() {
  uint64_t h = location_hash(frame_);
  auto node = torch::autograd::get_current_node();
  in_backward_ = node.defined();
  if (in_backward_) {
    // All of a backward pass has one Python location: the op that made the node tells its ops apart.
    uint64_t seq = node->sequence_nr();
    uint64_t by = last_backward_uid_; // AccumulateGrad has no number of its own: it follows what fed it
    if (seq != UINT64_MAX) {
      uint64_t k = seq - sequence_base_;
      by = seq >= sequence_base_ && k < uid_of_sequence_.size() ? uid_of_sequence_[k] : 0x5bd1e995;
    }
    h = mix(h, by);
  }
  // Process-wide state that decides what an op does is part of where it is.
  if (auto d = c10::get_default_dtype_as_scalartype(); d != at::kFloat)
    h = mix(h, static_cast<uint64_t>(d) + 1);
  return h;
}

void Step::remember_sequence(uint64_t uid) {
  uint64_t now = at::sequence_number::peek();
  if (now > sequence_base_ && now - sequence_base_ > uid_of_sequence_.size())
    uid_of_sequence_.resize(now - sequence_base_, uid);
  if (in_backward_)
    last_backward_uid_ = uid;
}

// ----------------------------------------------------------------------------------------------------------- one op

void Step::handle(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  uint64_t location = op_location();
  close_barrier();
  if (phase == Phase::Coexec && follow(op, ks, stack, location))
    return;
  const OpInfo* info = op_info(op);
  if (info->pass_through) {
    run_now(op, ks, stack);
    return;
  }
  if (info->decompose) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CompositeImplicitAutograd), stack);
    return;
  }
  if (phase == Phase::Coexec)
    fall_back("new path", info->name, location);
  uint64_t uid = mix(mix(location, info->name_hash), recorder.occurrence(location, info->name_hash));
  stats.traced_ops++;
  {
    bool guard = guarded(location);
    PausedGuard inside_kernel(*this);
    recorder.record(info, location, uid, guard, op, ks, stack);
  }
  remember_sequence(uid);
}

bool Step::follow(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack, uint64_t location) {
  const auto* schema = &op.schema();
  for (int32_t id : current_->children) {
    Node& n = program.at(id);
    if (n.info->schema != schema || n.location != location)
      continue;
    auto args = torch::jit::last(*stack, n.info->args.size());
    if (!match(n, args))
      continue;
    switch (n.kind) {
      case Kind::Fetch:
        fetch(n, op, ks, stack);
        return true;
      case Kind::Sync:
        sync(n, op, ks, stack);
        return true;
      case Kind::Host:
        run_unpublished(n, op, ks, stack);
        return true;
      default:
        break;
    }
    const Variant* v = find_variant(n, args);
    if (!v)
      v = infer_variant(n, args);
    if (!v) {
      fall_back("new shapes", n.info->name, location);
      return false;
    }
    if (n.kind == Kind::View)
      view(n, *v, op, ks, stack);
    else
      compute(n, *v, stack);
    return true;
  }
  return false;
}

bool Step::match_input(const Node& n, const at::Tensor& t, int16_t arg, int16_t element) {
  auto* impl = t.unsafeGetTensorImpl();
  StorageRecord* r = record_of(*impl);
  In in{r, kExternal, nullptr, &t, arg, element};
  if (r) {
    // C++ type first: a `.data =` copy is a plain TensorImpl over our storage.
    auto* p = typeid(*impl) == typeid(PlaceholderImpl) ? static_cast<PlaceholderImpl*>(impl) : nullptr;
    if (p && p->record == r && matches(*p->geometry, *impl)) {
      in.geometry = p->geometry;
      in.slot = p->slot;
    } else {
      in.geometry = intern_of(*impl);
      in.slot = r->slot_of(in.geometry);
      if (in.slot < 0)
        in.slot = r->views.front().slot; // as Recorder::input: any value names the memory
    }
  } else if (n.kind != Kind::Sync && n.kind != Kind::Fetch && is_special(*impl)) {
    return false;
  }
  size_t k = in_.size();
  in_.push_back(in);
  if (n.kind == Kind::Sync)
    return true; // runs on real tensors, whatever made them
  if (k >= n.producers.size())
    return false;
  for (int32_t s : n.producers[k])
    if (s == in.slot)
      return true;
  return false;
}

bool Step::match(const Node& n, c10::ArrayRef<c10::IValue> args) {
  in_.clear();
  for (size_t i = 0; i < args.size(); i++) {
    const auto& v = args[i];
    const Arg& a = n.args[i];
    switch (a.type) {
      case Arg::Tensor: {
        if (!v.isTensor() || !v.toTensor().defined())
          return false;
        const auto& t = v.toTensor();
        if (t.unsafeGetTensorImpl()->is_wrapped_number() || !match_input(n, t, static_cast<int16_t>(i), -1))
          return false;
        break;
      }
      case Arg::Undefined:
        if (!(v.isNone() || (v.isTensor() && !v.toTensor().defined())))
          return false;
        break;
      case Arg::Wrapped: {
        if (!v.isTensor() || !v.toTensor().defined())
          return false;
        auto* t = v.toTensor().unsafeGetTensorImpl();
        if (!t->is_wrapped_number() || t->dtype().toScalarType() != a.wrapped_dtype)
          return false;
        if (!a.fed && !same_value(a.value, wrapped_value(*t)))
          return false;
        break;
      }
      case Arg::List: {
        if (!v.isList())
          return false;
        auto l = v.toListRef();
        if (l.size() != a.present.size())
          return false;
        for (size_t k = 0; k < l.size(); k++) {
          bool defined = l[k].isTensor() && l[k].toTensor().defined();
          if (defined != a.present[k])
            return false;
          if (defined && !match_input(n, l[k].toTensor(), static_cast<int16_t>(i), static_cast<int16_t>(k)))
            return false;
        }
        break;
      }
      case Arg::Static:
        if (!same_value(a.value, v))
          return false;
        break;
      case Arg::Number:
        if (!a.fed && !same_value(a.value, v))
          return false;
        break;
      case Arg::Object:
        if (a.value.toBool() == v.isNone())
          return false;
        break;
    }
  }
  return true;
}

const Variant* Step::find_variant(Node& n, c10::ArrayRef<c10::IValue> args) {
  for (auto& v : n.variants) {
    bool same = true;
    for (size_t k = 0; same && k < in_.size(); k++)
      same = in_[k].geometry ? in_[k].geometry == v.inputs[k]
                             : matches_shape(*v.inputs[k], *in_[k].tensor->unsafeGetTensorImpl());
    size_t number = 0;
    for (size_t i = 0; same && i < n.args.size(); i++)
      if (n.args[i].type == Arg::Number) {
        if (n.args[i].fed)
          same = number < v.numbers.size() && same_shape_number(n.info->args[i], v.numbers[number], args[i]);
        number++;
      }
    if (same)
      return &v;
  }
  return nullptr;
}

// The op is validated: it becomes the latest entry of the log. The caller fills the entry and publishes it.
void Step::advance(Node& n) {
  Entry& e = it_->next_entry();
  e.node = &n;
  e.variant = nullptr;
  e.patches.clear();
  log_index_[n.id] = it_->size();
  path.push_back(n.id);
  current_ = &n;
  stats.ops++;
  remember_sequence(n.uid);
}

// An argument from outside, as the GraphRunner may hold it: a copy if other code can change the memory before the graph
// runs, or if the PythonRunner itself will (host ops).
Patch Step::pass_on(const Node& n, const In& in, size_t k, const Geometry* geometry) {
  auto* s = storage_of(*in.tensor);
  if (geometry->offset != in.tensor->storage_offset())
    geometry = intern_of(*in.tensor->unsafeGetTensorImpl());
  Patch p{in.arg, in.element, static_cast<int16_t>(k), kExternal, -1, geometry,
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(s)};
  if (n.info->args[in.arg].writes || !(n.args[in.arg].snapshot || is_foreign(s)))
    return p;
  stats.feeds++;
  // Same strides: kernels may depend on them. The copy goes through the kernel directly.
  c10::impl::ExcludeDispatchKeyGuard no_key(kKey);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor t = tensor_over(in.tensor->storage(), *geometry);
  at::Tensor copy = at::empty_strided(t.sizes(), t.strides(), t.options());
  copy.copy_(t);
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
  if (o.alias < 0) {
    auto t = make_placeholder(it_, slot, v.outputs[k], v.nbytes[k], n.info->allocates);
    it_->set_sid(slot, slot);
    it_->track(record_of(*t.unsafeGetTensorImpl()));
    record_of(*t.unsafeGetTensorImpl())->last_write = it_->size();
    return t;
  }
  auto* r = in_[o.alias].record;
  int32_t known = r->slot_of(v.outputs[k]);
  if (known < 0) {
    r->views.push_back({v.outputs[k], slot});
    it_->set_sid(slot, r->sid);
  }
  return make_placeholder_view(*in_[o.alias].tensor, known < 0 ? slot : known, v.outputs[k]);
}

void Step::compute(Node& n, const Variant& v, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, n.info->args.size());
  advance(n);
  int64_t index = it_->size();
  Entry& e = it_->entry(index);
  e.variant = &v;
  prepare_args(n, v, e, stack);
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
  if (describing)
    describe(n, &v, e, args);
  torch::jit::drop(*stack, n.info->args.size());
  for (auto& r : results)
    stack->push_back(std::move(r));
  it_->publish(n.info->heavy);
  if (foreign_write) // the next line of Python may read that memory without PyTorch
    wait(index + 1, Wait::ForeignWrite);
}

void Step::run_now(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard g(kKey);
  op.redispatchBoxed(below(ks), stack);
}

void Step::view(
    Node& n, const Variant& v, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  auto n_args = n.info->args.size();
  StorageRecord* r = in_.empty() ? nullptr : in_[0].record;
  bool in_place = !n.outputs.empty() && n.outputs[0].same_arg >= 0 && n.info->handle->hasTag(at::Tag::inplace_view);
  advance(n);
  it_->entry(it_->size()).variant = &v;
  if (!r) { // metadata only, on real memory
    if (describing)
      describe(n, &v, it_->entry(it_->size()), torch::jit::last(*stack, n_args));
    bool pending = !in_.empty() && external_writes_.count(storage_of(*in_[0].tensor));
    it_->publish(false);
    run_now(op, ks, stack);
    if (pending)
      for (const auto& x : torch::jit::last(*stack, n.info->n_returns))
        if (x.isTensor() && x.toTensor().defined())
          key_until_written(x.toTensor());
    return;
  }
  if (in_place) { // t_(), squeeze_() ...: changes this very tensor's geometry, touches no memory
    at::Tensor self = *in_[0].tensor;
    run_now(op, ks, stack);
    const auto* g = v.outputs[0];
    int32_t known = r->slot_of(g);
    if (known < 0) {
      r->views.push_back({g, n.slot_base});
      it_->set_sid(n.slot_base, r->sid);
    }
    if (typeid(*self.unsafeGetTensorImpl()) == typeid(PlaceholderImpl)) {
      auto* p = static_cast<PlaceholderImpl*>(self.unsafeGetTensorImpl());
      p->geometry = g;
      p->slot = known < 0 ? n.slot_base : known;
    }
    if (describing)
      describe(n, &v, it_->entry(it_->size()), {});
    it_->publish(false);
    return;
  }
  auto args = torch::jit::last(*stack, n_args);
  std::vector<c10::IValue> results;
  size_t k = 0;
  for (int32_t ret : n.returns) {
    if (ret < 0) {
      results.emplace_back(hand_out(n, v, k++, args));
      continue;
    }
    c10::List<at::Tensor> l;
    l.reserve(ret);
    for (int32_t j = 0; j < ret; j++)
      l.push_back(hand_out(n, v, k++, args));
    results.emplace_back(std::move(l));
  }
  it_->entry(it_->size()).variant = &v;
  if (describing)
    describe(n, &v, it_->entry(it_->size()), args);
  torch::jit::drop(*stack, n_args);
  for (auto& x : results)
    stack->push_back(std::move(x));
  it_->publish(false);
}

at::Tensor Step::fetched_value(const In& in, int64_t index) {
  stats.waits[static_cast<int>(Wait::Fetch)]++;
  at::Tensor value;
  int64_t needed = in.record->last_write + 1;
  stats.stall_s += it_->wait_done_or_published(needed, index, &value);
  if (it_->done() < needed && value.defined()) {
    // From inside a compiled graph that runs ahead. It counts only if the graph was started with what Python meant.
    std::optional<std::string> why;
    it_->with_run([&](const SegmentRun& run) { why = disagreement(*it_, run, run.base, index); });
    if (!why)
      return value;
    it_->void_run(*why);
  }
  wait(needed, Wait::Fetch);
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
    stack->back() = fetched_value(in, index);
  } else if (in.tensor->unsafeGetTensorImpl()->has_storage()) {
    auto w = external_writes_.find(storage_of(*in.tensor));
    if (w != external_writes_.end())
      wait(w->second + 1, Wait::Fetch);
  }
  run_now(op, ks & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

// Python waits and the op runs on real tensors: sizes that depend on data, custom ops, sparse tensors ...
void Step::sync(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  wait(it_->size(), Wait::Sync);
  resolve_inputs();
  run_unpublished(n, op, ks, stack);
}

// The GraphRunner must not pass an op that Python is still doing: it would read memory that the op writes, or draw
// random numbers that the op draws first. So the entry is published afterwards, also if the op raised.
void Step::run_unpublished(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  advance(n);
  try {
    PausedGuard inside_kernel(*this); // what a Python kernel does is no part of the step
    run_now(op, ks, stack);
  } catch (...) {
    it_->publish(false);
    throw;
  }
  it_->publish(false);
}

void Step::close_barrier() {
  if (barrier_open_) {
    barrier_open_ = false;
    it_->publish(false);
  }
}

void Step::wait(int64_t n, Wait why) {
  stats.waits[static_cast<int>(why)]++;
  stats.stall_s += it_->wait_done(n);
}

void Step::resolve_record(StorageRecord* r) {
  const auto& real = it_->memory(r->sid);
  if (real.unsafeGetStorageImpl())
    resolve(r, real);
  else
    fail(r, "coexec: this tensor was never computed, because an earlier operation of the step failed");
}

void Step::resolve_inputs() {
  for (auto& in : in_)
    if (in.record) {
      if (auto* r = record_of(*in.tensor->unsafeGetTensorImpl())) // another argument may have resolved it
        resolve_record(r);
      if (in.tensor->key_set().has(kKey))
        clear_stale_key(in.tensor->unsafeGetTensorImpl());
      in.record = nullptr;
    }
}

void Step::resolve_all() {
  for (auto* r : it_->live_records())
    resolve_record(r);
}

// ----------------------------------------------------------------------------------------------------------- fallback

// Cancels the graph, makes every placeholder ordinary, and goes on as the tracing phase from the op at hand.
void Step::fall_back(const std::string& reason, const std::string& op, uint64_t location) {
  close_barrier();
  fallback = Fallback{reason, op, location, current_->id};
  it_->wait_done(it_->size(), false);
  it_->close();
  graph.join_iteration();
  if (auto at = it_->failed_at(); at >= 0 && static_cast<size_t>(at) < path.size()) {
    const Node& failed = program.at(path[at]);
    fallback = Fallback{"kernel error", failed.info->name, failed.location, failed.id};
    path.resize(at); // ops from the failed one on never happened
  }
  drop_keys();
  forget_pending_writes(it_.get());
  learn_native_fills();
  to_recorder();
  phase = Phase::Trace;
  has_trace = true;
  if (it_->failed())
    std::rethrow_exception(it_->error());
}

void Step::to_recorder() {
  std::vector<Node*> prefix;
  for (int32_t id : path)
    prefix.push_back(&program.at(id));
  recorder.begin_with_prefix(argument_storages(), prefix);
  for (auto* r : it_->live_records()) {
    auto views = r->views;
    c10::Storage storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(r->impl));
    bool computed = it_->memory(r->sid).unsafeGetStorageImpl() != nullptr;
    resolve_record(r);
    if (!computed)
      continue;
    for (auto& v : views) {
      int32_t node = program.node_of_slot(v.slot);
      if (log_index_[node] >= 0)
        recorder.register_value(
            storage, v.geometry, {static_cast<int32_t>(log_index_[node]), v.slot - program.at(node).slot_base});
    }
  }
}

// ------------------------------------------------------------------------------------- Python-side events, new traces

void Step::barrier(const std::string& name, const std::optional<at::Tensor>& t, bool foreign) {
  const OpInfo* info = pseudo_op("coexec::" + name);
  uint64_t location = op_location();
  close_barrier();
  if (phase == Phase::Coexec) {
    Node* next = nullptr;
    for (int32_t id : current_->children) {
      Node& n = program.at(id);
      if (n.info == info && n.location == location)
        next = &n;
    }
    if (next) {
      wait(it_->size(), Wait::Sync);
      in_.clear();
      if (t && t->defined() && t->unsafeGetTensorImpl()->has_storage())
        if (auto* r = record_of(*t->unsafeGetTensorImpl())) {
          in_.push_back({r, 0, nullptr, &*t, 0, -1});
          resolve_inputs();
        }
      advance(*next);
      barrier_open_ = true; // until Python is back: it has yet to do what the barrier is for
    } else {
      fall_back("new path", info->name, location);
    }
  }
  if (phase == Phase::Trace) {
    uint64_t uid = mix(mix(location, info->name_hash), recorder.occurrence(location, info->name_hash));
    guarded(location);
    recorder.record_pseudo(info, Kind::Barrier, location, uid, t ? &*t : nullptr);
    remember_sequence(uid);
  }
  if (t && t->defined() && t->unsafeGetTensorImpl()->has_storage()) {
    if (t->key_set().has(kKey))
      clear_stale_key(t->unsafeGetTensorImpl());
    if (foreign)
      mark_foreign(t->storage());
  }
}

void Step::extend(const std::vector<int32_t>& nodes) {
  TORCH_CHECK(nodes.size() == recorder.ops.size(), "coexec: one node per op of the trace");
  graph.join_iteration(); // it may still be looking for what comes after the last op
  for (size_t i = 0; i < nodes.size(); i++) {
    auto& t = recorder.ops[i];
    if (nodes[i] < static_cast<int32_t>(program.size()))
      continue;
    auto n = std::make_unique<Node>();
    n->info = t.info;
    n->kind = t.kind;
    n->location = t.location;
    n->uid = t.uid;
    n->args.assign(t.args.begin(), t.args.end());
    n->returns.assign(t.returns.begin(), t.returns.end());
    n->outputs.assign(t.outputs.begin(), t.outputs.end());
    n->writes.assign(t.writes.begin(), t.writes.end());
    n->producers.resize(t.inputs.size());
    TORCH_CHECK(program.add(std::move(n)).id == nodes[i], "coexec: nodes must be numbered in order of appearance");
  }
  int32_t previous = kStart;
  for (size_t i = 0; i <= nodes.size(); i++) {
    int32_t id = i < nodes.size() ? nodes[i] : kEnd;
    if (id == kEnd && !recorder.complete)
      break;
    auto& c = program.at(previous).children;
    if (std::find(c.begin(), c.end(), id) == c.end())
      c.push_back(id);
    previous = id;
  }
  for (size_t i = 0; i < nodes.size(); i++) {
    auto& t = recorder.ops[i];
    if (t.node >= 0)
      continue;
    Node& n = program.at(nodes[i]);
    for (size_t k = 0; k < t.inputs.size(); k++) {
      auto v = t.inputs[k].value;
      int32_t slot = v.producer < 0 ? kExternal : program.at(nodes[v.producer]).slot_base + v.output;
      auto& p = n.producers[k];
      if (std::find(p.begin(), p.end(), slot) == p.end())
        p.push_back(slot);
    }
    Variant var;
    std::vector<const ArgInfo*> number_info;
    for (size_t a = 0; a < t.args.size(); a++) {
      auto &seen = t.args[a], &known = n.args[a];
      known.snapshot |= seen.snapshot;
      if ((seen.type == Arg::Number || seen.type == Arg::Wrapped) && !same_value(seen.value, known.value))
        known.fed = true;
      if (seen.type == Arg::Number) {
        var.numbers.push_back(seen.value);
        number_info.push_back(&n.info->args[a]);
      }
    }
    if (t.kind != Kind::Compute && t.kind != Kind::View)
      continue;
    for (auto& in : t.inputs)
      var.inputs.push_back(in.geometry);
    var.outputs.assign(t.geometries.begin(), t.geometries.end());
    var.nbytes.assign(t.nbytes.begin(), t.nbytes.end());
    bool known = false;
    for (auto& v : n.variants) {
      bool same = v.inputs == var.inputs && v.numbers.size() == var.numbers.size();
      for (size_t k = 0; same && k < v.numbers.size(); k++)
        same = same_shape_number(*number_info[k], v.numbers[k], var.numbers[k]);
      known |= same;
    }
    if (!known)
      n.variants.push_front(std::move(var)); // the newest shapes are the likeliest
  }
}
} // namespace coexec
