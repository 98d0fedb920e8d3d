#include "process_lock.h"
#include <pthread.h>
#include <vector>

namespace coexec {
namespace {
struct Held {
  void (*lock)(void*);
  void (*unlock)(void*);
  void* of;
};

std::vector<Held>& held_during_forks() {
  static auto* held = new std::vector<Held>(); // leaked on purpose: outlives static destructors
  return *held;
}

void lock_all() {
  for (auto& h : held_during_forks())
    h.lock(h.of);
}

void unlock_all() {
  for (auto& h : held_during_forks())
    h.unlock(h.of);
}
} // namespace

bool hold_during_forks(void (*lock)(void*), void (*unlock)(void*), void* of, bool first) {
  // Handlers of Python's os.register_at_fork would not do: other such handlers run between them and the fork, and they
  // may wait for threads that wait for these locks.
  static int registered = pthread_atfork(&lock_all, &unlock_all, &unlock_all);
  auto& held = held_during_forks();
  held.insert(first ? held.begin() : held.end(), {lock, unlock, of});
  return registered == 0; // ENOMEM is its only error
}
} // namespace coexec
