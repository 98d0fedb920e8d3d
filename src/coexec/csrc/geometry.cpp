#include "geometry.h"
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/hash.h>
#include <chrono>
#include <cstring>
#include <thread>
#include <unordered_set>
#include "process_lock.h"

namespace coexec {
namespace {
struct Hash {
  size_t operator()(const Geometry& g) const {
    size_t h = c10::hash_combine(static_cast<size_t>(g.dtype) + (g.lazy_bits << 8), static_cast<size_t>(g.offset));
    for (auto s : g.sizes)
      h = c10::hash_combine(h, static_cast<size_t>(s));
    for (auto s : g.strides)
      h = c10::hash_combine(h, static_cast<size_t>(s) + 7);
    return h;
  }
};

ProcessMutex table_m;
} // namespace

static const Geometry* intern_new(const c10::TensorImpl& t);

const Geometry* intern(Geometry g) {
  static auto* table = new std::unordered_set<Geometry, Hash>(); // leaked on purpose: outlives static destructors
  std::lock_guard<ProcessMutex> l(table_m);
  return &*table->insert(std::move(g)).first;
}

const Geometry* intern_of(const c10::TensorImpl& t) {
  // The same few geometries come again and again while an iteration is recorded.
  constexpr size_t kRecent = 8;
  static thread_local const Geometry* recent[kRecent] = {};
  static thread_local size_t next = 0;
  for (const auto* g : recent)
    if (g && matches(*g, t))
      return g;
  return recent[next++ % kRecent] = intern_new(t);
}

void hold_geometries(double seconds) {
  std::lock_guard<ProcessMutex> l(table_m);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

static const Geometry* intern_new(const c10::TensorImpl& t) {
  Geometry g{t.dtype().toScalarType(), t.storage_offset(), {}, {}, lazy_bits_of(t)};
  g.sizes.assign(t.sizes().begin(), t.sizes().end());
  g.strides.assign(t.strides().begin(), t.strides().end());
  return intern(std::move(g));
}

at::Tensor tensor_over(const c10::Storage& storage, const Geometry& g) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(g.dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(g.sizes, g.strides, g.offset);
  if (g.lazy_bits)
    set_lazy_bits(*t.unsafeGetTensorImpl(), g.lazy_bits);
  return t;
}

at::Tensor copy_as_it_lies(const c10::Storage& storage, const Geometry& g) {
  c10::impl::ExcludeDispatchKeyGuard no_key(c10::DispatchKey::Fake);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor t = tensor_over(storage, g);
  set_lazy_bits(*t.unsafeGetTensorImpl(), 0);
  at::Tensor copy = at::empty_strided(t.sizes(), t.strides(), t.options());
  bool expanded = false;
  for (size_t d = 0; d < g.sizes.size(); d++)
    expanded |= g.strides[d] == 0 && g.sizes[d] > 1;
  if (!expanded)
    copy.copy_(t);
  else if (copy.numel()) // no kernel writes one element twice
    std::memcpy(copy.mutable_data_ptr(), t.const_data_ptr(), copy.storage().nbytes());
  set_lazy_bits(*copy.unsafeGetTensorImpl(), g.lazy_bits);
  return copy;
}
} // namespace coexec
