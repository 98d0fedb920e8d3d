// Locks that guard tables of the whole process, and a fork in the middle of their use.
#pragma once
#include <atomic>
#include <mutex>

namespace coexec {
// Held for a few instructions, and taken several times per op.
class SpinLock {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() {
    flag_.clear(std::memory_order_release);
  }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

// Calls that a forking thread makes before fork() and after it, on both sides. `first`: before the others' locks.
bool hold_during_forks(void (*lock)(void*), void (*unlock)(void*), void* of, bool first = false);

// A lock at namespace scope. A thread that forks holds all of them meanwhile, so that the child finds no table half
// changed and no lock taken by a thread that does not exist there. The forking thread has the GIL: whoever is under one
// of these locks must not wait for the GIL, take another of them, or run an unknown destructor.
template <class Lock>
class ProcessLock : public Lock {
 public:
  ProcessLock() {
    hold_during_forks([](void* l) { static_cast<ProcessLock*>(l)->lock(); },
        [](void* l) { static_cast<ProcessLock*>(l)->unlock(); }, this);
  }
};
using ProcessMutex = ProcessLock<std::mutex>;
} // namespace coexec
