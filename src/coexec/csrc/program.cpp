#include "program.h"
#include <cstring>

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

void append_facts(const Geometry& g, std::vector<int64_t>* facts) {
  facts->push_back(static_cast<int64_t>(g.dtype));
  facts->push_back(g.lazy_bits);
  facts->push_back(g.offset);
  facts->push_back(static_cast<int64_t>(g.sizes.size()));
  facts->insert(facts->end(), g.sizes.begin(), g.sizes.end());
  facts->insert(facts->end(), g.strides.begin(), g.strides.end());
}

static void append_number(const c10::IValue& v, std::vector<int64_t>* facts) {
  if (v.isInt()) {
    facts->push_back(v.toInt());
  } else if (v.isIntList()) {
    auto l = v.toIntList();
    facts->push_back(static_cast<int64_t>(l.size()));
    for (int64_t x : l)
      facts->push_back(x);
  } else if (v.isDouble()) {
    double x = v.toDouble();
    int64_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    facts->push_back(bits);
  } else {
    facts->push_back(v.isBool() ? v.toBool() : -1);
  }
}

std::vector<int64_t> facts_of(const Node& n, const Variant& v) {
  std::vector<int64_t> facts;
  for (const auto* g : v.inputs)
    append_facts(*g, &facts);
  for (const auto* g : v.outputs) {
    facts.push_back(g != nullptr);
    if (g)
      append_facts(*g, &facts);
  }
  size_t number = 0;
  for (size_t i = 0; i < n.args.size(); i++) {
    if (n.args[i].type != Arg::Number)
      continue;
    const auto& value = v.numbers[number++];
    facts.push_back(value.isInt() ? 1 : value.isIntList() ? 2 : value.isDouble() ? 3 : value.isNone() ? 4 : 5);
    if (n.info->args[i].shapes)
      append_number(value, &facts);
  }
  return facts;
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
  pairs_.clear();
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
  n->pair = pairs_.emplace(mix(n->location, n->info->name_hash), static_cast<int32_t>(pairs_.size())).first->second;
  slots_ += static_cast<int32_t>(n->outputs.size());
  slot_node_.resize(slots_, n->id);
  nodes_.push_back(std::move(n));
  return *nodes_.back();
}
} // namespace coexec
