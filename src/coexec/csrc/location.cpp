#define Py_BUILD_CORE 1
#include "location.h"
#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000
#error "coexec knows the frames of CPython 3.11, 3.12 and 3.13 only"
#endif
extern "C" {
#include <internal/pycore_frame.h>
#include <opcode.h>
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

#if PY_VERSION_HEX < 0x030C0000
// Forms of PRECALL that make the call themselves, one instruction before the CALL that makes it until CPython has
// specialised the code (in the eighth call of a function): `sum(losses)`, `repr(loss)`, `numpy.asarray(x)`.
bool calls_early(uint8_t opcode) {
  switch (opcode) {
    case PRECALL_BUILTIN_CLASS:
    case PRECALL_BUILTIN_FAST_WITH_KEYWORDS:
    case PRECALL_METHOD_DESCRIPTOR_FAST_WITH_KEYWORDS:
    case PRECALL_NO_KW_BUILTIN_FAST:
    case PRECALL_NO_KW_BUILTIN_O:
    case PRECALL_NO_KW_ISINSTANCE:
    case PRECALL_NO_KW_LEN:
    case PRECALL_NO_KW_LIST_APPEND:
    case PRECALL_NO_KW_METHOD_DESCRIPTOR_FAST:
    case PRECALL_NO_KW_METHOD_DESCRIPTOR_NOARGS:
    case PRECALL_NO_KW_METHOD_DESCRIPTOR_O:
    case PRECALL_NO_KW_STR_1:
    case PRECALL_NO_KW_TUPLE_1:
    case PRECALL_NO_KW_TYPE_1:
      return true;
    default:
      return false;
  }
}
constexpr int kToCall = 2; // code units: PRECALL, and one of cache
#endif

inline const void* instruction(Frame* f) {
#if PY_VERSION_HEX >= 0x030D0000
  return f->instr_ptr;
#elif PY_VERSION_HEX >= 0x030C0000
  return f->prev_instr;
#else
  const _Py_CODEUNIT* at = f->prev_instr;
  return calls_early(static_cast<uint8_t>(_Py_OPCODE(*at))) ? at + kToCall : at;
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

StepFrame step_frame(int levels, bool block) {
  StepFrame s;
  s.thread = PyThreadState_Get();
  Frame* f = top(s.thread);
  for (int i = 0; i < levels && f; i++) {
    f = f->previous;
    while (f && !is_python(f))
      f = f->previous;
  }
  (block ? s.last : s.stop) = f;
  return s;
}

template <class Visit>
static void each_frame(const StepFrame& step, const Visit& visit) {
  for (Frame* f = top(step.thread); f && f != step.stop; f = f->previous) {
    if (is_python(f))
      visit(f);
    if (f == step.last)
      break;
  }
}

uint64_t location_hash(const StepFrame& step) {
  uint64_t h = 0x243F6A8885A308D3ull;
  each_frame(step, [&](Frame* f) { h = (h ^ reinterpret_cast<uintptr_t>(instruction(f))) * 0x9E3779B97F4A7C15ull; });
  return h ^ (h >> 29);
}

std::vector<FrameSite> location_chain(const StepFrame& step) {
  std::vector<FrameSite> chain;
  each_frame(step, [&](Frame* f) {
    PyCodeObject* code = code_of(f);
    auto at = static_cast<const char*>(instruction(f)) - reinterpret_cast<const char*>(_PyCode_CODE(code));
    chain.push_back({code, static_cast<int>(at)});
  });
  return chain;
}

std::vector<const void*> location_frames(const StepFrame& step) {
  std::vector<const void*> frames;
  each_frame(step, [&](Frame* f) { frames.push_back(f); });
  return frames;
}

PyObject* on_stack(const void* frame, int depth) {
  auto* f = static_cast<Frame*>(const_cast<void*>(frame));
  return f->localsplus[code_of(f)->co_nlocalsplus + depth - 1];
}
} // namespace coexec
