// What the two runners of one iteration share: the log of validated ops, the memory of the values, and the waits.
//
// Single producer (the PythonRunner, on the user's thread), single consumer (the GraphRunner's thread).
#pragma once
#include <array>
#include <condition_variable>
#include <exception>
#include <thread>
#include "placeholder.h"
#include "program.h"
#include "timeline.h"

namespace coexec {

// Blocking with the GIL held would stop a graph that needs Python, and Ctrl-C.
class WithoutGil {
 public:
  WithoutGil() : held_(Py_IsInitialized() && PyGILState_Check()) {
    if (held_)
      state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (held_)
      PyEval_RestoreThread(state_);
  }
  bool held() const {
    return held_;
  }

 private:
  bool held_;
  PyThreadState* state_ = nullptr;
};

// Whether a wait runs Python's signal handlers, which may raise. Cleaning up must not be left half done.
enum class Signals : uint8_t { WithGil, Always, Never };

// A tensor among the arguments: the GraphRunner makes it, over the real memory, before the call. We never keep the
// user's TensorImpl (autograd decides by reference counts), only memory.
struct Patch {
  int16_t arg; // position on the op's stack
  int16_t element; // position in the tensor list, or -1
  int16_t input; // flattened input
  int32_t slot; // value that Python really passed; kExternal: `external`
  int32_t sid; // memory it lives in, or -1
  const Geometry* geometry;
  c10::intrusive_ptr<c10::StorageImpl> external; // memory from outside
};

struct Entry {
  Node* node = nullptr;
  const Variant* variant = nullptr;
  std::vector<c10::IValue> args; // empty if there is nothing to execute
  c10::SmallVector<Patch, 3> patches;
  c10::SmallVector<int32_t, 2> frees; // memory that Python dropped before this op
  int32_t first_sid = 0; // memory of its first output; the others follow
  bool awaited = false; // Python waits behind it and is not back from it: it still holds the arguments
};

// Why a runner waits; indexes the stall counters. Overlap: outside the step, for a call that returned early.
enum class Wait : uint8_t { Fetch, Sync, StepEnd, Fallback, ForeignWrite, CaseSelect, Input, Overlap, Count };

// Memory has numbers, "sids". A value that a node makes when it is passed for the first time lives in the memory with
// the number of its slot; a node that is passed again, in a loop, makes its values in memory of its own (`new_sids`).
class Iteration {
 public:
  Iteration() = default;
  // For a new iteration; nobody else may hold it.
  void reset(size_t slots);
  ~Iteration();

  // --- PythonRunner
  Entry& next_entry(); // to be filled, then publish()
  // `heavy`: worth the GraphRunner's attention at once. Light ops become visible in batches: each time the runners'
  // cores exchange a cache line, it costs as much as matching an op.
  void publish(bool heavy);
  void flush(); // wakes the GraphRunner if it sleeps
  void close(); // no more entries will come
  int64_t size() const {
    return written_.load(std::memory_order_relaxed);
  }
  // Blocks until the first `n` entries are executed; throws the kernel's error if one of them failed, and what a signal
  // handler raised. Releases the GIL while it blocks. Returns the seconds stalled.
  // `interrupt`: signal handlers run even if the caller has released the GIL, as most bindings of PyTorch do. Only
  // where their exception changes nothing.
  double wait_done(int64_t n, bool raise = true, Signals signals = Signals::WithGil);
  const c10::Storage& memory(int32_t sid) const {
    return values_[sid >> kValueBits]->memory[sid & kValueMask];
  }
  // Hardly any room is left for more ops or values: the iteration has to be gone on with by plain tracing.
  bool full() const;
  // The first of `n` consecutive numbers for the memory of an op that was passed before. The PythonRunner.
  int32_t new_sids(int32_t n);
  void track(StorageRecord* r);
  void storage_died(StorageRecord* r); // any thread
  void record_resolved(StorageRecord* r);
  // Storages of the placeholders that are alive, kept so. Any thread.
  std::vector<c10::Storage> live_storages();
  // Memory of these values was filled by native code through its pointer (see make_placeholder). What another thread
  // does tells nothing about the next iteration, and is not noted.
  void note_native_fill(int32_t slot) {
    if (std::this_thread::get_id() == owner_)
      native_fills.push_back(slot);
  }
  std::vector<int32_t> native_fills; // slots; PythonRunner's thread only
  bool failed() const {
    return failed_at_.load() >= 0;
  }
  int64_t failed_at() const {
    return failed_at_.load();
  }
  std::exception_ptr error() const {
    return error_;
  }
  int64_t death(int32_t sid) const { // log size when Python dropped it; INT64_MAX if it never did
    return values_[sid >> kValueBits]->death[sid & kValueMask];
  }

  // --- GraphRunner
  Entry& entry(int64_t i) {
    return chunks_[i >> kBits][i & kMask];
  }
  // Waits until entry `i` exists; false if the log was closed before it.
  bool wait_entry(int64_t i, double* stalled_s);
  int64_t validated() const {
    return size_.load(std::memory_order_acquire);
  }
  bool closed() const {
    return closed_.load(std::memory_order_acquire);
  }
  void set_memory(int32_t sid, c10::Storage s) {
    values_[sid >> kValueBits]->memory[sid & kValueMask] = std::move(s);
  }
  void set_done(int64_t n);
  void set_failed(int64_t at, std::exception_ptr e);
  void orphan(); // in a forked child: nobody goes on with it
  void release_frees(Entry& e);
  int64_t done() const {
    return done_.load(std::memory_order_acquire);
  }
  bool record_alive(int32_t sid);
  // Memory that value `slot` lives in, of several the one made last; -1 if it was not made in this iteration.
  int32_t sid_of(int32_t slot) const {
    return sid_of_[slot].load(std::memory_order_relaxed);
  }
  void set_sid(int32_t slot, int32_t sid) {
    sid_of_[slot].store(sid, std::memory_order_relaxed);
  }

  std::shared_ptr<CallSpans> spans; // set before the runners start; each writes its own
  bool lazy = false; // the GraphRunner starts only when Python needs a value (the paper's Table 2)
  std::atomic<bool> demanded{false};

  // A value published from inside a compiled graph, for an Output Fetching op (log index). See segment.h.
  void publish_value(int64_t index, at::Tensor value);
  bool published(int64_t index, at::Tensor* value);
  // As wait_done, but also returns when `index` has been published.
  double wait_done_or_published(int64_t n, int64_t index, at::Tensor* value, Signals signals = Signals::WithGil);
  // --- compiled runs ahead of Python (see segment.h)
  enum class Ahead { Validated, Void };
  // Waits until Python validated the entries [i, i + n) and went on; Void if it did not, or if it waits for a value
  // that the run does not publish.
  Ahead wait_validated(int64_t i, int64_t n, double* stalled_s);
  // Waits for entry `i` as an input of a run that has not started: false if Python waits for one of ours meanwhile.
  bool wait_input(int64_t i, double* stalled_s);
  // The GraphRunner is about to run a segment; false if it must not: Python does something else just then.
  bool begin_run(const struct SegmentRun* run);
  void end_run(); // and has put back what the run must not have changed
  // The PythonRunner, when all entries are executed: no run is under way that expects what Python has not said, and
  // none begins before `allow_run`. What Python draws or seeds meanwhile stays.
  void prevent_run();
  void allow_run();
  // Calls f(run) under the lock if a run is in progress; the PythonRunner checks a published value's run with it.
  template <class F>
  void with_run(F&& f) {
    std::lock_guard<std::mutex> l(m_);
    if (run_)
      f(*run_);
  }
  void void_run(const std::string& why); // the PythonRunner: it used what Python did not mean
  std::string void_reason() {
    std::lock_guard<std::mutex> l(m_);
    return void_reason_;
  }
  // The GraphRunner found that a compiled run must not be used: what came out of it is void.
  void discard_published(int64_t from, int64_t to);

  // Warnings of kernels, which belong to Python's thread: by the log index of their op.
  void warn(int64_t index, c10::Warning w);
  bool has_warnings() const {
    return has_warnings_.load(std::memory_order_acquire);
  }
  std::vector<std::pair<int64_t, c10::Warning>> take_warnings(int64_t n); // of the first `n` entries

  bool published_unlocked(int64_t index) const;

 private:
  static constexpr int kBits = 8;
  static constexpr int64_t kMask = (1 << kBits) - 1;
  std::vector<std::unique_ptr<Entry[]>> chunks_; // capacity reserved: never reallocates while both runners run
  // Each runner polls what the other one stores: not on one cache line.
  std::atomic<int64_t> written_{
      0}; // entries that the PythonRunner has filled; size_ of them are visible to the GraphRunner
  alignas(64) std::atomic<int64_t> size_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> failed_at_{-1};
  std::atomic<bool> closed_{false}, graph_sleeps_{false};
  std::atomic<int64_t> python_waits_for_{INT64_MAX};
  std::mutex m_;
  std::condition_variable graph_cv_, python_cv_;
  std::exception_ptr error_;

  // What belongs to a piece of memory. Each array is written by another runner: not on one cache line.
  static constexpr int kValueBits = 9;
  static constexpr int32_t kValueMask = (1 << kValueBits) - 1;
  struct Values {
    std::array<c10::Storage, 1 << kValueBits> memory; // written by the GraphRunner, read by Python after done()
    alignas(64) std::array<std::atomic<StorageRecord*>, 1 << kValueBits> records{};
    std::array<int64_t, 1 << kValueBits> death;
    Values() {
      death.fill(INT64_MAX);
    }
  };
  void make_room(int32_t sids);
  std::vector<std::unique_ptr<Values>> values_; // by sid; capacity reserved: never reallocates while both runners run
  std::atomic<int32_t> sids_{0}; // given out
  std::mutex records_m_; // deaths may come from any thread
  std::vector<std::atomic<int32_t>> sid_of_; // by slot; written by Python before it publishes the op
  std::thread::id owner_; // the PythonRunner's thread: its own frees need no lock
  c10::SmallVector<int32_t, 8> own_frees_;
  std::vector<int32_t> pending_frees_;
  std::atomic<bool> has_frees_{false};
  std::vector<std::pair<int64_t, at::Tensor>> published_;
  std::vector<std::pair<int64_t, c10::Warning>> warnings_; // guarded by m_
  std::atomic<bool> has_warnings_{false};
  std::atomic<int64_t> python_wants_{-1};
  const struct SegmentRun* run_ = nullptr; // guarded by m_
  bool run_prevented_ = false; // guarded by m_
  std::atomic<bool> run_void_{false};
  std::string void_reason_; // guarded by m_
};

} // namespace coexec
