// What coexec needs to know about an operator, read once from its schema and tags.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <string>
#include <vector>

namespace coexec {

// Same numbers as coexec.records.OpKind.
enum class Kind : uint8_t { Compute = 0, View = 1, Fetch = 2, Sync = 3, Barrier = 4, Host = 5 };

enum class ArgClass : uint8_t {
  Tensor, // Tensor or Tensor?
  TensorList, // Tensor[]
  OptTensorList, // Tensor?[]
  Static, // selects a path: bool, str, dtype, layout, device, None ...
  Number, // may vary without a new path: int, float, complex, lists of them
  Object, // Generator, TorchBind ...: if present, the op is effectful
};

// Ops that make a list of tensors of one, or one of a list. See lists.cpp.
enum class ListOp : uint8_t { None, Unbind, Stack, Cat };

struct ArgInfo {
  ArgClass cls;
  bool writes; // the schema says that this argument's memory is written
  bool shapes; // a Number that can decide output metadata by its value; others only by their type (int, float)
};

struct OpInfo {
  const c10::FunctionSchema* schema; // null for pseudo ops
  std::optional<c10::OperatorHandle> handle; // empty for pseudo ops
  std::string name; // with overload
  uint64_t name_hash;
  std::vector<ArgInfo> args;
  size_t n_returns = 0;
  // Writes that the schema does not declare: these arguments, if the bool argument `undeclared_if` is true.
  std::vector<int16_t> undeclared_writes;
  int16_t undeclared_if = -1;
  bool decompose = false; // CompositeImplicitAutograd: arrives whole only under inference mode
  bool in_python = false; // PyTorch's own code behind an op's name: its ops are the step's, like those of any function
  bool pass_through = false; // profiler annotations: no tensor semantics
  bool always_sync = false; // Python waits: data-dependent size, non-tensor result, custom op
  bool sized_by_masks = false; // Python waits if an index is a mask: as many results as it has elements set
  bool is_fetch = false;
  bool is_view = false; // by schema: returns alias an argument, nothing is written
  bool bumps_version = false; // in-place foreach: eager's slow kernel calls `add_` per tensor, which bumps versions
  bool random = false;
  bool heavy = false; // matrix products, convolutions, attention: the GraphRunner should start at once
  bool allocates = false; // returns uninitialized memory (aten::empty and its kin)
  ListOp list_op = ListOp::None;
  bool may_raise = false; // the kernel checks values (an index, a factorization ...)
  bool divides = false; // and rounds: of integers, a kernel that raises if it divides by zero
  bool takes_any_number = false; // that its dtype can hold: arithmetic
  int16_t probability = -1; // this argument is a number from 0 to 1: all that the kernel checks beyond shapes
};

// Interned, never freed; thread-safe.
const OpInfo* op_info(const c10::OperatorHandle& op);
const OpInfo* pseudo_op(const std::string& name);

} // namespace coexec
