// What the core asks of Python in the middle of an iteration. runtime/ sets the functions.
#pragma once
#include <pybind11/pybind11.h>
#include "iteration.h"
#include "location.h"

namespace coexec {

struct Upcalls {
  pybind11::object warn; // (chain, category name, text): a kernel's warning that the GraphRunner met
  pybind11::object forget_gradients; // (): a kernel failed, gradients that Python assigned since do not exist
};

using FrameChain = std::vector<FrameSite>;
// (code object, byte offset) per frame, innermost first. Needs the GIL.
pybind11::list to_python(const FrameChain& chain);

} // namespace coexec
