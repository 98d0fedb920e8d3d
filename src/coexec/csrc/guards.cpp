// Does an exception handler of the user's code cover the current instruction? Decides whether an op that can raise on
// values is completed before Python passes it.
#include <pybind11/pybind11.h>
#include <cstring>
#include <string>
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

constexpr int kInstruction = 2; // bytes

struct Opcodes {
  int push_exc_info, with_except_start;
};

const Opcodes& opcodes() {
  static const Opcodes known = [] {
    pybind11::object map = pybind11::module_::import("opcode").attr("opmap");
    return Opcodes{map["PUSH_EXC_INFO"].cast<int>(), map["WITH_EXCEPT_START"].cast<int>()};
  }();
  return known;
}

// What an exception at `offset` of some code meets first: where it goes on, and how much of the value stack is left.
struct Handler {
  int target = -1, depth = 0;
};

Handler handler_of(const std::string& table, int offset) {
  auto* begin = reinterpret_cast<const unsigned char*>(table.data());
  Table t{begin, begin + table.size()};
  while (t.more()) {
    int start = t.varint() * 2, length = t.varint() * 2, target = t.varint() * 2, depth = t.varint() >> 1;
    if (offset >= start && offset < start + length)
      return {target, depth};
  }
  return {};
}

std::string bytes_of(PyCodeObject* code, const char* name) {
  PyObject* bytes = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), name);
  std::string s = bytes ? std::string(PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes)) : std::string();
  Py_XDECREF(bytes);
  PyErr_Clear();
  return s;
}

enum class Manager { Unknown, LetsPass, Ours };

// Whose `__exit__` a `with` will call.
Manager manager_of(PyObject* exit) {
  PyObject* manager = exit && PyMethod_Check(exit) ? PyMethod_GET_SELF(exit) : nullptr;
  PyObject* module =
      manager ? PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(manager)), "__module__") : nullptr;
  const char* text = module && PyUnicode_Check(module) ? PyUnicode_AsUTF8(module) : nullptr;
  std::string name = text ? text : "";
  Py_XDECREF(module);
  PyErr_Clear();
  if (name == "coexec.api")
    return Manager::Ours;
  // Grad modes, autocast, profiler ranges ...: they restore something, and let the error pass.
  bool torchs = name.rfind("torch.", 0) == 0 && name.rfind("torch.testing", 0) != 0;
  return torchs ? Manager::LetsPass : Manager::Unknown;
}

// From the innermost handler outwards, until one may look at the error, or the step's own `with` is met: what is around
// that is not in the step.
bool covered(PyCodeObject* code, int offset, const void* frame) {
  std::string table = bytes_of(code, "co_exceptiontable"), ops = bytes_of(code, "co_code");
  auto op = [&](int at) { return static_cast<unsigned char>(ops[at]); };
  for (Handler h = handler_of(table, offset); h.target >= 0; h = handler_of(table, h.target)) {
    if (op(h.target) != opcodes().push_exc_info) // a clean-up of the compiler's own
      continue;
    if (op(h.target + kInstruction) != opcodes().with_except_start)
      return true;
    Manager m = manager_of(on_stack(frame, h.depth));
    if (m != Manager::LetsPass)
      return m == Manager::Unknown;
  }
  return false;
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
  auto frames = location_frames(frame_);
  for (size_t i = 0; i < l.chain.size(); i++) {
    const auto& f = l.chain[i];
    Py_INCREF(f.code); // instruction addresses stay unique for as long as the program refers to them
    l.guarded |= !is_torch(f.code) && covered(f.code, f.offset, frames[i]);
  }
  return locations.emplace(location, std::move(l)).first->second;
}
} // namespace coexec
