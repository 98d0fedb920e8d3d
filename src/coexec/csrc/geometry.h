// Geometry of a tensor over its storage. Interned: two equal geometries are one object, so the hot path compares
// pointers.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace coexec {

struct Geometry {
  at::ScalarType dtype;
  int64_t offset;
  c10::SmallVector<int64_t, 4> sizes, strides;

  bool operator==(const Geometry& o) const {
    return dtype == o.dtype && offset == o.offset && sizes == o.sizes && strides == o.strides;
  }
};

// Never freed: a program meets few distinct geometries, and every stage may keep the pointer.
const Geometry* intern(Geometry g);
const Geometry* intern_of(const c10::TensorImpl& t);

inline bool matches(const Geometry& g, const c10::TensorImpl& t) {
  return g.dtype == t.dtype().toScalarType() && t.sizes() == c10::IntArrayRef(g.sizes) &&
      t.strides() == c10::IntArrayRef(g.strides) && t.storage_offset() == g.offset;
}

// But for the offset: where in foreign memory a batch begins decides nothing about results.
inline bool matches_shape(const Geometry& g, const c10::TensorImpl& t) {
  return g.dtype == t.dtype().toScalarType() && t.sizes() == c10::IntArrayRef(g.sizes) &&
      t.strides() == c10::IntArrayRef(g.strides);
}
inline bool same_shape(const Geometry& a, const Geometry& b) {
  return a.dtype == b.dtype && a.sizes == b.sizes && a.strides == b.strides;
}

// An ordinary tensor (no autograd state of ours) over `storage`.
at::Tensor tensor_over(const c10::Storage& storage, const Geometry& g);

} // namespace coexec
