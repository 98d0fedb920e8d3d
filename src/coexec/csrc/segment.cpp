#include "segment.h"
#include <ATen/ops/empty.h>
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
const Patch* patch_of(const Entry& e, int16_t input) {
  for (const auto& p : e.patches)
    if (p.input == input)
      return &p;
  return nullptr;
}
} // namespace

// Copies of foreign memory: the very bytes decide.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

at::Tensor segment_argument(const Entry& e, int16_t input) {
  const Patch* p = patch_of(e, input);
  return p && p->external ? tensor_over(c10::Storage(p->external), *p->geometry) : at::Tensor();
}

at::Tensor computed_argument(Iteration& it, const Entry& e, int16_t input) {
  const Patch* p = patch_of(e, input);
  bool there = p && !p->external && it.memory(p->sid).unsafeGetStorageImpl();
  return there ? tensor_over(it.memory(p->sid), *p->geometry) : at::Tensor();
}

at::Tensor number_tensor(const Entry& e, const SegmentInput& in) {
  c10::IValue v = e.args[in.arg];
  if (in.element >= 0)
    v = v.toListRef()[in.element];
  if (v.isTensor())
    v = wrapped_value(*v.toTensor().unsafeGetTensorImpl());
  at::Tensor t = at::empty({}, at::TensorOptions().dtype(in.number_type));
  switch (in.number_type) {
    case at::kDouble:
      *t.mutable_data_ptr<double>() = v.isInt() ? static_cast<double>(v.toInt()) : v.toDouble();
      break;
    case at::kLong:
      *t.mutable_data_ptr<int64_t>() = v.toInt();
      break;
    case at::kBool:
      *t.mutable_data_ptr<bool>() = v.toBool();
      break;
    default:
      *t.mutable_data_ptr<c10::complex<double>>() = v.toComplexDouble();
  }
  return t;
}

bool number_fits(const Entry& e, const SegmentInput& in) {
  c10::IValue v = e.args[in.arg];
  if (in.element >= 0) {
    if (!v.isList() || v.toListRef().size() <= static_cast<size_t>(in.element))
      return false;
    v = v.toListRef()[in.element];
  }
  if (v.isTensor())
    v = wrapped_value(*v.toTensor().unsafeGetTensorImpl());
  switch (in.number_type) {
    case at::kDouble:
      return v.isDouble();
    case at::kLong:
      return v.isInt();
    case at::kBool:
      return v.isBool();
    default:
      return v.isComplexDouble();
  }
}

bool fits_entry(const Segment& s, size_t position, const Entry& e, const std::vector<int64_t>& symbols) {
  const Variant* made_for = s.variants[position].get();
  if (s.symbols.empty() || !made_for || !e.variant)
    return e.variant == made_for;
  return s.patterns[position].agrees(facts_of(*e.node, *e.variant), s.expressions, symbols);
}

bool bind_symbols(const Segment& s, const std::vector<const Geometry*>& inputs, std::vector<int64_t>* symbols) {
  symbols->clear();
  for (const auto& from : s.symbols) {
    const Geometry* g = inputs[from.input];
    if (g->sizes.size() <= static_cast<size_t>(from.dimension))
      return false;
    symbols->push_back(g->sizes[from.dimension]);
  }
  for (const auto& guard : s.guards)
    if (evaluate(guard, *symbols).value_or(0) == 0)
      return false;
  std::vector<int64_t> facts;
  for (size_t k = 0; k < inputs.size(); k++) {
    if (!inputs[k])
      continue;
    facts.clear();
    append_facts(*inputs[k], &facts);
    if (!s.inputs[k].pattern.agrees(facts, s.expressions, *symbols))
      return false;
  }
  return true;
}

void PlannedSegment::note_pass(uint64_t signature) {
  passes++;
  last_signature = signature;
  for (auto& s : signatures)
    if (s.first == signature) {
      s.second++;
      return;
    }
  if (signatures.size() == kSignatures) {
    auto rarer = [](const auto& a, const auto& b) { return a.second < b.second; };
    signatures.erase(std::min_element(signatures.begin(), signatures.end(), rarer));
  }
  signatures.emplace_back(signature, 1);
}

std::optional<std::string> disagreement(Iteration& it, const SegmentRun& run, int64_t from, int64_t to) {
  const Segment& s = *run.segment;
  for (int64_t i = from; i < to; i++) {
    Entry& e = it.entry(i);
    auto p = static_cast<size_t>(i - run.base);
    if (p >= s.nodes.size() || e.node->id != s.nodes[p])
      return "another path";
    if (!fits_entry(s, p, e, run.symbols))
      return "other shapes";
  }
  for (const auto& c : s.checks) {
    int64_t i = run.base + c.position;
    if (i < from || i >= to)
      continue;
    Entry& e = it.entry(i);
    const Patch* patch = patch_of(e, c.input);
    if (c.segment_input >= 0 && patch && !patch->external) {
      const at::Tensor& used = run.used[c.segment_input];
      if (it.memory(patch->sid).unsafeGetStorageImpl() != used.storage().unsafeGetStorageImpl() ||
          patch->geometry->offset != used.storage_offset())
        return "another value at " + e.node->info->name;
      continue;
    }
    if (c.segment_input < 0) {
      if (!patch || patch->slot != c.slot || patch->sid != c.sid)
        return "another value at " + e.node->info->name;
      continue;
    }
    if (!patch || !patch->external)
      return "a computed value where memory from outside was, at " + e.node->info->name;
    const at::Tensor& used = run.used[c.segment_input];
    bool same = patch->external.get() == used.storage().unsafeGetStorageImpl() &&
        patch->geometry->offset == used.storage_offset();
    // Equal bytes will do for what is only read: a copy of foreign memory, say.
    if (!same && (s.inputs[c.segment_input].written || !same_bytes(segment_argument(e, c.input), used)))
      return "another tensor at " + e.node->info->name;
  }
  for (const auto& c : s.number_checks) {
    int64_t i = run.base + c.position;
    if (i < from || i >= to)
      continue;
    const Entry& e = it.entry(i);
    if (e.args.empty()) // a VIEW has nothing to execute; its numbers decide its shape, and that has been compared
      continue;
    const auto& now = e.args[c.arg];
    bool same = c.expression < 0 ? same_value(now, c.value)
                                 : now.isInt() && now.toInt() == evaluate(s.expressions[c.expression], run.symbols);
    if (!same)
      return "another number at " + e.node->info->name;
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

TORCH_LIBRARY_FRAGMENT(coexec, m) {
  if (!c10::Dispatcher::singleton().findSchema({"coexec::publish", ""})) // the compile worker's Python has its own
    m.def("publish(Tensor(a!) order, Tensor value, int channel) -> ()");
}
TORCH_LIBRARY_IMPL(coexec, CPU, m) {
  m.impl("publish", &coexec::publish);
}
