// One co-executed step: its program, its two runners, and what the interceptor does with an op of the user's thread.
#pragma once
#include <pybind11/pybind11.h>
#include "graph_runner.h"
#include "overlap.h"
#include "places.h"
#include "recorder.h"
#include "upcalls.h"
#include "waits.h"

namespace coexec {

enum class Phase : uint8_t { Off, Trace, Coexec };

struct LocationInfo {
  std::vector<FrameSite> chain; // innermost first; strong references
  bool guarded; // an exception handler of the user's code covers the instruction
  bool folded; // in a loop whose passes are one stretch of the graph
  bool lists_vary; // an op on lists of varying length: it is done element by element
};

// A loop of the user's code, in one of the places that it is called from.
struct FoldedLoop {
  std::vector<FrameSite> frames; // the frame that loops, and its callers; references as in `Step::locations`
  int first, last; // instructions of the loop, as FrameSite::offset
  bool holds(const std::vector<FrameSite>& chain) const;
};

struct StepStats {
  int64_t ops = 0, traced_ops = 0, inferred_shapes = 0, feeds = 0, fetches = 0, returned_early = 0;
  int64_t edges_taken = 0; // of the TraceGraph, by iterations in co-execution
};

// One op of a co-executed iteration, as a backend is told about it (backends/spec.py).
struct OpDescription {
  struct Input {
    int32_t slot; // or kExternal
    int32_t sid; // its memory, or -1
    bool latest; // of several passes of a loop that made such a value, the last one did
    size_t nbytes; // of its memory, if it has a number
    int32_t external; // number in Step::external_descriptions, or -1
    const Geometry* geometry;
  };
  Node* node;
  std::shared_ptr<const Variant> variant; // null where the op has none
  std::vector<c10::IValue> args; // tensors left out
  std::vector<Input> inputs;
  std::vector<int32_t> out_slots; // value of each output (the first with its memory and geometry); -1 if undefined
};

struct ExternalDescription {
  int32_t storage; // dense; equal numbers share memory
  size_t nbytes;
  const Geometry* geometry;
};

// Why an iteration left co-execution, and where.
struct Fallback {
  std::string reason; // "new path", "new shapes", "early end" ...
  std::string op; // what Python did
  uint64_t location = 0;
  int32_t after_node = 0;
};

class Step {
 public:
  Step();
  ~Step();

  // --- called by runtime/ with the GIL
  // `overlap`: finish() may leave the graph running.
  void begin(Phase phase, const std::vector<at::Tensor>& step_arguments, StepFrame frame, bool lazy = false,
      bool overlap = false);
  void key_until_left(const at::Tensor& t); // an ordinary tensor took the key over (`p.data = placeholder`)
  // The step returned. True: all writes are done and all placeholders ordinary (or a kernel's error was thrown). False:
  // the graph still runs, see overlap.h; complete() comes before anything else is done with the step.
  bool finish();
  // Waits for a graph that finish() left running. Throws its error, or returns false if the user has seen that already.
  bool complete();
  bool pending() const {
    return overlap_ != nullptr;
  }
  void name_late_error(pybind11::handle error); // holds the GIL
  void abort(); // the step raised
  void drain(); // before fork, in the middle of a step
  void abandon(); // in a forked child
  // The caller's thread computed an iteration by itself (a trial): its arena has free memory again, see begin().
  void ran_plain() {
    co_executed_in_a_row_ = 0;
  }
  void extend(const std::vector<int32_t>& nodes); // the merged trace: TraceGraph node per op
  // From now on the ops of a loop are one stretch of the graph, however often they run: the loop that covers the
  // instructions [first, last] in frame `depth` of the chain of `location`; or the op at `location` alone, if Python
  // has no loop there. The program begins anew.
  void fold_loop(uint64_t location, size_t depth, int first, int last);
  void fold_location(uint64_t location);
  void fold_list(uint64_t location); // and the lists of the op there are loops over their elements
  void mark_loop_conds(const std::vector<int32_t>& nodes);
  // Edges that the plan leaves out, and whether an iteration in co-execution took one.
  void mark_unplanned(const std::vector<std::pair<int32_t, int32_t>>& edges);
  bool taken(int32_t from, int32_t to);
  // Python touches state outside the dispatcher. `resolve`: the tensor's memory goes to the outside for good.
  void barrier(const std::string& name, const std::optional<at::Tensor>& t, bool foreign);

  // --- called by the interceptor
  void handle(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack);

  Program program;
  GraphRunner graph;
  Recorder recorder;
  Phase phase = Phase::Off;
  bool has_trace = false; // the iteration was traced, wholly or from a fallback on
  std::optional<Fallback> fallback;
  StepStats stats;
  WaitLog waits;
  Timeline timeline;
  std::shared_ptr<const SegmentTable> segments;
  std::vector<int32_t> path; // nodes of the last co-executed iteration
  ska::flat_hash_map<uint64_t, LocationInfo> locations;
  bool paused = false;
  Upcalls upcalls;
  bool describing = false; // fill `description` in this iteration
  std::vector<OpDescription> description;
  std::vector<ExternalDescription> external_descriptions;

 private:
  // One flattened tensor argument of the op at hand.
  struct In {
    StorageRecord* record; // null: external
    int32_t slot;
    const Geometry* geometry; // of a placeholder
    const at::Tensor* tensor;
    int16_t arg, element;
  };
  // What a HOST op, which runs at once, overwrote: restored if an op before it turns out to have failed.
  struct HostWrite {
    int64_t index; // in the log
    c10::intrusive_ptr<c10::StorageImpl> storage;
    std::string bytes;
  };
  // An op of the graph that reads memory of the size of a counter, which a HOST op may write.
  struct SmallRead {
    int64_t index; // in the log
    Node* node;
    int16_t arg;
    const c10::StorageImpl* storage; // identity; freed and used again it costs an argument a needless copy
  };
  std::shared_ptr<Iteration> fresh_iteration();
  uint64_t op_location();
  uint64_t op_place();
  uint64_t in_this_state(uint64_t location) const;
  void remember_sequence(uint64_t uid);
  LocationInfo& place(uint64_t location);
  bool by_elements(const OpInfo& info, c10::DispatchKeySet ks, torch::jit::Stack* stack, uint64_t location);
  at::Tensor in_place_of(
      const c10::OperatorHandle& op, c10::DispatchKeySet ks, std::initializer_list<c10::IValue> args);
  std::vector<at::Tensor> unbind(const at::Tensor& self, int64_t dim, c10::DispatchKeySet ks);
  at::Tensor joined(const std::vector<at::Tensor>& elements, int64_t dim, std::vector<int64_t> sizes, bool stacked,
      c10::DispatchKeySet ks);
  OpIdentity identify(const OpInfo* info, uint64_t location);

  bool follow(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack, uint64_t location);
  bool in_turn(const Node& n) const;
  bool match(const Node& n, c10::ArrayRef<c10::IValue> args);
  bool takes(const Node& n, size_t arg, const c10::IValue& number, c10::ArrayRef<c10::IValue> args);
  bool match_input(const Node& n, const at::Tensor& t, int16_t arg, int16_t element);
  const Variant* infer_variant(Node& n, c10::ArrayRef<c10::IValue> args);
  const Variant* find_variant(Node& n, c10::ArrayRef<c10::IValue> args);
  const Variant* add_variant(Node& n, std::shared_ptr<Variant> v);
  void forget_old_variants();
  void note_untold(const Node& n);
  bool cannot_be_told(const Node& n) const;
  void advance(Node& n);
  void take(int32_t child);
  void compute(Node& n, const Variant& v, torch::jit::Stack* stack);
  std::exception_ptr swallowed_error();
  static bool takes_copy(const Node& n, const In& in, size_t k);
  void await_writes_to_copied(const Node& n);
  Patch pass_on(Node& n, const In& in, size_t k, const Geometry* geometry);
  void prepare_args(Node& n, const Variant& v, Entry& e, torch::jit::Stack* stack);
  at::Tensor hand_out(Node& n, const Variant& v, size_t k, c10::ArrayRef<c10::IValue> args);
  c10::SmallVector<c10::IValue, 3> hand_out_returns(Node& n, const Variant& v, c10::ArrayRef<c10::IValue> args);
  bool views_the_outside(const Node& n) const;
  void view(Node& n, const Variant* v, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack);
  void fetch(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack);
  void run_now(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack);
  void sync(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack);
  void host(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack);
  void await_readers(const c10::StorageImpl* s);
  void run_unpublished(Node& n, const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack);
  Node* known_barrier(const OpInfo* info, uint64_t location);
  void close_barrier();
  bool is_final(const at::Tensor& t) const;
  static bool publishes(const SegmentRun& run, int64_t index, const Node& n, const In& in);
  at::Tensor fetched_value(const Node& n, const In& in, int64_t index);
  void describe(Node& n, const Variant* v, Entry& e, c10::ArrayRef<c10::IValue> args);
  int32_t describe_external(const at::Tensor& t);
  void learn_survivors();
  std::unique_ptr<Node> new_node(const TraceOp& t);
  void link_path(const std::vector<int32_t>& nodes);
  void learn_producers(Node& n, const TraceOp& t, const std::vector<int32_t>& nodes);
  static bool learn_arguments(Node& n, const TraceOp& t);
  void learn_variant(Node& n, const TraceOp& t);
  // `waited_s`: what the caller has waited for it already.
  void wait(int64_t n, Wait why, uint64_t location, double waited_s = 0);
  void note_wait(Wait why, uint64_t location, double seconds); // that has just ended
  void issue_warnings(Iteration& it, int64_t n);
  void forget_failed_gradients();
  void note_host_write(const In& in);
  void undo_host_writes(int64_t from);
  void undo_failed();
  void resolve_inputs();
  void resolve_all();
  void fall_back(const std::string& reason, const std::string& op, uint64_t location);
  void to_recorder();
  void leave();
  void put_away();
  bool can_return_early() const;
  void return_early();
  std::optional<Fallback> kernel_error();
  void key_until_written(const at::Tensor& t);
  void note_keyed_views(const c10::IValue& result);
  void drop_keys();
  void learn_native_fills();
  std::vector<c10::StorageImpl*> argument_storages() const;
  void complete_iteration();
  void settle();

  void start_anew();

  StepFrame frame_;
  std::vector<FoldedLoop> folded_loops_;
  std::unordered_map<uint64_t, int> untold_; // how often an op (location and name) had shapes that nothing told
  std::unordered_set<uint64_t> folded_uids_; // of ops in folded loops: those of their backward pass follow
  std::unordered_set<uint64_t> list_uids_; // of ops that stand for an element of a list of varying length
  bool in_list_ = false; // the op at hand is one
  struct ListUids {
    explicit ListUids(Step& s) : step(s), before(s.in_list_) {
      step.in_list_ = true;
    }
    ~ListUids() {
      step.in_list_ = before;
    }
    Step& step;
    bool before;
  };
  Places places_;
  std::vector<StepInput> step_arguments_;
  std::vector<uint64_t> uid_of_sequence_; // autograd node sequence number (relative) -> op that made it
  uint64_t sequence_base_ = 0, last_backward_uid_ = 0;
  std::shared_ptr<Iteration> it_;
  std::vector<std::shared_ptr<Iteration>> iterations_; // see fresh_iteration
  // Of the op at hand: the chain of frames, whether it runs inside the autograd engine, and there the op that it is
  // for.
  uint64_t frames_ = 0, backward_of_ = 0;
  int co_executed_in_a_row_ = 0;
  std::optional<Fallback> failure_; // the kernel's error of this iteration, once it has been undone
  bool in_backward_ = false;
  bool barrier_open_ = false;
  std::vector<Node*> crowded_; // nodes with more variants than are kept
  std::vector<HostWrite> host_writes_; // of this iteration, in order
  std::vector<SmallRead> small_reads_; // of this iteration
  std::vector<at::Tensor> described_storages_; // keeps external memory apart while it is numbered
  Node* current_ = nullptr;
  std::vector<char> passed_; // per node: in this iteration, once at least
  std::vector<uint32_t> met_; // per pair of the program: how often in this iteration
  c10::SmallVector<In, 8> in_; // of the op at hand
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> keyed_; // ordinary tensors that carry the key for now
  // Last log index that wrote memory from outside.
  ska::flat_hash_map<c10::StorageImpl*, int64_t, AddressHash> external_writes_;
  bool overlap_allowed_ = false;
  ForeignUse foreign_use_; // kept if overlap_allowed_
  std::shared_ptr<Overlap> overlap_; // of a call that returned early
};

// Ops of code that runs on real values (a kernel written in Python, a hook of ours) are no part of the step.
struct PausedGuard {
  explicit PausedGuard(Step& s) : step(s), before(s.paused) {
    step.paused = true;
  }
  ~PausedGuard() {
    step.paused = before;
  }
  Step& step;
  bool before;
};

// The step that runs on this thread, or null.
Step*& active_step();
// The real tensor behind a placeholder, for code that is not inside the step that owns it: another thread, or library
// code that the step runs with the interceptor paused. The placeholder itself stays as it is.
at::Tensor real_value(const at::Tensor& t);
void install_interceptor_check();

} // namespace coexec
