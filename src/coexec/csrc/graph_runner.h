// GraphRunner: one native thread per co-executed step. Executes the log of an iteration in order, never holds the GIL.
#pragma once
#include <ATen/ThreadLocalState.h>
#include <thread>
#include "iteration.h"
#include "segment.h"

namespace coexec {

struct GraphStats {
  double exec_s = 0, stall_s = 0; // since the last reset
  int64_t replayed_ops = 0;
  int64_t compiled_runs = 0, discarded_runs = 0;
};

class GraphRunner {
 public:
  explicit GraphRunner(Program* program) : program_(program) {}
  ~GraphRunner();
  // Takes over the caller's thread state and starts on the iteration at once.
  void start(std::shared_ptr<Iteration> it, std::shared_ptr<const SegmentTable> segments, StepInputs inputs);
  // Blocks until the current iteration is left (its log is closed and executed, or failed).
  void join_iteration();
  void stop(); // ends the thread
  void abandon(); // in a forked child: the thread does not exist there
  GraphStats& stats() {
    return stats_;
  }

 private:
  void loop();
  void run_iteration();
  int64_t run_segment(int64_t at); // next log index, or `at` if the segment must be replayed
  void execute(Entry& e);
  void adopt_thread_state();

  Program* program_;
  std::thread thread_;
  std::mutex m_;
  std::condition_variable cv_, idle_cv_;
  bool stop_ = false, busy_ = false;
  std::shared_ptr<Iteration> it_; // set under m_; owned by the thread while busy_
  std::shared_ptr<const SegmentTable> segments_;
  StepInputs inputs_;
  std::optional<at::ThreadLocalState> state_;
  int threads_ = 0;
  bool flush_denormal_ = false;
  GraphStats stats_;
  std::vector<int64_t> replay_until_; // per segment: scratch
};

} // namespace coexec
