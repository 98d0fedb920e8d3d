#include "geometry.h"
#include <c10/util/hash.h>
#include <mutex>
#include <unordered_set>

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
} // namespace

static const Geometry* intern_new(const c10::TensorImpl& t);

const Geometry* intern(Geometry g) {
  static std::mutex m;
  static auto* table = new std::unordered_set<Geometry, Hash>(); // leaked on purpose: outlives static destructors
  std::lock_guard<std::mutex> l(m);
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
} // namespace coexec
