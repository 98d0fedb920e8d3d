// Does an exception handler of the user's code cover the current instruction? Decides whether an op that can raise on
// values is completed before Python passes it.
#include <pybind11/pybind11.h>
#include <cstring>
#include "step.h"

namespace coexec {
namespace {
// One entry of CPython's exception table (Objects/exception_handling_notes.txt): varints of 6 bits, start bit 0x80.
struct Table {
  const unsigned char *p, *end;
  bool more() const {
    return p < end;
  }
  int varint() {
    int b = *p++, v = b & 63;
    while (b & 64) {
      b = *p++;
      v = (v << 6) | (b & 63);
    }
    return v;
  }
};

int push_exc_info() {
  static int opcode = [] {
    PyObject *m = PyImport_ImportModule("opcode"), *map = m ? PyObject_GetAttrString(m, "opmap") : nullptr;
    PyObject* v = map ? PyDict_GetItemString(map, "PUSH_EXC_INFO") : nullptr;
    int r = v ? static_cast<int>(PyLong_AsLong(v)) : -1;
    Py_XDECREF(map);
    Py_XDECREF(m);
    PyErr_Clear();
    return r;
  }();
  return opcode;
}

constexpr int kInstruction = 2; // bytes

// `entered_at`: offset of a `with` whose own handler does not count (it is coexec's), or -1.
bool covered(PyCodeObject* code, int offset, int entered_at) {
  PyObject* table = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_exceptiontable");
  PyObject* bytes = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_code");
  bool found = false;
  if (table && bytes) {
    auto* begin = reinterpret_cast<const unsigned char*>(PyBytes_AS_STRING(table));
    Table t{begin, begin + PyBytes_GET_SIZE(table)};
    auto* ops = reinterpret_cast<const unsigned char*>(PyBytes_AS_STRING(bytes));
    int handler = -1, own = -1; // each instruction is in one entry, that of its innermost handler
    while (t.more()) {
      int start = t.varint() * 2, length = t.varint() * 2, target = t.varint() * 2;
      t.varint(); // stack depth and lasti
      if (offset >= start && offset < start + length)
        handler = target;
      if (entered_at >= 0 && entered_at + kInstruction >= start && entered_at + kInstruction < start + length)
        own = target;
    }
    // A handler that the user wrote starts so; the compiler's own clean-ups do not.
    found = handler >= 0 && handler != own && ops[handler] == push_exc_info();
  }
  Py_XDECREF(table);
  Py_XDECREF(bytes);
  PyErr_Clear();
  return found;
}

// torch's own `with` and `finally` blocks do not look at the error.
bool is_torch(PyCodeObject* code) {
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  return file && std::strstr(file, "/torch/");
}
} // namespace

LocationInfo& Step::place(uint64_t location) {
  auto it = locations.find(location);
  if (it != locations.end())
    return it->second;
  pybind11::gil_scoped_acquire gil;
  LocationInfo l{location_chain(frame_), false, false, false};
  l.folded = std::any_of(folded_loops_.begin(), folded_loops_.end(), [&](auto& loop) { return loop.holds(l.chain); });
  for (auto& f : l.chain) {
    Py_INCREF(f.code); // instruction addresses stay unique for as long as the program refers to them
    int entered_at = &f == &l.chain.back() ? frame_.entered_at : -1;
    l.guarded |= !is_torch(f.code) && covered(f.code, f.offset, entered_at);
  }
  return locations.emplace(location, std::move(l)).first->second;
}
} // namespace coexec
