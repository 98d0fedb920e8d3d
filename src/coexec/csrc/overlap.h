// `overlap=True`: an iteration whose call has returned while its graph still runs, and who waits for its end.
//
// The key stays included on the thread of the call, so that its ops pass by here. An op that needs nothing of the
// iteration runs at once; the first one that does waits for the graph's end, and then everything is ordinary.
#pragma once
#include <c10/util/flat_hash_map.h>
#include "iteration.h"

namespace coexec {
class Step;

// Memory from outside that the graph of an iteration uses.
struct ForeignUse {
  ska::flat_hash_set<const c10::StorageImpl*> reads; // written by nobody until the graph has ended
  ska::flat_hash_set<const c10::StorageImpl*> writes; // neither read nor written
  bool draws = false; // random numbers of the default generator
};

class Overlap {
 public:
  Overlap(Step* step, std::shared_ptr<Iteration> it, ForeignUse use,
      std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> keyed);
  bool settled() const { // all is as if the call had waited
    return settled_.load(std::memory_order_acquire);
  }
  bool finished() const; // settling would not wait
  // Waits for the graph's end and makes everything ordinary. Any thread. Throws only what a signal handler raised: then
  // nothing has changed.
  void settle();
  // Throws the kernel's error, if there is one and nobody has seen it yet; its Python exception names the op's line.
  void raise_error();
  bool has_error() const {
    return settled() && error_ && !error_seen_;
  }
  bool see_error() { // whether the caller is the first to throw it
    return !error_seen_.exchange(true);
  }

  // What an op has to do with the iteration: nothing, it makes views of its memory, or it needs its values.
  enum class Touch { Nothing, View, Value };
  Touch touch(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) const;
  bool touches(const at::Tensor& t, bool writes) const;
  void key_until_settled(const at::Tensor& view);

  Step* step; // null once it is gone or has taken note of the end. Guarded by the GIL
  std::atomic<int64_t> waits{0};
  std::atomic<double> stall_s{0};

  // In a thread that forks, before and after.
  void lock() {
    m_.lock();
  }
  void unlock() {
    m_.unlock();
  }

 private:
  bool pending_memory(const c10::StorageImpl* s) const;
  Touch touch(const at::Tensor& t, bool writes, bool view) const;

  mutable std::mutex m_;
  std::shared_ptr<Iteration> it_; // guarded by m_; dropped with the end
  const int64_t size_; // of its log
  ForeignUse use_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> keyed_; // guarded by m_
  std::atomic<bool> settled_{false};
  std::exception_ptr error_; // written before settled_
  std::atomic<bool> error_seen_{false};
};

// Of the call that returned early on this thread; may be settled already.
std::shared_ptr<Overlap>& overlap_here();
void announce(const std::shared_ptr<Overlap>& o); // to all threads, until it is settled

// The calling thread needs everything as if all calls had waited. `raise`: also the error of its own one.
void settle_overlaps(bool raise);
// The calling thread is about to read (or write) the memory of `t` without an op.
void settle_overlaps_of(const at::Tensor& t, bool writes);
// For an op of a step on this thread: its arguments may come from a call that returned early on another one.
void settle_arguments(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args);
// For an op outside every step. True: it made views of memory in flight and is done.
bool overlapped(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack);
// A guard of the thread's dispatch keys (inference_mode) has ended: it brought back the keys of its beginning.
void watch_again();

} // namespace coexec
