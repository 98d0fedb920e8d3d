// The TraceGraph as the native runners follow it. Built by Python (runtime/) from merged traces; read-only while a step
// is in co-execution.
#pragma once
#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include "geometry.h"
#include "location.h"
#include "op_info.h"

namespace coexec {

constexpr int32_t kStart = 0, kEnd = 1; // node numbers of START and END, as in graph/
constexpr int32_t kExternal = -1; // "slot" of a value that no op of the iteration made

// One argument of an op, as recorded. Tensors are not here but in the op's flattened inputs.
struct Arg {
  enum Type : uint8_t {
    Tensor, // one flattened input
    Undefined, // undefined tensor, or None where a tensor may stand
    Wrapped, // a Python number that arrives as a 0-dim tensor; value in `value`
    List, // tensor list; `present[i]` says whether element i is a flattened input
    Static, // must be equal
    Number, // must be equal unless `fed`
    Object, // Generator, Storage ...: only whether there is one (the op is SYNC, it gets Python's own)
  } type;
  bool fed = false; // seen to vary: any value matches
  bool snapshot = false; // the external is written by the PythonRunner (host op): copied when it is passed on
  c10::IValue value;
  at::ScalarType wrapped_dtype = at::ScalarType::Undefined;
  std::vector<bool> present;
};

struct Output {
  bool defined = false;
  int16_t same_arg = -1; // returns this very argument object (in-place ops)
  int16_t alias = -1; // flattened input whose memory it shares; -1: fresh memory
};

// Output metadata for one combination of input metadata. Shared: a compiled segment keeps those that it was made for.
struct Variant : std::enable_shared_from_this<Variant> {
  std::vector<const Geometry*> inputs; // per flattened input
  std::vector<c10::IValue> numbers; // per Number argument; see ArgInfo::shapes
  std::vector<const Geometry*> outputs; // null if undefined
  std::vector<size_t> nbytes; // of the storage, for fresh outputs
  bool observed = false; // by running the op; others come from meta kernels
  // PythonRunner's thread only. Of an observed one: does the op's meta kernel say what really happened?
  enum class Meta : uint8_t { Untried, Agrees, Disagrees } meta = Meta::Untried;
  mutable std::atomic<bool> wrong{false}; // inferred, and the kernel then chose other strides: set by the GraphRunner
};

// What may come after a node.
struct Child {
  int32_t id;
  bool taken = false; // by an iteration in co-execution. Written by the PythonRunner, which alone reads it
  bool unplanned = false; // only the first trace went there: the GraphRunner does not count with it. Set with the plan
};

struct Node {
  int32_t id;
  const OpInfo* info;
  Kind kind;
  uint64_t location = 0;
  uint64_t uid = 0;
  int32_t pair = 0; // number of its (location, op); a loop that is not folded has several nodes of one
  int16_t passes_on = -1; // input whose memory a computation returns, not as the argument itself
  bool folded = false; // in a loop: may be passed several times
  bool guarded = false; // a handler of the user's covers it: an error has to come at once
  bool loop_cond = false; // what follows it decides whether a loop goes on; set with the plan
  std::vector<Arg> args;
  std::vector<int32_t> returns; // per schema return: -1 one tensor, n >= 0 a list of n tensors
  std::vector<Output> outputs;
  std::vector<int16_t> writes; // flattened inputs whose memory is written
  std::vector<std::vector<int32_t>> producers; // per flattened input: slots it may come from (kExternal included)
  std::vector<Child> children;
  bool no_meta = false; // its meta kernel raises: see shapes.cpp
  static constexpr size_t kManyVariants = 256; // sizes that only ever grow must not be searched and kept for ever
  std::vector<std::shared_ptr<Variant>> variants; // the latest used first
  int32_t slot_base = 0; // first slot of the outputs
  int32_t segment = -1; // segment it belongs to, and its position in it
  int32_t position = 0;

  Child* child(int32_t to) {
    auto c = std::find_if(children.begin(), children.end(), [&](const Child& x) { return x.id == to; });
    return c == children.end() ? nullptr : &*c;
  }
  // The node that comes next as far as the plan knows; -1: it depends, or nothing was planned.
  int32_t planned_child() const {
    int32_t only = -1;
    for (const Child& c : children) {
      if (!c.unplanned && only >= 0)
        return -1;
      only = c.unplanned ? only : c.id;
    }
    return only;
  }
  bool makes_memory() const {
    return std::any_of(outputs.begin(), outputs.end(), [](const Output& o) { return o.defined && o.alias < 0; });
  }
};

// A variant as a flat list of integers, in which those that follow sizes are found by position: for every input and
// output (dtype, lazy bits, offset, dimensions, sizes, strides), for every number that decides shapes its value.
void append_facts(const Geometry& g, std::vector<int64_t>* facts);
std::vector<int64_t> facts_of(const Node& n, const Variant& v);

// Metadata and attribute match, shared by the PythonRunner and by recording.
bool same_value(const c10::IValue& a, const c10::IValue& b);
// Can `a` stand for `b` without changing output metadata?
bool same_shape_number(const ArgInfo& info, const c10::IValue& a, const c10::IValue& b);
// The number in a 0-dim tensor, read without the dispatcher (we are inside it).
c10::IValue wrapped_value(const c10::TensorImpl& t);

class Program {
 public:
  Program();
  void clear(); // but for START and END
  Node& add(std::unique_ptr<Node> n); // numbered in order of addition; gives it its slots
  Node& at(int32_t id) {
    return *nodes_[id];
  }
  size_t size() const {
    return nodes_.size();
  }
  int32_t slots() const {
    return slots_;
  }
  size_t pairs() const {
    return pairs_.size();
  }
  int32_t node_of_slot(int32_t slot) const {
    return slot_node_[slot];
  }

  // Memory (by slot) that Python was seen to hold beyond its segment. Written by either runner.
  void note_survivor(int32_t slot) {
    std::lock_guard<std::mutex> l(survivors_m_);
    survivors_.insert(slot);
  }
  std::unordered_set<int32_t> survivors() {
    std::lock_guard<std::mutex> l(survivors_m_);
    return survivors_;
  }

 private:
  std::mutex survivors_m_;
  std::unordered_set<int32_t> survivors_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<int32_t> slot_node_;
  std::unordered_map<uint64_t, int32_t> pairs_; // number per (location, op)
  int32_t slots_ = 0;
};

} // namespace coexec
