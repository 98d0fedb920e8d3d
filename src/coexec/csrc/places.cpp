#include "places.h"
#include <marshal.h>
#include <pybind11/pybind11.h>
#include <string_view>

namespace coexec {
namespace {
constexpr int kMarshalWithoutReferences = 2; // later versions write reference counts into the bytes

// Everything that a code object is but its address. One that cannot be written (constants of a strange type) is itself.
uint64_t code_value(PyCodeObject* code) {
  pybind11::error_scope keep_current_error;
  auto bytes = pybind11::reinterpret_steal<pybind11::bytes>(
      PyMarshal_WriteObjectToString(reinterpret_cast<PyObject*>(code), kMarshalWithoutReferences));
  if (!bytes) {
    PyErr_Clear();
    return reinterpret_cast<uintptr_t>(code);
  }
  return std::hash<std::string_view>()(std::string_view(bytes));
}
} // namespace

Places::~Places() {
  for (auto& c : codes_)
    Py_DECREF(c.first);
}

uint64_t Places::value_of(PyCodeObject* code) {
  auto known = codes_.find(code);
  if (known != codes_.end())
    return known->second.value;
  Py_INCREF(code);
  return codes_.emplace(code, Code{code_value(code), false}).first->second.value;
}

uint64_t Places::first_like(uint64_t location, const StepFrame& step) {
  auto known = first_.find(location);
  if (known != first_.end())
    return known->second;
  pybind11::gil_scoped_acquire gil;
  auto chain = location_chain(step);
  uint64_t value = chain.size();
  for (auto& f : chain)
    value = mix(mix(value, value_of(f.code)), f.offset);
  auto [first, is_new] = by_value_.emplace(value, location);
  first_.emplace(location, first->second);
  if (is_new)
    for (auto& f : chain)
      codes_.find(f.code)->second.kept = true;
  else
    repetitions_.push_back(location);
  return first->second;
}

void Places::forget_repetitions() {
  if (repetitions_.empty())
    return;
  for (auto location : repetitions_)
    first_.erase(location);
  repetitions_.clear();
  std::vector<PyCodeObject*> repeated;
  for (auto& c : codes_)
    if (!c.second.kept)
      repeated.push_back(c.first);
  for (auto* code : repeated)
    codes_.erase(code);
  for (auto* code : repeated) // may run Python: the tables are in order by now
    Py_DECREF(code);
}
} // namespace coexec
