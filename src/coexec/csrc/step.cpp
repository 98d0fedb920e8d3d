// One iteration of a step: its beginning, its end, and what must be true of every tensor after it.
#include "step.h"
#include <ATen/SequenceNumber.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <typeinfo>
#include "memory.h"
#include "openmp.h"
#include "raised.h"

namespace coexec {
constexpr int kSettled = 16; // iterations

Step*& active_step() {
  static thread_local Step* s = nullptr;
  return s;
}

Step::Step() : graph(&program) {}

Step::~Step() {
  if (overlap_) { // nobody will ask for its end: the graph still does what eager would have done
    overlap_->step = nullptr;
    pybind11::gil_scoped_release no_gil;
    graph.stop();
  }
  for (auto& l : locations)
    for (auto& f : l.second.chain)
      Py_DECREF(f.code);
}

// The memory of an iteration is used again once neither the GraphRunner nor a placeholder refers to it.
std::shared_ptr<Iteration> Step::fresh_iteration() {
  for (auto& i : iterations_)
    if (i.use_count() == 1) {
      i->reset(program.slots());
      return i;
    }
  auto i = std::make_shared<Iteration>();
  i->reset(program.slots());
  if (iterations_.size() < 3)
    iterations_.push_back(i);
  return i;
}

void Step::begin(Phase p, const std::vector<at::Tensor>& step_arguments, StepFrame frame, bool lazy, bool overlap) {
  TORCH_INTERNAL_ASSERT(!overlap_, "coexec: the previous call has not been completed");
  overlap_allowed_ = overlap;
  foreign_use_ = {};
  frame_ = frame;
  places_.forget_repetitions();
  phase = p;
  fallback.reset();
  failure_.reset();
  has_trace = p == Phase::Trace;
  step_arguments_.clear();
  for (const auto& t : step_arguments) {
    auto* impl = t.unsafeGetTensorImpl();
    step_arguments_.emplace_back(); // keeps its place: predictions go by position
    if (is_special(*impl) || record_of(*impl))
      continue;
    auto* s = impl->unsafe_storage().unsafeGetStorageImpl();
    step_arguments_.back() = {
        c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(s)), s,
        intern_of(*impl)};
  }
  uid_of_sequence_.clear();
  sequence_base_ = at::sequence_number::peek();
  last_backward_uid_ = 0;
  if (p == Phase::Trace) {
    co_executed_in_a_row_ = 0;
    recorder.begin(argument_storages());
  } else {
    it_ = fresh_iteration();
    it_->lazy = lazy;
    it_->spans = timeline.begin_call();
    current_ = &program.at(kStart);
    path.clear();
    passed_.assign(program.size(), false);
    met_.assign(program.pairs(), 0);
    barrier_open_ = false;
    description.clear();
    external_descriptions.clear();
    external_writes_.clear();
    release_openmp_workers(); // this thread computes nothing large from here on
    if (++co_executed_in_a_row_ == kSettled)
      give_freed_memory_back(); // what this thread's arena has free from tracing
    host_writes_.clear();
    small_reads_.clear();
    forget_old_variants();
    graph.start(it_, segments, step_arguments_);
  }
  active_step() = this;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

// The memory of an ordinary tensor will be written by the GraphRunner: readers in other threads must meet the key.
void Step::key_until_written(const at::Tensor& t) {
  if (t.key_set().has(kKey))
    return;
  set_key(t.unsafeGetTensorImpl());
  keyed_.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(t.unsafeGetTensorImpl()));
}

void Step::key_until_left(const at::Tensor& t) {
  if (t.key_set().has(kKey) && typeid(*t.unsafeGetTensorImpl()) != typeid(PlaceholderImpl))
    keyed_.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(t.unsafeGetTensorImpl()));
}

void Step::drop_keys() {
  for (auto& w : keyed_)
    if (auto t = w.lock())
      clear_stale_key(t.get());
  keyed_.clear();
}

std::vector<c10::StorageImpl*> Step::argument_storages() const {
  std::vector<c10::StorageImpl*> storages;
  for (const auto& a : step_arguments_)
    storages.push_back(a.storage);
  return storages;
}

void Step::leave() {
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  active_step() = nullptr;
  if (it_ && !fallback)
    learn_survivors();
  put_away();
}

void Step::put_away() {
  drop_keys();
  describing = false;
  described_storages_.clear();
  if (it_) {
    forget_pending_writes(it_.get());
    learn_native_fills();
    timeline.over();
  }
  phase = Phase::Off;
  it_.reset();
  step_arguments_.clear();
}

bool Step::finish() {
  std::exception_ptr error;
  auto it = it_;
  close_barrier();
  if (phase == Phase::Coexec) {
    try {
      take(kEnd);
      if (!current_->child(kEnd))
        fall_back("early end", "return", 0);
      else if (can_return_early()) {
        return_early();
        return false;
      } else
        complete_iteration();
    } catch (...) {
      error = std::current_exception();
      settle();
    }
  }
  if (!error)
    error = swallowed_error();
  recorder.complete = !error;
  leave();
  if (error)
    std::rethrow_exception(error);
  if (it)
    issue_warnings(*it, static_cast<int64_t>(path.size()));
  return true;
}

// A kernel's error that came late, in a `try` of the step that eager would not have come to.
std::exception_ptr Step::swallowed_error() {
  if (!failure_ || program.at(failure_->after_node).guarded)
    return nullptr;
  try {
    throw_again(it_->error());
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void Step::complete_iteration() {
  note_wait(Wait::StepEnd, 0, it_->wait_done(it_->size())); // warnings come when the iteration has been left
  it_->close();
  it_->prevent_run(); // one that expected more than there was
  resolve_all();
}

// The user's code raised. A kernel's error that eager would have raised earlier takes precedence: it is thrown.
void Step::abort() {
  std::exception_ptr error;
  try {
    if (phase == Phase::Coexec)
      fall_back("exception", "raise", 0);
  } catch (...) {
    error = std::current_exception();
    settle();
  }
  recorder.complete = false;
  leave();
  if (error)
    std::rethrow_exception(error);
}

// After an error or a signal during a wait: eager's state, without raising again.
void Step::settle() {
  if (phase != Phase::Coexec)
    return;
  try {
    fall_back("exception", "raise", 0);
  } catch (...) { // the kernel's error; the caller rethrows what came first
  }
}

void Step::drain() {
  if (phase != Phase::Coexec)
    return;
  close_barrier();
  it_->wait_done(it_->size(), false);
}

void Step::abandon() {
  if (phase == Phase::Coexec)
    resolve_all();
  leave();
}
} // namespace coexec
