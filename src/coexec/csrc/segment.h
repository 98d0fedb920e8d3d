// Segments of the plan as the GraphRunner runs them: a stretch of the log that a compiled artifact computes in one
// call.
#pragma once
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include "expression.h"
#include "iteration.h"

namespace coexec {

// One of the tensors among the step's arguments, in flattening order: they predict the inputs of segments that run
// ahead. Weak: a step that drops its batch frees it.
struct StepInput {
  c10::weak_intrusive_ptr<c10::StorageImpl> alive{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::StorageImpl* storage = nullptr; // identity; null if it is no ordinary strided CPU tensor
  const Geometry* geometry = nullptr;
};

// Where one input of the artifact comes from: an argument of the op at `position`.
struct SegmentInput {
  int32_t position; // of the first node that uses it, within the segment
  int16_t input; // flattened input of that node (tensors)
  int32_t slot; // value of an earlier segment, or kExternal
  std::vector<int32_t> alternatives; // other values that may stand there, by path (the data side of Case Select)
  bool latest = true; // false: of several passes that made `slot`, not the last: only Python's own entry says which
  const Geometry* geometry; // null for a number; of an artifact with symbolic sizes only an example
  Pattern pattern; // what its geometry must be, of an artifact with symbolic sizes
  int16_t arg, element; // of the number
  at::ScalarType number_type;
  bool written; // the segment writes this memory
  int32_t storage; // inputs with equal numbers shared memory when the artifact was compiled

  // Prediction of an external, kept from iteration to iteration by the GraphRunner.
  mutable int32_t step_argument = -1;
  mutable c10::weak_intrusive_ptr<c10::StorageImpl> last{c10::intrusive_ptr<c10::StorageImpl>()};
  mutable const Geometry* last_geometry = nullptr;
  mutable bool has_last = false;
  mutable int misses = 0;
};

struct SegmentOutput {
  int32_t slot; // the base value of its memory
};

// What an argument of a node was when the artifact was compiled; anything else voids a run.
struct SegmentCheck {
  int32_t position;
  int16_t input;
  int32_t slot; // value of this or an earlier segment; kExternal: the segment's input `segment_input`
  int32_t sid; // memory that the value lives in
  int32_t segment_input; // the artifact's input that stands for this argument, or -1: made in the segment
};

struct SegmentNumberCheck { // a number that varied elsewhere but is a constant of this artifact
  int32_t position;
  int16_t arg;
  c10::IValue value;
  int32_t expression; // it follows sizes instead; -1: it does not
};

// Where an artifact with symbolic sizes reads a symbol.
struct SymbolSource {
  int32_t input, dimension;
};

// What the elements of an input must be that the segment uses as an index: in [0, size), or in [-size, size). A
// compiled loop finds another one when what it writes in place is half written: looked at before a run, which is left
// to replay then, and with it eager's error.
struct IndexRange {
  int32_t input;
  int64_t size;
  int32_t expression; // of the size, of an artifact with symbolic sizes; -1: it is `size`
  bool from_end;
  std::optional<int64_t> ignored;
};

// Two inputs that share memory which the segment writes: compiled code sees one as a part of the other, or both as
// separate, so their distance must be what it was.
struct SegmentDistance {
  int32_t input, reference;
  int64_t bytes; // from where the reference begins to where the input does
  int32_t expression; // of the bytes, of an artifact with symbolic sizes; -1: they are `bytes`
};

// One compiled version of a planned segment: for the shapes that it was made for, or for all that its patterns allow.
struct Segment {
  std::vector<int32_t> nodes;
  std::vector<SymbolSource> symbols; // empty: for one set of shapes
  std::vector<Expression> expressions; // over the symbols; patterns and number checks refer to them
  std::vector<Expression> guards; // the artifact is valid where all of them are true
  std::vector<Pattern> patterns; // per node, of facts_of() its variant
  std::vector<std::shared_ptr<const Variant>> variants; // per node; null where the op has none
  bool commit = false; // writes in place, after Python validated all of it
  bool random = false;
  std::vector<SegmentInput> inputs;
  std::vector<SegmentOutput> outputs;
  std::vector<int32_t> mutated; // inputs whose new content follows the outputs (functional only)
  std::vector<SegmentCheck> checks;
  std::vector<SegmentNumberCheck> number_checks;
  std::vector<IndexRange> ranges;
  std::vector<SegmentDistance> distances;
  std::vector<SegmentCheck> fetches; // what the Output Fetching ops that are served from inside read
  std::unique_ptr<torch::inductor::AOTIModelContainerRunnerCpu> artifact; // null: replayed
  // Just adopted: compiled and replayed passes take turns, and the slower executor leaves (benefit is measured here, on
  // live data and beside the user's Python, not in the compile process).
  static constexpr int kTrialPasses = 16;
  mutable int trial = kTrialPasses;
  mutable std::vector<double> compiled_s, replayed_s;
  mutable std::atomic<bool> slower{false};
  mutable int64_t runs = 0, discards = 0;
  mutable std::string last_discard;
};

// A segment of the plan: a stretch of the log, and the artifacts that may compute it.
struct PlannedSegment {
  int32_t id = -1;
  std::vector<int32_t> nodes;
  std::vector<std::shared_ptr<Segment>> versions; // loaded ones, tried in order; changed between iterations only
  // A number that the versions have as a constant was seen to vary: none of them may run.
  std::atomic<bool> stale{false};
  int64_t passes = 0; // whole passes of Python through it, by whatever executor
  // How often Python passed through it with which shapes. Bounded: the rarest are forgotten.
  static constexpr size_t kSignatures = 64;
  std::vector<std::pair<uint64_t, int64_t>> signatures;
  uint64_t last_signature = 0;
  mutable int64_t unserved = 0; // passes that no version was made for, while there were some; and why the latest
  mutable std::atomic<const char*> last_misfit{""};
  // Passes that were replayed because Python stopped before it named an input, and the node that takes the latest one.
  mutable int64_t awaited = 0;
  mutable int32_t awaited_node = -1;

  void note_pass(uint64_t signature);
};

struct SegmentTable {
  std::vector<std::shared_ptr<PlannedSegment>> by_id;
};

// A compiled run in progress: what it was started with. Read by the PythonRunner when it takes a published value.
struct SegmentRun {
  const Segment* segment;
  int64_t base; // log index of the first node
  std::vector<at::Tensor> used; // per input
  std::vector<int64_t> symbols; // their values, of an artifact with symbolic sizes
};

// Was the artifact made for this entry's shapes?
bool fits_entry(const Segment& s, size_t position, const Entry& e, const std::vector<int64_t>& symbols);
// Reads the symbols from the geometries of the inputs. False: the artifact was not made for these.
bool bind_symbols(const Segment& s, const std::vector<const Geometry*>& inputs, std::vector<int64_t>* symbols);

// Does the log agree with what the run was started with, for the entries [from, to)? Returns the reason if not.
std::optional<std::string> disagreement(Iteration& it, const SegmentRun& run, int64_t from, int64_t to);

at::Tensor segment_argument(const Entry& e, int16_t input); // an external one
at::Tensor computed_argument(Iteration& it, const Entry& e, int16_t input); // one made in this iteration
// A number of an op as the artifact takes it, a 0-dim tensor; and whether it has the type that it was compiled for.
at::Tensor number_tensor(const Entry& e, const SegmentInput& in);
bool number_fits(const Entry& e, const SegmentInput& in);
bool same_bytes(const at::Tensor& a, const at::Tensor& b);

// Called inside a compiled graph, on the GraphRunner's thread.
SegmentRun*& current_run();
Iteration*& current_iteration();

} // namespace coexec
