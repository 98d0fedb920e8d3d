// GraphRunner: one native thread per co-executed step. Executes the log of an iteration in order, never holds the GIL.
#pragma once
#include <thread>
#include "iteration.h"
#include "segment.h"

namespace coexec {

struct GraphStats {
  double exec_s = 0, stall_s = 0; // since the last reset
  int64_t replayed_ops = 0;
  int64_t moved_results = 0; // strides that a meta kernel got wrong
  int64_t compiled_runs = 0, discarded_runs = 0;
  int64_t case_select_waits = 0, loop_cond_waits = 0; // for Python to say which way it goes
};

// Writes the live inputs of one segment to a file while it is replayed, for the check of its artifact.
struct Capture {
  // Which bytes of a tensor's storage: those that it touches (from a multiple of 16 on, or from its first one on).
  // Where several inputs look at them: the given ones, or, where the pass may have other sizes, all of a small storage.
  enum class Extent : uint8_t { Touched = 0, FromTheTensor = 1, Given = 2, Whole = 3 };
  struct Item {
    int32_t position;
    int16_t input; // flattened input, or -1 for a number
    int16_t arg, element; // of a number
    at::ScalarType number_type;
    Extent extent; // of a tensor
    // Set by the GraphRunner: where the bytes lie in the file, how many they are, and where in the storage they began.
    int64_t start = -1, nbytes = 0, low = 0;
  };
  int32_t segment = -1;
  std::shared_ptr<const Segment> only; // if there is one: only of a pass with the shapes that it was made for
  std::string path;
  bool with_generator = false;
  std::vector<Item> items;
  int64_t generator_start = -1, generator_nbytes = 0;
  bool failed = false;
  bool begun() const {
    return generator_start >= 0 || std::any_of(items.begin(), items.end(), [](const Item& i) { return i.start >= 0; });
  }
};

class GraphRunner {
 public:
  explicit GraphRunner(Program* program) : program_(program) {}
  ~GraphRunner();
  // Takes over the caller's thread state and starts on the iteration at once.
  void start(
      std::shared_ptr<Iteration> it, std::shared_ptr<const SegmentTable> segments, std::vector<StepInput> inputs);
  // Blocks until the current iteration is left (its log is closed and executed, or failed).
  void join_iteration();
  void stop(); // ends the thread
  void abandon(); // in a forked child: the thread does not exist there
  std::shared_ptr<Capture> capture; // set by Python between iterations
  GraphStats& stats() {
    return stats_;
  }

 private:
  void loop();
  void run_iteration();
  int64_t run_planned(const PlannedSegment& p, int64_t at);
  int64_t run_segment(const Segment& s, SegmentRun& run);
  void note_trial(const Segment& s, bool compiled, double seconds);
  int64_t give_up(const Segment& s, int64_t at, const std::string& why);
  const PlannedSegment* segment_at(int64_t at);
  const Segment* choose(const PlannedSegment& p, SegmentRun* run);
  enum class Fit : uint8_t { Yes, No, Unknown };
  Fit fit(const Segment& s, SegmentRun* run, int32_t* unknown);
  bool gather_inputs(const Segment& s, SegmentRun* run, int32_t* unknown, int32_t* guess);
  const Geometry* predicted_geometry(const SegmentInput& in);
  bool misfit(const char* why) { // returns false
    misfit_ = why;
    return false;
  }
  at::Tensor predict(const SegmentInput& in);
  at::Tensor computed(const SegmentInput& in, int64_t before);
  const Geometry* geometry_of(int32_t slot, int64_t before);
  void note_misses(const SegmentRun& run);
  void remember_sources(const Segment& s, int64_t at);
  void remember_source(const SegmentInput& in, const Entry& e);
  void learn_sources(const Entry& e, int64_t at);
  std::optional<std::string> unexpected_survivor(const Segment& s, int64_t at);
  void commit(const Segment& s, int64_t at, const SegmentRun& run, std::vector<at::Tensor>& results);
  void capture_inputs(Entry& e);
  void note_wait(int64_t at);
  // Waits for Python by way of `wait(&seconds)`, before it can go on at `node`.
  template <class F>
  auto stalled(int32_t node, F&& wait) {
    double before = stats_.stall_s;
    auto result = wait(&stats_.stall_s);
    if (stats_.stall_s != before) {
      auto now = Clock::now();
      auto waited = std::chrono::duration<double>(stats_.stall_s - before);
      auto start = now - std::chrono::duration_cast<Clock::duration>(waited);
      CallSpans::add(it_->spans->graph, {Span::Kind::Wait, 0, node, 0, 1, start, now});
    }
    return result;
  }
  void execute(Entry& e);
  void adopt_thread_state();

  Program* program_;
  std::thread thread_;
  std::mutex m_;
  std::condition_variable cv_, idle_cv_;
  bool stop_ = false, busy_ = false;
  std::shared_ptr<Iteration> it_; // set under m_; owned by the thread while busy_
  std::shared_ptr<const SegmentTable> segments_;
  std::vector<StepInput> inputs_;
  int threads_ = 0; // of the caller, as is the next
  unsigned float_mode_ = 0; // flushing of denormal numbers; 0 where it is not known
  GraphStats stats_;
  std::vector<int64_t> seen_at_; // per node: log index of its latest entry; see geometry_of
  const Segment* timed_ = nullptr; // a segment in its trial that is being replayed, with the seconds so far
  double timed_s_ = 0;
  // One that was given up because Python waits for it while it waits for an input: replayed, to predict it from now on.
  const Segment* learning_ = nullptr;
  int64_t learning_base_ = 0;
  const char* misfit_ = ""; // why the latest version that was tried did not fit
  int64_t replay_until_ = 0; // log index up to which a discarded segment is replayed
};

} // namespace coexec
