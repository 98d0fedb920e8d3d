// Compiled segments of the plan, as the GraphRunner runs them.
#pragma once
#include "iteration.h"

namespace coexec {

// The tensors among the step's arguments, in flattening order: they predict the inputs of segments that run ahead.
struct StepInputs {
  std::vector<at::Tensor> tensors;
};

struct SegmentTable {};

} // namespace coexec
