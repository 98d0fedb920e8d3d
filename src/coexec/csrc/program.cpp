#include "program.h"

namespace coexec {

bool same_value(const c10::IValue& a, const c10::IValue& b) {
  if (a.isInt())
    return b.isInt() && a.toInt() == b.toInt();
  if (a.isDouble()) {
    // Bitwise: -0.0 and NaN are values like any other.
    if (!b.isDouble())
      return false;
    double x = a.toDouble(), y = b.toDouble();
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (a.isNone())
    return b.isNone();
  if (a.isBool())
    return b.isBool() && a.toBool() == b.toBool();
  if (a.isIntList()) {
    if (!b.isIntList())
      return false;
    auto x = a.toIntList(), y = b.toIntList();
    if (x.size() != y.size())
      return false;
    for (size_t i = 0; i < x.size(); i++)
      if (x.get(i) != y.get(i))
        return false;
    return true;
  }
  if (a.isList()) {
    if (!b.isList())
      return false;
    auto x = a.toListRef(), y = b.toListRef();
    if (x.size() != y.size())
      return false;
    for (size_t i = 0; i < x.size(); i++)
      if (!same_value(x[i], y[i]))
        return false;
    return true;
  }
  if (a.tagKind() != b.tagKind())
    return false;
  return a == b;
}

bool same_shape_number(const ArgInfo& info, const c10::IValue& a, const c10::IValue& b) {
  if (info.shapes)
    return same_value(a, b);
  return a.isInt() == b.isInt() && a.isDouble() == b.isDouble() && a.isBool() == b.isBool() &&
      a.isNone() == b.isNone() && a.isComplexDouble() == b.isComplexDouble();
}

c10::IValue wrapped_value(const c10::TensorImpl& t) {
  const void* p = t.data();
  switch (t.dtype().toScalarType()) {
    case at::kDouble:
      return *static_cast<const double*>(p);
    case at::kFloat:
      return static_cast<double>(*static_cast<const float*>(p));
    case at::kLong:
      return *static_cast<const int64_t*>(p);
    case at::kInt:
      return static_cast<int64_t>(*static_cast<const int32_t*>(p));
    case at::kBool:
      return *static_cast<const bool*>(p);
    case at::kComplexDouble:
      return *static_cast<const c10::complex<double>*>(p);
    case at::kComplexFloat:
      return static_cast<c10::complex<double>>(*static_cast<const c10::complex<float>*>(p));
    default:
      TORCH_INTERNAL_ASSERT(false, "coexec: a Python number as a tensor of type ", t.dtype().name());
  }
}

Program::Program() {
  clear();
}

void Program::clear() {
  nodes_.clear();
  slot_node_.clear();
  slots_ = 0;
  survivors_.clear();
  for (int i = 0; i < 2; i++) { // START and END
    auto n = std::make_unique<Node>();
    n->info = pseudo_op(i == 0 ? "coexec::start" : "coexec::end");
    n->kind = Kind::View;
    add(std::move(n));
  }
}

Node& Program::add(std::unique_ptr<Node> n) {
  n->id = static_cast<int32_t>(nodes_.size());
  n->slot_base = slots_;
  slots_ += static_cast<int32_t>(n->outputs.size());
  slot_node_.resize(slots_, n->id);
  nodes_.push_back(std::move(n));
  return *nodes_.back();
}
} // namespace coexec
