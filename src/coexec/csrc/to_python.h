#pragma once
// Values and errors on their way to Python.
// (A part of module.cpp, and of no other file: PyTorch's headers for Python take far longer to compile than this does.)
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include "step.h"

namespace coexec {
namespace py = pybind11;
namespace {

// Errors of kernels keep the Python type that eager gives them.
template <class F>
auto translated(F&& f) {
  try {
    return f();
  } catch (py::error_already_set&) {
    throw;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    throw py::error_already_set();
  }
}

py::object to_python(const c10::IValue& v) {
  if (v.isNone())
    return py::none();
  if (v.isList()) {
    auto l = v.toListRef();
    py::tuple t(l.size());
    for (size_t i = 0; i < l.size(); i++)
      t[i] = to_python(l[i]);
    return t;
  }
  if (v.isDevice())
    return py::str(v.toDevice().str());
  if (v.isTensor() || v.isObject() || v.isCapsule() || v.isGenerator())
    return py::str(v.tagKind());
  return torch::jit::toPyObject(v);
}

template <class V, class F>
py::tuple tuple_of(const V& v, F&& f) {
  py::tuple t(v.size());
  for (size_t i = 0; i < v.size(); i++)
    t[i] = f(v[i]);
  return t;
}

} // namespace
} // namespace coexec
