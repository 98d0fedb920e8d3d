#include "segment.h"
#include <torch/library.h>

namespace coexec {

SegmentRun*& current_run() {
  static thread_local SegmentRun* r = nullptr;
  return r;
}
Iteration*& current_iteration() {
  static thread_local Iteration* i = nullptr;
  return i;
}

namespace {
at::Tensor external_argument(const Entry& e, int16_t input) {
  // Flattened inputs that are placeholders are patches; the others are tensors on the entry's stack, in order.
  int16_t k = 0;
  for (size_t i = 0; i < e.args.size(); i++) {
    const Arg& a = e.node->args[i];
    if (a.type == Arg::Tensor) {
      if (k++ == input)
        return e.args[i].isTensor() ? e.args[i].toTensor() : at::Tensor();
    } else if (a.type == Arg::List) {
      for (size_t j = 0; j < a.present.size(); j++)
        if (a.present[j] && k++ == input) {
          auto v = e.args[i].toListRef()[j];
          return v.isTensor() ? v.toTensor() : at::Tensor();
        }
    }
  }
  return at::Tensor();
}

} // namespace

// Copies of foreign memory: the very bytes decide.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

namespace {
bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

} // namespace

at::Tensor segment_argument(const Entry& e, int16_t input) {
  return external_argument(e, input);
}

std::optional<std::string> disagreement(Iteration& it, const SegmentRun& run, int64_t from, int64_t to) {
  const Segment& s = *run.segment;
  for (int64_t i = from; i < to; i++) {
    Entry& e = it.entry(i);
    auto p = static_cast<size_t>(i - run.base);
    if (p >= s.nodes.size() || e.node->id != s.nodes[p])
      return "another path";
    if (e.variant != s.variants[p])
      return "other shapes";
  }
  for (const auto& c : s.checks) {
    int64_t i = run.base + c.position;
    if (i < from || i >= to)
      continue;
    Entry& e = it.entry(i);
    const Patch* patch = nullptr;
    for (const auto& q : e.patches)
      if (q.input == c.input)
        patch = &q;
    if (c.slot >= 0) {
      if (!patch || patch->slot != c.slot || patch->sid != c.sid)
        return "another value at " + e.node->info->name;
      continue;
    }
    if (patch)
      return "a computed value where memory from outside was, at " + e.node->info->name;
    at::Tensor now = external_argument(e, c.input);
    const at::Tensor& used = run.used[c.segment_input];
    if (!now.defined() || !(same_memory(now, used) || same_bytes(now, used)))
      return "another tensor at " + e.node->info->name;
  }
  for (const auto& c : s.number_checks) {
    int64_t i = run.base + c.position;
    if (i >= from && i < to && !same_value(it.entry(i).args[c.arg], c.value))
      return "another number at " + it.entry(i).node->info->name;
  }
  return std::nullopt;
}

namespace {
void publish(const at::Tensor& order, const at::Tensor& value, int64_t channel) {
  (void)order;
  if (auto* r = current_run())
    current_iteration()->publish_value(r->base + channel, value.clone());
}
} // namespace
} // namespace coexec

TORCH_LIBRARY(coexec, m) {
  m.def("publish(Tensor(a!) order, Tensor value, int channel) -> ()");
}
TORCH_LIBRARY_IMPL(coexec, CPU, m) {
  m.impl("publish", &coexec::publish);
}
