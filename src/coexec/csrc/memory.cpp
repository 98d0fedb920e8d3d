#include "memory.h"
#include <mutex>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace coexec {

void keep_freed_memory() {
#ifdef __GLIBC__
  static std::once_flag once;
  std::call_once(once, [] {
    mallopt(M_MMAP_THRESHOLD, 32 << 20); // the highest that glibc adapts to by itself
    mallopt(M_TRIM_THRESHOLD, 128 << 20);
    mallopt(M_TOP_PAD, 64 << 20); // a whole heap of an arena: none is given back; address space, not memory
  });
#endif
}

void give_freed_memory_back() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
} // namespace coexec
