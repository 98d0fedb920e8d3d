// Ops on lists of tensors whose length varies: a list is a loop over its elements. `unbind` is a `select` per element;
// `stack` and `cat` copy each one to its place. So a sequence of another length is no other path.
#include <ATen/core/LegacyTypeDispatch.h>
#include "step.h"

namespace coexec {
namespace {
c10::OperatorHandle find_op(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

struct ElementOps {
  c10::OperatorHandle select = find_op("aten::select", "int"), slice = find_op("aten::slice", "Tensor"),
                      zeros = find_op("aten::zeros", ""), copy = find_op("aten::copy_", "");
};

const ElementOps& element_ops() {
  static const ElementOps ops;
  return ops;
}

// Elements that lie and weigh alike, so that the result is a plain contiguous tensor of their type.
bool plain_and_alike(const std::vector<at::Tensor>& elements) {
  if (elements.empty())
    return false;
  auto alike = [&](const at::Tensor& t) {
    return t.defined() && !is_special(*t.unsafeGetTensorImpl()) && !lazy_bits_of(*t.unsafeGetTensorImpl()) &&
        t.dtype() == elements[0].dtype() && t.dim() == elements[0].dim() && (t.dim() < 3 || t.is_contiguous()) &&
        !t.unsafeGetTensorImpl()->is_wrapped_number();
  };
  return elements[0].dim() < 6 && std::all_of(elements.begin(), elements.end(), alike);
}
} // namespace

// An op of the step in place of another one: its arguments from `args`, its only result.
at::Tensor Step::in_place_of(
    const c10::OperatorHandle& op, c10::DispatchKeySet ks, std::initializer_list<c10::IValue> args) {
  torch::jit::Stack stack(args);
  handle(op, ks, &stack);
  return stack.back().toTensor();
}

std::vector<at::Tensor> Step::unbind(const at::Tensor& self, int64_t dim, c10::DispatchKeySet ks) {
  std::vector<at::Tensor> elements;
  for (int64_t k = 0, n = self.size(dim); k < n; k++)
    elements.push_back(in_place_of(element_ops().select, ks, {self, dim, k}));
  return elements;
}

at::Tensor Step::joined(const std::vector<at::Tensor>& elements, int64_t dim, std::vector<int64_t> sizes, bool stacked,
    c10::DispatchKeySet ks) {
  const auto& ops = element_ops();
  // Not uninitialized memory, which no check of a compiled segment could compare.
  at::Tensor out = in_place_of(ops.zeros, ks,
      {c10::IValue(c10::List<int64_t>(sizes)), c10::IValue(elements[0].scalar_type()), c10::IValue(c10::kStrided),
          c10::IValue(at::Device(at::kCPU)), c10::IValue(false)});
  int64_t at = 0;
  for (const auto& x : elements) {
    int64_t next = at + (stacked ? 1 : x.size(dim));
    at::Tensor place = stacked ? in_place_of(ops.select, ks, {out, dim, at})
                               : in_place_of(ops.slice, ks, {out, dim, at, next, int64_t(1)});
    in_place_of(ops.copy, ks, {place, x, false});
    at = next;
  }
  return out;
}

// Does the op element by element, if it is one whose lists were seen to vary. False: it is to be treated like others.
bool Step::by_elements(const OpInfo& info, c10::DispatchKeySet ks, torch::jit::Stack* stack, uint64_t location) {
  if (info.list_op == ListOp::None || !(place(location).lists_vary || (in_backward_ && list_uids_.count(backward_of_))))
    return false;
  auto args = torch::jit::last(*stack, info.args.size());
  int64_t dim = args[1].toInt();
  ListUids uids(*this);
  c10::IValue result;
  if (info.list_op == ListOp::Unbind) {
    at::Tensor self = args[0].toTensor();
    if (is_special(*self.unsafeGetTensorImpl()) || dim < -self.dim() || dim >= self.dim())
      return false;
    result = c10::IValue(unbind(self, dim < 0 ? dim + self.dim() : dim, ks));
  } else {
    bool stacked = info.list_op == ListOp::Stack;
    auto elements = args[0].toTensorVector();
    if (!plain_and_alike(elements))
      return false;
    std::vector<int64_t> sizes = elements[0].sizes().vec();
    auto dims = static_cast<int64_t>(sizes.size()) + stacked;
    dim = dim < 0 ? dim + dims : dim;
    if (dim < 0 || dim >= dims)
      return false;
    if (stacked)
      sizes.insert(sizes.begin() + dim, 0);
    else
      sizes[dim] = 0;
    for (const auto& x : elements) {
      for (int64_t d = 0; d < x.dim(); d++)
        if (int64_t e = d + (stacked && d >= dim); e != dim && x.size(d) != sizes[e])
          return false; // the op itself says best what is wrong
      if (!stacked && x.dim() == 1 && x.size(0) == 0)
        return false; // old code has it join with anything
      sizes[dim] += stacked ? 1 : x.size(dim);
    }
    result = c10::IValue(joined(elements, dim, std::move(sizes), stacked, ks));
  }
  torch::jit::drop(*stack, info.args.size());
  stack->push_back(std::move(result));
  return true;
}
} // namespace coexec
