// The boxed fallback on our dispatch key: below autograd and every mode, above the kernels.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include "overlap.h"
#include "step.h"

namespace coexec {
at::Tensor real_value(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  auto u = impl->has_storage() ? unresolved(impl->unsafe_storage().unsafeGetStorageImpl()) : Unresolved{};
  if (!u.iteration) {
    if (impl->has_storage())
      await_pending_write(impl->unsafe_storage().unsafeGetStorageImpl());
    if (!active_step()) // inside a step the key may still be wanted by other threads
      clear_stale_key(impl);
    return t;
  }
  u.iteration->flush();
  u.iteration->wait_done(u.last_write + 1);
  Geometry g{impl->dtype().toScalarType(), impl->storage_offset(), {}, {}, lazy_bits_of(*impl)};
  g.sizes.assign(impl->sizes().begin(), impl->sizes().end());
  g.strides.assign(impl->strides().begin(), impl->strides().end());
  c10::Storage memory;
  {
    // The step's own thread may have made it ordinary while this one waited; then the graph's thread frees its memory.
    std::lock_guard<SpinLock> l(records_lock());
    if (const auto* r = record_of(impl->unsafe_storage().unsafeGetStorageImpl()))
      memory = r->iteration->memory(r->sid);
    else
      return t;
  }
  return tensor_over(memory, g);
}

namespace {
void outside_step(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, op.schema().arguments().size());
  std::vector<std::pair<at::Tensor, at::Tensor>> replaced; // (real, placeholder): an in-place op returns its argument
  auto real = [&](const at::Tensor& t) {
    if (!t.defined() || !t.key_set().has(kKey))
      return t;
    at::Tensor x = real_value(t);
    if (!x.is_same(t))
      replaced.emplace_back(x, t);
    return x;
  };
  auto first = stack->size() - args.size();
  for (size_t i = 0; i < args.size(); i++) {
    auto& v = (*stack)[first + i];
    if (v.isTensor()) {
      v = real(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorList())
        l.push_back(real(t));
      v = l;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (std::optional<at::Tensor> t : v.toOptionalTensorList())
        l.push_back(t ? std::optional<at::Tensor>(real(*t)) : t);
      v = l;
    }
  }
  c10::impl::ExcludeDispatchKeyGuard g(kKey);
  op.redispatchBoxed(ks & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++)
    for (auto& [x, t] : replaced)
      if ((*stack)[i].isTensor() && (*stack)[i].toTensor().is_same(x))
        (*stack)[i] = t;
}

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  Step* s = active_step();
  if (s && !s->paused) {
    settle_arguments(op, torch::jit::last(*stack, op.schema().arguments().size()));
    s->handle(op, ks, stack);
  } else if (s || !overlapped(op, ks, stack)) {
    outside_step(op, ks, stack);
  }
}
} // namespace
} // namespace coexec

TORCH_LIBRARY_IMPL(_, Fake, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&coexec::intercept>());
}
