#include "openmp.h"
#include <dlfcn.h>
#include <cstring>

namespace coexec {
namespace {
using Pause = int (*)(int);
constexpr int kPauseSoft = 1; // omp_pause_soft, OpenMP 5.0 section 3.2.44

// libgomp's only: what other runtimes do at a pause was not tried.
Pause find_pause() {
  void* f = dlsym(RTLD_DEFAULT, "omp_pause_resource_all");
  Dl_info where;
  bool gnu = f && dladdr(f, &where) && where.dli_fname && std::strstr(where.dli_fname, "libgomp");
  return gnu ? reinterpret_cast<Pause>(f) : nullptr;
}
} // namespace

void release_openmp_workers() {
  static const Pause pause = find_pause();
  if (pause)
    pause(kPauseSoft); // refused inside a parallel region: then there is nothing to give back either
}
} // namespace coexec
