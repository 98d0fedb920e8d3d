// Which ops the PythonRunner does itself and at once (HOST): what Python wants to know and no value of the graph
// decides. It would wait for the GraphRunner otherwise, which may be far behind.
#include "recorder.h"

namespace coexec {
namespace {
// Below the grain of PyTorch's parallel loops: the PythonRunner's thread needs no workers for a tensor of this size.
constexpr size_t kSliceBytes = 64 << 10;
constexpr int kSliceOps = 8; // more is work that the GraphRunner should do
} // namespace

// Tiny computations on memory from outside that end in a value for Python (Adam's `step += 1; step.item()`): the
// PythonRunner does them at once, so that the read-back costs no round trip. All ops that write such memory must be
// tiny and deterministic, and the memory must be read back.
void Recorder::classify_host_state() {
  ska::flat_hash_map<c10::StorageImpl*, char> state; // 1 candidate, 2 read back, 0 excluded
  auto tiny = [&](c10::StorageImpl* s) { return s && s->nbytes() <= kStateBytes; };
  auto eligible = [&](const TraceOp& t) {
    if (t.kind != Kind::Compute || t.info->random || t.writes.empty())
      return false;
    for (const auto& i : t.inputs)
      if (i.value.producer != kExternal || !tiny(i.storage))
        return false;
    for (const auto& o : t.outputs)
      if (o.same_arg < 0)
        return false;
    return !t.inputs.empty();
  };
  for (const auto& t : ops) {
    if (t.node >= 0)
      continue;
    for (auto w : t.writes)
      if (t.inputs[w].value.producer == kExternal && t.inputs[w].storage) {
        auto& s = state.emplace(t.inputs[w].storage, 1).first->second;
        if (!eligible(t))
          s = 0;
      }
  }
  for (const auto& t : ops)
    if (t.node < 0 && t.kind == Kind::Fetch && !t.inputs.empty()) {
      auto it = state.find(t.inputs[0].storage);
      if (it != state.end() && it->second == 1)
        it->second = 2;
    }
  auto is_host = [&](c10::StorageImpl* s) {
    auto it = state.find(s);
    return it != state.end() && it->second == 2;
  };
  // An op that writes several memories (_foreach_add_) runs in one place: all of them are the host's, or none.
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto& t : ops) {
      if (t.node >= 0 || t.writes.size() < 2)
        continue;
      auto host = [&](int16_t w) { return is_host(t.inputs[w].storage); };
      if (std::all_of(t.writes.begin(), t.writes.end(), host) || std::none_of(t.writes.begin(), t.writes.end(), host))
        continue;
      for (auto w : t.writes)
        state[t.inputs[w].storage] = 0;
      changed = true;
    }
  }
  for (auto& t : ops) {
    if (t.node >= 0)
      continue;
    bool reads_host = t.kind == Kind::Fetch && !t.inputs.empty() && is_host(t.inputs[0].storage);
    if (reads_host || (eligible(t) && is_host(t.inputs[t.writes[0]].storage))) {
      t.kind = Kind::Host;
      continue;
    }
    size_t input = 0;
    for (auto& a : t.args) {
      size_t n = a.type == Arg::Tensor ? 1
          : a.type == Arg::List        ? std::count(a.present.begin(), a.present.end(), true)
                                       : 0;
      for (size_t k = 0; k < n; k++, input++)
        if (input < t.inputs.size() && t.inputs[input].value.producer == kExternal && is_host(t.inputs[input].storage))
          a.snapshot = true;
    }
  }
}

namespace {
// The ops of a trace that a read by Python depends on, where they depend on memory from outside alone: a mask among the
// arguments that is asked whether it is causal, the norm of a parameter, a learning rate in a tensor. Memory that the
// graph has written before is not such memory. (A path on which it has is met by Step::host, which waits.)
class Slices {
 public:
  Slices(Recycled<TraceOp>& ops, std::unordered_set<uint64_t>& known) : ops_(ops), known_(known) {}

  // Marks the reads and what they depend on. `known_`: uids marked in earlier traces, so that a path without the read
  // shares its nodes with the path that has it.
  void mark() {
    for (auto& t : ops_) {
      cost_.push_back(cost_of(t));
      if (cost_.back() >= 0 && cost_.back() <= kSliceOps && (is_read(t) || known_.count(t.uid)))
        give_to_python(static_cast<int32_t>(cost_.size()) - 1);
      if (t.kind == Kind::Compute)
        for (auto w : t.writes)
          written_.insert(t.inputs[w].storage);
    }
  }

  // Is it memory that an op of the PythonRunner made?
  bool python_made(TraceValue v) const {
    while (v.producer >= 0) {
      const auto& t = ops_[v.producer];
      if (static_cast<size_t>(v.output) >= t.outputs.size() || t.outputs[v.output].alias < 0)
        return t.kind == Kind::Host;
      v = t.inputs[t.outputs[v.output].alias].value;
    }
    return false;
  }

 private:
  static bool small(const Geometry& g) {
    size_t bytes = c10::elementSize(g.dtype);
    for (auto n : g.sizes)
      bytes *= static_cast<size_t>(n);
    return bytes <= kSliceBytes;
  }

  // A value goes to Python here, or a size: it waits, unless it has all it needs.
  static bool is_read(const TraceOp& t) {
    return t.kind == Kind::Fetch || t.kind == Kind::Sync || t.kind == Kind::Barrier;
  }

  static bool reads_only(const TraceOp& t) {
    bool effects = t.info->random || !t.writes.empty();
    for (const auto& a : t.args)
      effects |= a.type == Arg::Object && a.value.toBool(); // a Generator
    return !effects && (!t.info->schema || t.info->name.rfind("aten::", 0) == 0);
  }

  // Small, and nothing but its outputs comes of it.
  static bool is_light(const TraceOp& t) {
    bool light = !t.info->heavy && !t.info->allocates && !t.outputs.empty();
    for (size_t k = 0; k < t.outputs.size(); k++)
      light &= t.outputs[k].alias < 0 && (!t.geometries[k] || small(*t.geometries[k]));
    for (const auto& i : t.inputs)
      light &= i.geometry && small(*i.geometry);
    return light;
  }

  // Ops that compute `t` from memory of the outside, itself included; -1 if the graph takes part.
  int cost_of(const TraceOp& t) const {
    if (t.node >= 0 || t.kind == Kind::Host || !reads_only(t) || (t.kind == Kind::Compute && !is_light(t)))
      return -1;
    int cost = t.kind == Kind::Compute ? 1 : 0;
    for (const auto& i : t.inputs) {
      if (!i.storage || written_.count(i.storage) || cost > kSliceOps)
        return -1;
      if (i.value.producer < 0)
        continue;
      int before = python_made(i.value) ? 0 : cost_[i.value.producer];
      if (before < 0)
        return -1;
      cost += before;
    }
    return cost;
  }

  void give_to_python(int32_t index) {
    auto& t = ops_[index];
    if (t.kind == Kind::Host)
      return;
    for (const auto& i : t.inputs)
      if (i.value.producer >= 0)
        give_to_python(i.value.producer);
    if (t.kind == Kind::View || t.kind == Kind::Barrier) // a view of ordinary memory is ordinary
      return;
    t.kind = Kind::Host;
    known_.insert(t.uid);
  }

  Recycled<TraceOp>& ops_;
  std::unordered_set<uint64_t>& known_;
  std::vector<int> cost_; // per op
  std::unordered_set<const c10::StorageImpl*> written_; // by the graph, so far
};
} // namespace

void Recorder::classify_host_ops() {
  classify_host_state();
  Slices slices(ops, host_uids_);
  slices.mark();
  ska::flat_hash_map<c10::StorageImpl*, int32_t> numbers; // of memory from outside
  for (const auto& t : ops)
    for (const auto& i : t.inputs)
      if (i.storage && i.value.producer < 0 && i.value.output >= 0)
        numbers.emplace(i.storage, externals[i.value.output].storage);
  std::vector<TraceInput*> made;
  std::vector<TraceOp*> views; // of such memory: like all views of memory from outside they have no outputs
  for (auto& t : ops) {
    for (auto& i : t.inputs)
      if (slices.python_made(i.value))
        made.push_back(&i);
    bool view = t.kind == Kind::View && t.node < 0 && t.info->is_view && !t.outputs.empty();
    if (view && slices.python_made(t.inputs[t.outputs[0].alias].value))
      views.push_back(&t);
  }
  for (auto* t : views)
    forget_outputs(*t);
  for (auto& t : ops) // nothing is known ahead about what they return
    if (t.kind == Kind::Host && t.node < 0 && t.writes.empty() && !t.info->allocates)
      forget_outputs(t);
  for (auto* i : made)
    i->value = outside_value(*i, &numbers);
}

// What the PythonRunner made is ordinary memory to all other ops.
TraceValue Recorder::outside_value(const TraceInput& i, ska::flat_hash_map<c10::StorageImpl*, int32_t>* numbers) {
  auto known = numbers->emplace(i.storage, external_storages_);
  if (known.second)
    external_storages_++;
  externals.push_back({known.first->second, i.storage->nbytes(), -1, false});
  return {kExternal, static_cast<int32_t>(externals.size()) - 1};
}
} // namespace coexec
