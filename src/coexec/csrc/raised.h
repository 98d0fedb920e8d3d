// A kernel's error is thrown again wherever Python waits for what it prevented.
#pragma once
#include <exception>

namespace coexec {
// Throws what `e` holds. An exception that carries a Python error hands it over once: the second time pybind11 ends the
// process. So each throw gets one of its own.
[[noreturn]] void throw_again(const std::exception_ptr& e);
} // namespace coexec
