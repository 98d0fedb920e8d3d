// Keeps the live inputs of a segment while it is replayed, for the check of its artifact in another process.
#include <ATen/CPUGeneratorImpl.h>
#include <cstdio>
#include <tuple>
#include "graph_runner.h"

namespace coexec {
namespace {
int64_t append(FILE* f, const void* data, size_t n) {
  std::fseek(f, 0, SEEK_END);
  while (std::ftell(f) % 64)
    std::fputc(0, f);
  int64_t start = std::ftell(f);
  return std::fwrite(data, 1, n, f) == n ? start : -1;
}

constexpr int64_t kLargestWhole = 16 << 20; // bytes: a data set may lie behind a batch, too

// First byte and count.
std::pair<int64_t, int64_t> bytes_of(const Capture::Item& i, const Geometry& g, int64_t storage_nbytes) {
  if (i.extent == Capture::Extent::Whole && storage_nbytes <= kLargestWhole)
    return {0, storage_nbytes};
  if (i.extent == Capture::Extent::Given || i.extent == Capture::Extent::Whole)
    return {i.low, i.nbytes};
  auto item = static_cast<int64_t>(c10::elementSize(g.dtype));
  int64_t last = g.offset;
  for (size_t d = 0; d < g.sizes.size(); d++) {
    if (g.sizes[d] == 0)
      return {0, 0};
    last += (g.sizes[d] - 1) * g.strides[d];
  }
  int64_t low = g.offset * item;
  if (i.extent == Capture::Extent::Touched)
    low = low / 16 * 16;
  return {low, (last + 1) * item - low};
}
} // namespace

// An input is written just before the first op that uses it: nothing of the segment has changed it then.
void GraphRunner::capture_inputs(Entry& e) {
  Capture& c = *capture;
  c.failed |= c.only && e.variant != c.only->variants[e.node->position].get();
  if (c.failed)
    return;
  FILE* f = nullptr;
  auto file = [&] { return f ? f : f = std::fopen(c.path.c_str(), "ab"); };
  if (c.with_generator && c.generator_start < 0) {
    at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
    if (file())
      c.generator_start = append(f, state.const_data_ptr(), state.nbytes());
    c.generator_nbytes = static_cast<int64_t>(state.nbytes());
  }
  for (auto& i : c.items) {
    if (i.position != e.node->position || i.start >= 0)
      continue;
    if (!file()) {
      c.failed = true;
      break;
    }
    if (i.input < 0) {
      SegmentInput in{};
      in.arg = i.arg;
      in.element = i.element;
      in.number_type = i.number_type;
      if (number_fits(e, in)) {
        at::Tensor t = number_tensor(e, in);
        i.start = append(f, t.const_data_ptr(), t.nbytes());
      }
    } else {
      for (const auto& p : e.patches) {
        if (p.input != i.input)
          continue;
        c10::Storage st = p.external ? c10::Storage(p.external) : it_->memory(p.sid);
        if (!st.unsafeGetStorageImpl())
          continue;
        auto nbytes = static_cast<int64_t>(st.nbytes());
        std::tie(i.low, i.nbytes) = bytes_of(i, *p.geometry, nbytes);
        if (nbytes >= i.low + i.nbytes)
          i.start = append(f, static_cast<const char*>(st.data()) + i.low, i.nbytes);
      }
    }
    c.failed |= i.start < 0;
  }
  if (f)
    std::fclose(f);
}
} // namespace coexec
