#define Py_BUILD_CORE 1
#include "location.h"
#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000
#error "coexec knows the frames of CPython 3.11, 3.12 and 3.13 only"
#endif
extern "C" {
#include <internal/pycore_frame.h>
}
#undef Py_BUILD_CORE

namespace coexec {
namespace {
using Frame = _PyInterpreterFrame;

inline Frame* top(PyThreadState* ts) {
#if PY_VERSION_HEX >= 0x030D0000
  return ts->current_frame;
#else
  return ts->cframe->current_frame;
#endif
}

inline PyCodeObject* code_of(Frame* f) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<PyCodeObject*>(f->f_executable);
#else
  return f->f_code;
#endif
}

inline const void* instruction(Frame* f) {
#if PY_VERSION_HEX >= 0x030D0000
  return f->instr_ptr;
#else
  return f->prev_instr;
#endif
}

// Frames of 3.12+ that only stand for a C call carry no user code.
inline bool is_python(Frame* f) {
#if PY_VERSION_HEX >= 0x030C0000
  return f->owner != FRAME_OWNED_BY_CSTACK;
#else
  (void)f;
  return true;
#endif
}
} // namespace

StepFrame step_frame(int levels) {
  StepFrame s;
  s.thread = PyThreadState_Get();
  Frame* f = top(s.thread);
  for (int i = 0; i < levels && f; i++) {
    f = f->previous;
    while (f && !is_python(f))
      f = f->previous;
  }
  s.stop = f;
  return s;
}

uint64_t location_hash(const StepFrame& step) {
  uint64_t h = 0x243F6A8885A308D3ull;
  for (Frame* f = top(step.thread); f && f != step.stop; f = f->previous)
    if (is_python(f))
      h = (h ^ reinterpret_cast<uintptr_t>(instruction(f))) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 29);
}

std::vector<FrameSite> location_chain(const StepFrame& step) {
  std::vector<FrameSite> chain;
  for (Frame* f = top(step.thread); f && f != step.stop; f = f->previous) {
    if (!is_python(f))
      continue;
    PyCodeObject* code = code_of(f);
    auto at = static_cast<const char*>(instruction(f)) - reinterpret_cast<const char*>(_PyCode_CODE(code));
    chain.push_back({code, static_cast<int>(at)});
  }
  return chain;
}
} // namespace coexec
