#include "raised.h"
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

namespace coexec {
void throw_again(const std::exception_ptr& e) {
  try {
    std::rethrow_exception(e);
  } catch (const pybind11::error_already_set& raised) {
    pybind11::gil_scoped_acquire gil;
    PyErr_Restore(raised.type().inc_ref().ptr(), raised.value().inc_ref().ptr(), raised.trace().inc_ref().ptr());
    throw pybind11::error_already_set();
  } catch (const python_error& raised) {
    throw python_error(raised);
  }
}
} // namespace coexec
