// Tracing phase: every op runs at once on real tensors and is written down.
#pragma once
#include <c10/util/flat_hash_map.h>
#include <torch/library.h>
#include <unordered_set>
#include "program.h"
#include "recycled.h"

namespace coexec {

constexpr size_t kStateBytes = 64; // a step counter: what HOST ops may write

// A value of the trace, as coexec.records.ValueRef: (op, output), or (-1, external number).
struct TraceValue {
  int32_t producer;
  int32_t output;
  bool operator==(const TraceValue& o) const {
    return producer == o.producer && output == o.output;
  }
};

// Which op of the iteration this is. See Step::identify.
struct OpIdentity {
  uint64_t location, uid;
  bool folded; // the uid stands for any of the passes of a loop
};

struct TraceInput {
  TraceValue value;
  const Geometry* geometry;
  c10::StorageImpl* storage; // identity only
};

// Inline storage, and used again in the next trace: allocations are what recording costs.
struct TraceOp {
  const OpInfo* info = nullptr;
  Kind kind = Kind::Compute;
  uint64_t location = 0, uid = 0;
  bool folded = false;
  int32_t node = -1; // already matched (the prefix after a fallback): nothing else is filled
  c10::SmallVector<Arg, 4> args;
  c10::SmallVector<TraceInput, 3> inputs;
  c10::SmallVector<int32_t, 1> returns;
  c10::SmallVector<Output, 1> outputs;
  c10::SmallVector<const Geometry*, 1> geometries; // per output
  c10::SmallVector<size_t, 1> nbytes; // per output
  c10::SmallVector<c10::StorageImpl*, 1> storages; // per output
  c10::SmallVector<int16_t, 2> writes;

  void reset() {
    info = nullptr;
    kind = Kind::Compute;
    location = uid = 0;
    folded = false;
    node = -1;
    args.clear();
    inputs.clear();
    returns.clear();
    outputs.clear();
    geometries.clear();
    nbytes.clear();
    storages.clear();
    writes.clear();
  }
};

struct TraceExternal {
  int32_t storage; // dense number
  size_t nbytes;
  int32_t step_argument;
  bool foreign;
};

// True if code that knows nothing of PyTorch can write this memory (NumPy, DLPack). See foreign.cpp.
bool is_foreign(const c10::StorageImpl* s);
void mark_foreign(const c10::Storage& s); // counted: one per living array
void unmark_foreign(const c10::StorageImpl* s);

// Sparse, nested, quantized, subclass with __torch_dispatch__, conjugate bit ...: not a plain strided CPU tensor.
bool is_special(const c10::TensorImpl& t);

// One Arg per schema argument; `on_input(tensor, arg, element)` is called for each flattened tensor input.
// Returns false if an argument makes the op effectful (a Generator, an object).
template <class OnInput>
bool encode_args(
    const OpInfo& info, c10::ArrayRef<c10::IValue> stack, c10::SmallVectorImpl<Arg>* out, OnInput&& on_input);

class Recorder {
 public:
  void begin(std::vector<c10::StorageImpl*> step_arguments);
  // The validated prefix of an iteration that fell back.
  void begin_with_prefix(std::vector<c10::StorageImpl*> step_arguments, const std::vector<Node*>& prefix);
  void register_value(const c10::Storage& s, const Geometry* g, TraceValue v);

  // Ordinal of this (location, op) pair in the iteration, counted from 0.
  uint32_t occurrence(uint64_t location, uint64_t name_hash) {
    return counts_[mix(location, name_hash)]++;
  }
  // Runs the op below our key and appends it. `guarded`: a handler of the user covers the current instruction.
  void record(const OpInfo* info, const OpIdentity& id, bool guarded, const c10::OperatorHandle& op,
      c10::DispatchKeySet ks, torch::jit::Stack* stack);
  void record_pseudo(const OpInfo* info, Kind kind, const OpIdentity& id, const at::Tensor* t);
  void classify_host_ops(); // once, when the trace has ended

  Recycled<TraceOp> ops;
  std::vector<TraceExternal> externals;
  bool complete = false;
  std::string other_device; // of a tensor that an op met, if it is neither the CPU nor meta
  // Locations of aten::empty whose memory native code fills through its pointer: real memory from the start.
  std::unordered_set<uint64_t> native_fills;
  // Ops (location and name) whose output metadata cannot be told before they ran: recorded as SYNC.
  std::unordered_set<uint64_t> untold;

 private:
  struct Known {
    // Keeps the address from being reused, not the memory.
    c10::weak_intrusive_ptr<c10::StorageImpl> alive{c10::intrusive_ptr<c10::StorageImpl>()};
    int32_t external_storage = -1; // dense number, or -1 if an op of the trace made it
    c10::SmallVector<std::pair<const Geometry*, TraceValue>, 2> values;

    void reset() {
      alive.reset();
      values.clear();
    }
  };
  // What is known about memory; `external`: it comes from outside, if it is new.
  Known& known(c10::StorageImpl* p, bool external);
  TraceInput input(const at::Tensor& t);
  void note_device(const c10::TensorImpl& t);
  void describe_outputs(TraceOp& op, c10::ArrayRef<c10::IValue> before, c10::ArrayRef<c10::IValue> results);
  void make_external(const TraceOp& op);
  void forget_results(TraceOp& op);
  static void forget_outputs(TraceOp& op);
  void classify_host_state();
  TraceValue outside_value(const TraceInput& i, ska::flat_hash_map<c10::StorageImpl*, int32_t>* numbers);

  Recycled<Known> known_;
  ska::flat_hash_map<c10::StorageImpl*, uint32_t, AddressHash> number_of_; // in known_
  ska::flat_hash_map<uint64_t, uint32_t> counts_;
  std::vector<c10::StorageImpl*> step_arguments_;
  int32_t external_storages_ = 0;
  std::unordered_set<uint64_t> host_uids_; // ops that were HOST for what was read from them; kept from trace to trace
};

template <class OnInput>
bool encode_args(
    const OpInfo& info, c10::ArrayRef<c10::IValue> stack, c10::SmallVectorImpl<Arg>* out, OnInput&& on_input) {
  bool plain = true;
  out->reserve(stack.size());
  for (size_t i = 0; i < stack.size(); i++) {
    const auto& v = stack[i];
    Arg& a = out->emplace_back(Arg{Arg::Static});
    switch (info.args[i].cls) {
      case ArgClass::Tensor:
        if (!v.isTensor() || !v.toTensor().defined()) {
          a.type = Arg::Undefined;
        } else if (auto* t = v.toTensor().unsafeGetTensorImpl(); t->is_wrapped_number()) {
          a.type = Arg::Wrapped;
          a.wrapped_dtype = t->dtype().toScalarType();
          a.value = wrapped_value(*t);
        } else {
          a.type = Arg::Tensor;
          on_input(v.toTensor(), static_cast<int16_t>(i), int16_t(-1));
        }
        break;
      case ArgClass::TensorList:
      case ArgClass::OptTensorList: {
        if (v.isNone()) {
          a.type = Arg::Undefined;
          break;
        }
        a.type = Arg::List;
        int16_t k = 0;
        for (const auto& e : v.toListRef()) {
          bool defined = e.isTensor() && e.toTensor().defined();
          a.present.push_back(defined);
          if (defined)
            on_input(e.toTensor(), static_cast<int16_t>(i), k);
          k++;
        }
        break;
      }
      case ArgClass::Number:
        a.type = Arg::Number;
        a.value = v;
        plain &= !v.isSymInt();
        break;
      case ArgClass::Static:
        a.value = v;
        break;
      case ArgClass::Object:
        a.type = Arg::Object;
        a.value = !v.isNone();
        plain &= v.isNone();
        break;
    }
  }
  return plain;
}

} // namespace coexec
