#include "recorder.h"
#include <c10/core/impl/LocalDispatchKeySet.h>
#include "placeholder.h"

namespace coexec {

bool is_special(const c10::TensorImpl& t) {
  static const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  static const c10::DispatchKeySet usual = cpu | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::autocast_dispatch_keyset | c10::DispatchKeySet(kKey);
  auto ks = t.key_set();
  if ((ks | usual) == usual && (ks & cpu) == cpu) // nearly all
    return !t.has_storage() || t.has_symbolic_sizes_strides();
  static const c10::DispatchKeySet odd =
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize});
  return !t.is_cpu() || t.layout() != at::kStrided || !t.has_storage() || ks.has_any(odd) ||
      t.has_symbolic_sizes_strides() || ks.has(c10::DispatchKey::NestedTensorCPU) ||
      ks.has(c10::DispatchKey::QuantizedCPU) || isQIntType(t.dtype().toScalarType());
}

void Recorder::begin(std::vector<c10::StorageImpl*> step_arguments) {
  ops.clear();
  externals.clear();
  number_of_.clear();
  known_.clear();
  counts_.clear();
  external_storages_ = 0;
  other_device.clear();
  complete = false;
  step_arguments_ = std::move(step_arguments);
}

void Recorder::begin_with_prefix(std::vector<c10::StorageImpl*> step_arguments, const std::vector<Node*>& prefix) {
  begin(std::move(step_arguments));
  for (auto* n : prefix) {
    TraceOp& op = ops.emplace_back();
    op.info = n->info;
    op.kind = n->kind;
    op.location = n->location;
    op.uid = n->uid;
    op.folded = n->folded;
    op.node = n->id;
    occurrence(n->location, n->info->name_hash);
  }
}

Recorder::Known& Recorder::known(c10::StorageImpl* p, bool external) {
  auto [entry, is_new] = number_of_.emplace(p, static_cast<uint32_t>(known_.size()));
  if (is_new) {
    auto& k = known_.emplace_back();
    k.alive = c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(p));
    k.external_storage = external ? external_storages_++ : -1;
  }
  return known_[entry->second];
}

void Recorder::register_value(const c10::Storage& s, const Geometry* g, TraceValue v) {
  auto& values = known(s.unsafeGetStorageImpl(), false).values;
  for (auto& e : values)
    if (e.first == g)
      return; // the first value with this geometry stands for all
  values.emplace_back(g, v);
}

// A subclass may claim any device: what it is made of comes by itself.
void Recorder::note_device(const c10::TensorImpl& t) {
  if (!t.is_cpu() && !t.is_meta() && !t.key_set().has(c10::DispatchKey::Python))
    other_device = c10::DeviceTypeName(t.device().type(), true);
}

TraceInput Recorder::input(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  if (!impl->has_storage() || is_special(*impl))
    return {{kExternal, -1}, nullptr, nullptr};
  auto* p = impl->unsafe_storage().unsafeGetStorageImpl();
  auto& k = known(p, true);
  for (auto& e : k.values)
    if (matches(*e.first, *impl))
      return {e.second, e.first, p};
  const Geometry* g = intern_of(*impl);
  if (k.external_storage < 0) {
    // Memory of the trace seen through a geometry that no op announced (`set_data`, an in-place metadata change).
    // Its values are known by storage: any of them names the memory.
    TraceValue v = k.values.front().second;
    k.values.emplace_back(g, v);
    return {v, g, p};
  }
  auto arg = std::find(step_arguments_.begin(), step_arguments_.end(), p);
  TraceValue v{kExternal, static_cast<int32_t>(externals.size())};
  externals.push_back({k.external_storage, p->nbytes(),
      arg == step_arguments_.end() ? -1 : static_cast<int32_t>(arg - step_arguments_.begin()), is_foreign(p)});
  k.values.emplace_back(g, v);
  return {v, g, p};
}

namespace {
bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

// An integer division by a tensor, seen once it has its result: of floats, nothing raises.
bool divides_integers(const OpInfo& info, c10::ArrayRef<c10::IValue> args, c10::ArrayRef<c10::IValue> results) {
  return info.divides && args[1].isTensor() && !args[1].toTensor().unsafeGetTensorImpl()->is_wrapped_number() &&
      results[0].isTensor() && at::isIntegralType(results[0].toTensor().scalar_type(), /*includeBool=*/true);
}

bool writes_argument(const OpInfo& info, c10::ArrayRef<c10::IValue> args, int16_t arg) {
  if (info.args[arg].writes)
    return true;
  const auto& u = info.undeclared_writes;
  return info.undeclared_if >= 0 && args[info.undeclared_if].toBool() && std::find(u.begin(), u.end(), arg) != u.end();
}
} // namespace

void Recorder::record(const OpInfo* info, const OpIdentity& id, bool guarded, const c10::OperatorHandle& op,
    c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  TraceOp& t = ops.emplace_back(); // filled in place
  t.info = info;
  t.location = id.location;
  t.uid = id.uid;
  t.folded = id.folded;
  auto n_args = info->args.size();
  auto args = torch::jit::last(*stack, n_args);
  bool special = false, masked = false;
  bool plain = encode_args(*info, args, &t.args, [&](const at::Tensor& x, int16_t arg, int16_t) {
    if (is_special(*x.unsafeGetTensorImpl())) {
      special = true;
      note_device(*x.unsafeGetTensorImpl());
    }
    masked |= info->sized_by_masks && arg > 0 && is_mask(x);
    t.inputs.push_back(input(x));
    if (writes_argument(*info, args, arg))
      t.writes.push_back(static_cast<int16_t>(t.inputs.size() - 1));
  });
  if (info->is_fetch)
    t.kind = Kind::Fetch;
  else if (info->always_sync || masked || !plain || special || (guarded && info->may_raise) ||
      untold.count(mix(id.location, info->name_hash)))
    t.kind = Kind::Sync;
  else if (info->allocates && native_fills.count(id.location))
    t.kind = Kind::Host;
  c10::SmallVector<c10::IValue, 6> before(args.begin(), args.end());
  try {
    c10::impl::ExcludeDispatchKeyGuard g(c10::DispatchKey::Fake);
    op.redispatchBoxed(ks & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Fake), stack);
  } catch (...) {
    if (guarded && t.kind != Kind::Fetch)
      t.kind = Kind::Sync;
    if (t.kind == Kind::Sync) // it did run, and Python may go on behind a handler
      forget_results(t);
    else
      ops.pop_back();
    throw;
  }
  if (guarded && t.kind == Kind::Compute && divides_integers(*info, before, torch::jit::last(*stack, info->n_returns)))
    t.kind = Kind::Sync;
  if (t.kind != Kind::Fetch)
    describe_outputs(t, before, torch::jit::last(*stack, info->n_returns));
  if (t.kind == Kind::Sync)
    forget_results(t);
}

namespace {
c10::StorageImpl* storage_of(const c10::TensorImpl& t) {
  return t.unsafe_storage().unsafeGetStorageImpl();
}

// Flattened tensor inputs, in the order of TraceOp::inputs.
template <class F>
void each_input(const OpInfo& info, c10::ArrayRef<c10::IValue> args, F&& f) {
  for (size_t i = 0; i < args.size(); i++) {
    const auto& v = args[i];
    auto cls = info.args[i].cls;
    if (cls == ArgClass::Tensor) {
      if (v.isTensor() && v.toTensor().defined() && !v.toTensor().unsafeGetTensorImpl()->is_wrapped_number())
        f(v.toTensor(), static_cast<int16_t>(i));
    } else if ((cls == ArgClass::TensorList || cls == ArgClass::OptTensorList) && !v.isNone()) {
      for (const auto& e : v.toListRef())
        if (e.isTensor() && e.toTensor().defined())
          f(e.toTensor(), static_cast<int16_t>(i));
    }
  }
}
} // namespace

void Recorder::describe_outputs(TraceOp& t, c10::ArrayRef<c10::IValue> before, c10::ArrayRef<c10::IValue> results) {
  c10::SmallVector<const at::Tensor*, 6> inputs;
  c10::SmallVector<int16_t, 6> arg_of;
  each_input(*t.info, before, [&](const at::Tensor& x, int16_t arg) {
    inputs.push_back(&x);
    arg_of.push_back(arg);
  });
  c10::SmallVector<const at::Tensor*, 3> outs;
  for (const auto& r : results) {
    if (r.isTensor()) {
      t.returns.push_back(-1);
      outs.push_back(&r.toTensor());
    } else if (r.isTensorList()) {
      auto l = r.toListRef();
      t.returns.push_back(static_cast<int32_t>(l.size()));
      for (const auto& e : l)
        outs.push_back(&e.toTensor());
    } else {
      t.kind = Kind::Sync;
      return;
    }
  }
  bool inplace_view = t.info->handle && t.info->handle->hasTag(at::Tag::inplace_view);
  for (int16_t w : t.writes) {
    // x[1].addbmm_(..) makes itself larger, `out=` what it is given: no longer the tensor that Python holds.
    auto* impl = inputs[w]->unsafeGetTensorImpl();
    bool same = inplace_view || t.kind != Kind::Compute ||
        (t.inputs[w].geometry == intern_of(*impl) && t.inputs[w].storage == storage_of(*impl));
    if (!same) {
      t.kind = Kind::Sync;
      return;
    }
  }
  bool all_alias = !outs.empty();
  for (size_t k = 0; k < outs.size(); k++) {
    Output o;
    const auto& x = *outs[k];
    o.defined = x.defined();
    if (!o.defined) {
      t.outputs.push_back(o);
      t.geometries.push_back(nullptr);
      t.nbytes.push_back(0);
      t.storages.push_back(nullptr);
      continue;
    }
    auto* impl = x.unsafeGetTensorImpl();
    if (is_special(*impl)) {
      note_device(*impl);
      t.kind = Kind::Sync;
      return;
    }
    auto* st = impl->unsafe_storage().unsafeGetStorageImpl();
    for (size_t i = 0; i < inputs.size() && o.same_arg < 0; i++) {
      auto* in = inputs[i]->unsafeGetTensorImpl();
      bool same = in == impl; // rather than an argument before it that shares its memory
      if (same)
        o.same_arg = arg_of[i];
      if (same || (o.alias < 0 && in->has_storage() && in->unsafe_storage().unsafeGetStorageImpl() == st))
        o.alias = static_cast<int16_t>(i);
    }
    for (auto* s : t.storages)
      if (o.alias < 0 && s == st) { // two outputs over one fresh memory: rare enough to let Python wait
        t.kind = Kind::Sync;
        return;
      }
    all_alias &= o.alias >= 0;
    t.outputs.push_back(o);
    t.geometries.push_back(intern_of(*impl));
    t.nbytes.push_back(st->nbytes());
    t.storages.push_back(st);
  }
  if (t.kind != Kind::Compute)
    return;
  if (all_alias && (t.writes.empty() || inplace_view))
    t.kind = Kind::View;
  if (inplace_view)
    t.writes.clear();
  if (t.kind == Kind::View && t.info->is_view && t.inputs[t.outputs[0].alias].value.producer == kExternal) {
    forget_outputs(t); // they are from outside, too, and as many as the memory has parts
    return;
  }
  int32_t index = static_cast<int32_t>(ops.size()) - 1;
  for (size_t k = 0; k < outs.size(); k++) {
    const auto& o = t.outputs[k];
    if (!o.defined)
      continue;
    bool external = o.alias >= 0 && t.inputs[o.alias].value.producer == kExternal;
    if (external) {
      // A view of memory from outside is memory from outside. A kernel that returns one without a view annotation
      // cannot be handed out ahead of its execution.
      if (t.kind == Kind::Compute && o.same_arg < 0) {
        t.kind = Kind::Sync;
        return;
      }
      continue;
    }
    register_value(outs[k]->storage(), t.geometries[k], {index, static_cast<int32_t>(k)});
  }
}

// What a SYNC op touched is real memory, its results included; nothing else about them is known ahead.
void Recorder::forget_results(TraceOp& t) {
  make_external(t);
  forget_outputs(t);
}

void Recorder::forget_outputs(TraceOp& t) {
  t.returns.clear();
  t.outputs.clear();
  t.geometries.clear();
  t.nbytes.clear();
  t.storages.clear();
}

void Recorder::make_external(const TraceOp& t) {
  for (const auto& i : t.inputs)
    if (i.storage)
      number_of_.erase(i.storage); // its entry stays: the address must be unique for the rest of the trace
}

void Recorder::record_pseudo(const OpInfo* info, Kind kind, const OpIdentity& id, const at::Tensor* x) {
  TraceOp& t = ops.emplace_back();
  t.info = info;
  t.kind = kind;
  t.location = id.location;
  t.uid = id.uid;
  t.folded = id.folded;
  if (x && x->defined() && x->unsafeGetTensorImpl()->has_storage())
    t.inputs.push_back(input(*x));
  if (!t.inputs.empty()) {
    Arg a{Arg::Tensor};
    t.args.push_back(a);
  }
  make_external(t);
}
} // namespace coexec
