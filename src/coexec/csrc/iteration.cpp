#include "iteration.h"
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <chrono>
#include <thread>
#include "raised.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace coexec {
namespace {
constexpr size_t kMaxChunks = 1 << 12; // 1 million ops in one iteration: see full()
constexpr size_t kMaxValueChunks = 1 << 14; // 8 million values
constexpr int64_t kPublishBatch = 8;
constexpr int64_t kWakeBatch = 64; // ops the GraphRunner may lag before it is woken: a wake-up costs as much as 5 ops

double since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

void relax() {
#ifdef __x86_64__
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

void check_signals() {
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    python_error e;
    e.persist();
    throw e;
  }
}
} // namespace

void Iteration::reset(size_t slots) {
  chunks_.reserve(kMaxChunks);
  size_.store(0);
  written_.store(0);
  done_.store(0);
  failed_at_.store(-1);
  closed_.store(false);
  graph_sleeps_.store(false);
  python_waits_for_.store(INT64_MAX);
  python_wants_.store(-1);
  demanded.store(false);
  error_ = nullptr;
  for (int32_t sid = 0, used = sids_.load(); sid < used; sid++) {
    set_memory(sid, c10::Storage());
    auto& v = *values_[sid >> kValueBits];
    v.records[sid & kValueMask].store(nullptr, std::memory_order_relaxed);
    v.death[sid & kValueMask] = INT64_MAX;
  }
  values_.reserve(kMaxValueChunks);
  make_room(static_cast<int32_t>(slots));
  sids_.store(static_cast<int32_t>(slots));
  if (sid_of_.size() != slots)
    sid_of_ = std::vector<std::atomic<int32_t>>(slots);
  for (auto& s : sid_of_)
    s.store(-1, std::memory_order_relaxed);
  owner_ = std::this_thread::get_id();
  own_frees_.clear();
  pending_frees_.clear();
  has_frees_.store(false);
  published_.clear();
  warnings_.clear();
  has_warnings_.store(false);
  native_fills.clear();
  run_ = nullptr;
  run_prevented_ = false;
  run_void_.store(false);
}

Iteration::~Iteration() = default;

void Iteration::make_room(int32_t sids) {
  while (static_cast<int32_t>(values_.size() << kValueBits) < sids) {
    TORCH_CHECK(
        values_.size() < kMaxValueChunks, "coexec: more than ", kMaxValueChunks << kValueBits, " values in one step");
    values_.push_back(std::make_unique<Values>());
  }
}

bool Iteration::full() const {
  constexpr int64_t kReserve = 1 << 16; // more than one op adds
  return size() + kReserve > static_cast<int64_t>(kMaxChunks << kBits) ||
      sids_.load(std::memory_order_relaxed) + kReserve > static_cast<int64_t>(kMaxValueChunks << kValueBits);
}

int32_t Iteration::new_sids(int32_t n) {
  int32_t first = sids_.load(std::memory_order_relaxed);
  make_room(first + n);
  sids_.store(first + n, std::memory_order_release);
  return first;
}

Entry& Iteration::next_entry() {
  int64_t n = size();
  if ((n & kMask) == 0 && static_cast<size_t>(n >> kBits) == chunks_.size()) {
    TORCH_CHECK(chunks_.size() < kMaxChunks, "coexec: more than ", kMaxChunks << kBits, " ops in one step");
    chunks_.push_back(std::make_unique<Entry[]>(1 << kBits));
  }
  Entry& e = entry(n);
  e.frees.assign(own_frees_.begin(), own_frees_.end());
  own_frees_.clear();
  if (has_frees_.load(std::memory_order_relaxed)) {
    std::lock_guard<std::mutex> l(records_m_);
    e.frees.append(pending_frees_.begin(), pending_frees_.end());
    pending_frees_.clear();
    has_frees_.store(false, std::memory_order_relaxed);
  }
  return e;
}

void Iteration::publish(bool heavy) {
  int64_t n = size() + 1, visible = size_.load(std::memory_order_relaxed);
  written_.store(n, std::memory_order_release);
  if (n - visible < kPublishBatch && !heavy)
    return;
  size_.store(n, std::memory_order_release);
  if (graph_sleeps_.load(std::memory_order_relaxed) && (!lazy || demanded.load()) &&
      n - done_.load(std::memory_order_relaxed) >= kWakeBatch)
    flush();
}

void Iteration::flush() {
  // Another thread may be the one that needs a value while the step's own thread waits for it in turn.
  int64_t written = written_.load(std::memory_order_acquire), visible = size_.load();
  while (visible < written && !size_.compare_exchange_weak(visible, written)) {
  }
  // Full barrier: our size_ store and the GraphRunner's graph_sleeps_ store must not miss each other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (graph_sleeps_.load(std::memory_order_relaxed) && graph_sleeps_.exchange(false)) { // one signal per sleep
    std::lock_guard<std::mutex> l(m_);
    graph_cv_.notify_one();
  }
}

void Iteration::close() {
  flush(); // all entries are visible before the end is
  closed_.store(true);
  demanded.store(true);
  flush();
}

bool Iteration::wait_entry(int64_t i, double* stalled_s) {
  auto ready = [&] {
    return (size_.load(std::memory_order_acquire) > i || closed_.load(std::memory_order_acquire)) &&
        (!lazy || demanded.load(std::memory_order_acquire));
  };
  if (!ready()) {
    auto t0 = Clock::now();
    for (int k = 0; k < 600 && !ready(); k++) // about 20 us
      relax();
    if (!ready()) {
      std::unique_lock<std::mutex> l(m_);
      graph_sleeps_.store(true);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      // The time limit bounds what a batched wake-up can leave lying when Python computes something else for long.
      while (!ready()) {
        graph_cv_.wait_for(l, std::chrono::milliseconds(1));
        graph_sleeps_.store(true);
      }
      graph_sleeps_.store(false);
    }
    *stalled_s += since(t0);
  }
  return size_.load(std::memory_order_acquire) > i;
}

Iteration::Ahead Iteration::wait_validated(int64_t i, int64_t n, double* stalled_s) {
  int64_t end = i + n;
  std::optional<Ahead> result;
  auto ready = [&] {
    int64_t size = size_.load(std::memory_order_acquire), wants = python_waits_for_.load();
    bool waits = wants != INT64_MAX;
    if (run_void_.load())
      result = Ahead::Void;
    else if (size > end || (size == end && ((waits && wants >= end) || closed_.load())))
      result = Ahead::Validated;
    else if (closed_.load() || (waits && wants > i && !published_unlocked(python_wants_.load())))
      result = Ahead::Void;
    return result.has_value();
  };
  auto t0 = Clock::now();
  std::unique_lock<std::mutex> l(m_);
  graph_sleeps_.store(true);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  while (!ready())
    graph_cv_.wait_for(l, std::chrono::microseconds(200));
  graph_sleeps_.store(false);
  *stalled_s += since(t0);
  return *result;
}

bool Iteration::wait_input(int64_t i, double* stalled_s) {
  if (size_.load(std::memory_order_acquire) > i)
    return true;
  auto t0 = Clock::now();
  std::unique_lock<std::mutex> l(m_);
  graph_sleeps_.store(true);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool there = false, give_up = false;
  while (!there && !give_up) {
    // Python that waits for what is done, or has been handed out, has only not woken yet.
    int64_t wants = python_waits_for_.load();
    bool stuck = wants != INT64_MAX && wants > done_.load() && !published_unlocked(python_wants_.load());
    give_up = closed_.load() || stuck;
    there = size_.load(std::memory_order_acquire) > i; // last: Python shows its entries before it waits
    if (!there && !give_up)
      graph_cv_.wait_for(l, std::chrono::microseconds(200));
  }
  graph_sleeps_.store(false);
  *stalled_s += since(t0);
  return there;
}

bool Iteration::begin_run(const SegmentRun* run) {
  std::lock_guard<std::mutex> l(m_);
  if (run_prevented_)
    return false;
  run_ = run;
  void_reason_.clear();
  run_void_.store(false);
  return true;
}

void Iteration::end_run() {
  std::lock_guard<std::mutex> l(m_);
  run_ = nullptr;
  void_reason_.clear();
  run_void_.store(false);
  python_cv_.notify_all();
}

void Iteration::prevent_run() {
  WithoutGil no_gil;
  std::unique_lock<std::mutex> l(m_);
  run_prevented_ = true;
  if (!run_)
    return;
  void_reason_ = "Python went another way";
  run_void_.store(true);
  python_cv_.wait(l, [&] { return !run_; }); // the run, a wait of the GraphRunner for 200 us at most, and no more
}

void Iteration::allow_run() {
  std::lock_guard<std::mutex> l(m_);
  run_prevented_ = false;
}

void Iteration::void_run(const std::string& why) {
  {
    std::lock_guard<std::mutex> l(m_);
    void_reason_ = why;
  }
  run_void_.store(true);
  flush();
}

bool Iteration::published_unlocked(int64_t index) const {
  for (auto& p : published_)
    if (p.first == index)
      return true;
  return false;
}

void Iteration::set_done(int64_t n) {
  done_.store(n);
  if (python_waits_for_.load() <= n) {
    std::lock_guard<std::mutex> l(m_);
    python_cv_.notify_all();
  }
}

void Iteration::set_failed(int64_t at, std::exception_ptr e) {
  std::lock_guard<std::mutex> l(m_);
  error_ = std::move(e);
  failed_at_.store(at);
  python_cv_.notify_all();
}

void Iteration::orphan() {
  new (&m_) std::mutex();
  new (&records_m_) std::mutex();
  new (&graph_cv_) std::condition_variable();
  new (&python_cv_) std::condition_variable();
  if (done_.load() < size())
    set_failed(done_.load(),
        std::make_exception_ptr(
            std::runtime_error("coexec: this process was forked while a step of another thread computed this value")));
}

double Iteration::wait_done(int64_t n, bool raise, Signals signals) {
  double s = wait_done_or_published(n, -1, nullptr, signals);
  if (raise && failed() && failed_at_.load() < n)
    throw_again(error_);
  return s;
}

double Iteration::wait_done_or_published(int64_t n, int64_t index, at::Tensor* value, Signals signals) {
  auto ready = [&] {
    return done_.load(std::memory_order_acquire) >= n || failed_at_.load() >= 0 || (value && published(index, value));
  };
  if (ready())
    return 0;
  auto t0 = Clock::now();
  demanded.store(true);
  python_wants_.store(index);
  flush();
  for (bool first = true;; first = false) {
    bool had_gil;
    {
      WithoutGil no_gil;
      had_gil = no_gil.held();
      if (first)
        for (int k = 0; k < 300 && !ready(); k++)
          relax();
      std::unique_lock<std::mutex> l(m_);
      python_waits_for_.store(n);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      graph_cv_.notify_one();
      auto until = Clock::now() + std::chrono::milliseconds(50);
      while (done_.load() < n && failed_at_.load() < 0 && Clock::now() < until) {
        if (value) {
          l.unlock();
          bool p = published(index, value);
          l.lock();
          if (p)
            break;
        }
        python_cv_.wait_until(l, std::min(until, Clock::now() + std::chrono::milliseconds(10)));
      }
      python_waits_for_.store(INT64_MAX);
    }
    if (ready())
      break;
    if (signals == Signals::Always ? Py_IsInitialized() != 0 : signals == Signals::WithGil && had_gil)
      check_signals();
  }
  python_wants_.store(-1);
  return since(t0);
}

void Iteration::track(StorageRecord* r) {
  values_[r->sid >> kValueBits]->records[r->sid & kValueMask].store(r, std::memory_order_relaxed);
}

void Iteration::storage_died(StorageRecord* r) {
  values_[r->sid >> kValueBits]->death[r->sid & kValueMask] = size();
  record_resolved(r);
}

// A resolved one stays alive: `death` keeps INT64_MAX. In both cases the GraphRunner drops its own reference.
void Iteration::record_resolved(StorageRecord* r) {
  values_[r->sid >> kValueBits]->records[r->sid & kValueMask].store(nullptr, std::memory_order_release);
  if (std::this_thread::get_id() == owner_) {
    own_frees_.push_back(r->sid);
    return;
  }
  std::lock_guard<std::mutex> l(records_m_);
  pending_frees_.push_back(r->sid);
  has_frees_.store(true, std::memory_order_relaxed);
}

std::vector<c10::Storage> Iteration::live_storages() {
  std::vector<c10::Storage> live;
  std::lock_guard<RecordsLock> l(records_lock());
  for (int32_t sid = 0, used = sids_.load(std::memory_order_acquire); sid < used; sid++)
    if (auto* p = values_[sid >> kValueBits]->records[sid & kValueMask].load(std::memory_order_acquire)) {
      if (auto alive = p->alive.lock()) // else it dies on another thread right now, which waits for the lock
        live.emplace_back(std::move(alive));
    }
  return live;
}

bool Iteration::record_alive(int32_t sid) {
  return values_[sid >> kValueBits]->records[sid & kValueMask].load(std::memory_order_acquire) != nullptr;
}

void Iteration::release_frees(Entry& e) {
  for (auto sid : e.frees)
    set_memory(sid, c10::Storage());
}

void Iteration::publish_value(int64_t index, at::Tensor value) {
  std::lock_guard<std::mutex> l(m_);
  published_.emplace_back(index, std::move(value));
  python_cv_.notify_all();
}

bool Iteration::published(int64_t index, at::Tensor* value) {
  std::lock_guard<std::mutex> l(m_);
  for (auto& p : published_)
    if (p.first == index) {
      *value = p.second;
      return true;
    }
  return false;
}

void Iteration::discard_published(int64_t from, int64_t to) {
  std::lock_guard<std::mutex> l(m_);
  auto within = [&](const auto& p) { return p.first >= from && p.first < to; };
  published_.erase(std::remove_if(published_.begin(), published_.end(), within), published_.end());
  warnings_.erase(std::remove_if(warnings_.begin(), warnings_.end(), within), warnings_.end());
}

void Iteration::warn(int64_t index, c10::Warning w) {
  std::lock_guard<std::mutex> l(m_);
  warnings_.emplace_back(index, std::move(w));
  has_warnings_.store(true, std::memory_order_release);
}

std::vector<std::pair<int64_t, c10::Warning>> Iteration::take_warnings(int64_t n) {
  std::lock_guard<std::mutex> l(m_);
  auto later = std::stable_partition(warnings_.begin(), warnings_.end(), [&](const auto& w) { return w.first < n; });
  std::vector<std::pair<int64_t, c10::Warning>> taken(
      std::make_move_iterator(warnings_.begin()), std::make_move_iterator(later));
  warnings_.erase(warnings_.begin(), later);
  has_warnings_.store(!warnings_.empty(), std::memory_order_release);
  return taken;
}
} // namespace coexec
