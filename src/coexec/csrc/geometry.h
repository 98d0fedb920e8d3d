// Geometry of a tensor over its storage. Interned: two equal geometries are one object, so the hot path compares
// pointers.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace coexec {

// The memory is to be read conjugated or negated (`x.conj()` is a view): bit 0 and bit 1.
inline uint8_t lazy_bits_of(const c10::TensorImpl& t) {
  return static_cast<uint8_t>(t.is_conj() ? 1 : 0) | static_cast<uint8_t>(t.is_neg() ? 2 : 0);
}
inline void set_lazy_bits(c10::TensorImpl& t, uint8_t bits) {
  t._set_conj(bits & 1);
  t._set_neg(bits & 2);
}

struct Geometry {
  at::ScalarType dtype;
  int64_t offset;
  c10::SmallVector<int64_t, 4> sizes, strides;
  uint8_t lazy_bits = 0;

  bool operator==(const Geometry& o) const {
    return dtype == o.dtype && offset == o.offset && sizes == o.sizes && strides == o.strides &&
        lazy_bits == o.lazy_bits;
  }
};

// Never freed: a program meets few distinct geometries, and every stage may keep the pointer.
const Geometry* intern(Geometry g);
void hold_geometries(double seconds); // keeps their table locked, for the test of forks
const Geometry* intern_of(const c10::TensorImpl& t);

inline bool matches(const Geometry& g, const c10::TensorImpl& t) {
  return g.dtype == t.dtype().toScalarType() && t.sizes() == c10::IntArrayRef(g.sizes) &&
      t.strides() == c10::IntArrayRef(g.strides) && t.storage_offset() == g.offset && lazy_bits_of(t) == g.lazy_bits;
}

// But for the offset: where in foreign memory a batch begins decides nothing about results.
inline bool matches_shape(const Geometry& g, const c10::TensorImpl& t) {
  return g.dtype == t.dtype().toScalarType() && t.sizes() == c10::IntArrayRef(g.sizes) &&
      t.strides() == c10::IntArrayRef(g.strides) && lazy_bits_of(t) == g.lazy_bits;
}
// Elements lie where `g` says: strides of dimensions of one element may differ.
inline bool lies_alike(const Geometry& g, const c10::TensorImpl& t) {
  if (g.dtype != t.dtype().toScalarType() || t.sizes() != c10::IntArrayRef(g.sizes) || t.storage_offset() != g.offset ||
      lazy_bits_of(t) != g.lazy_bits)
    return false;
  for (size_t d = 0; d < g.sizes.size(); d++)
    if (g.sizes[d] > 1 && t.strides()[d] != g.strides[d])
      return false;
  return true;
}
inline bool same_shape(const Geometry& a, const Geometry& b) {
  return a.dtype == b.dtype && a.sizes == b.sizes && a.strides == b.strides && a.lazy_bits == b.lazy_bits;
}

// An ordinary tensor (no autograd state of ours) over `storage`.
at::Tensor tensor_over(const c10::Storage& storage, const Geometry& g);

// A copy with the same strides (kernels may depend on them), read as the original is. No dispatch key of ours is met.
at::Tensor copy_as_it_lies(const c10::Storage& storage, const Geometry& g);

} // namespace coexec
