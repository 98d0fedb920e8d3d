#include "upcalls.h"
#include <torch/csrc/Exceptions.h>
#include "step.h"

namespace coexec {
namespace {
// Calls a Python function from an op of the step; what it raises goes to the user as the op's own error would.
template <class... Args>
void call_python(const pybind11::object& function, Args&&... args) {
  if (!function || function.is_none())
    return;
  try {
    function(std::forward<Args>(args)...);
  } catch (pybind11::error_already_set& raised) {
    raised.restore();
    python_error e;
    e.persist();
    throw e;
  }
}

// As PyTorch words a warning of C++ code for Python.
std::string warning_text(const c10::Warning& w) {
  const auto& at = w.source_location();
  if (at.file == nullptr || w.verbatim())
    return w.msg();
  return w.msg() + " (Triggered internally at " + at.file + ":" + std::to_string(at.line) + ".)";
}
} // namespace

pybind11::list to_python(const FrameChain& chain) {
  pybind11::list l;
  for (const auto& f : chain)
    l.append(pybind11::make_tuple(
        pybind11::reinterpret_borrow<pybind11::object>(reinterpret_cast<PyObject*>(f.code)), f.offset));
  return l;
}

// Warnings of the first `n` entries, in order. One that the user's filters make an error is raised here.
void Step::issue_warnings(Iteration& it, int64_t n) {
  if (!it.has_warnings())
    return;
  pybind11::gil_scoped_acquire gil;
  PausedGuard outside_the_step(*this);
  for (const auto& [index, warning] : it.take_warnings(n)) {
    uint64_t location = program.at(path[index]).location;
    auto known = locations.find(location);
    bool deprecation = std::holds_alternative<c10::Warning::DeprecationWarning>(warning.type());
    call_python(upcalls.warn, to_python(known == locations.end() ? FrameChain() : known->second.chain),
        deprecation ? "DeprecationWarning" : "UserWarning", warning_text(warning));
  }
}

// Eager would not have come to the lines that assigned these.
void Step::forget_failed_gradients() {
  pybind11::gil_scoped_acquire gil;
  PausedGuard outside_the_step(*this);
  try {
    call_python(upcalls.forget_gradients);
  } catch (python_error& raised) { // the kernel's error is the one that the user must see
    raised.restore();
    PyErr_WriteUnraisable(upcalls.forget_gradients.ptr());
  }
}
} // namespace coexec
