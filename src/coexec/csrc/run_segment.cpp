// The GraphRunner runs compiled segments: gathers inputs (predicted ones too), runs ahead, commits or discards.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>
#include "graph_runner.h"

namespace coexec {
// The compiled segment that begins at log index `at`, if the path is known: the op is validated, or it is the only one
// that can come (no Case Select).
const Segment* GraphRunner::segment_at(int64_t at) {
  if (!segments_ || at < replay_until_ || it_->lazy)
    return nullptr;
  int32_t node = -1;
  if (it_->validated() > at) {
    node = it_->entry(at).node->id;
  } else {
    const auto& c = at == 0 ? program_->at(kStart).children : it_->entry(at - 1).node->children;
    if (c.size() != 1 || c[0] == kEnd)
      return nullptr;
    node = c[0];
  }
  const Node& n = program_->at(node);
  if (n.segment < 0 || n.position != 0)
    return nullptr;
  const Segment* s = segments_->by_id[n.segment].get();
  if (!s || !s->artifact || s->slower.load(std::memory_order_relaxed) || s->stale.load(std::memory_order_relaxed))
    return nullptr;
  if (s->trial > 0 && s->trial % 2 == 0) {
    replay_until_ = at + static_cast<int64_t>(s->nodes.size());
    timed_ = s;
    timed_s_ = 0;
    return nullptr;
  }
  return s;
}

void GraphRunner::note_trial(const Segment& s, bool compiled, double seconds) {
  if (s.trial == 0)
    return;
  (compiled ? s.compiled_s : s.replayed_s).push_back(seconds);
  if (--s.trial > 0)
    return;
  // The lower quartile: what other processes do to a pass only ever makes it longer.
  auto quartile = [](std::vector<double> v) {
    std::nth_element(v.begin(), v.begin() + v.size() / 4, v.end());
    return v[v.size() / 4];
  };
  s.slower.store(quartile(s.compiled_s) > 1.02 * quartile(s.replayed_s));
}

at::Tensor GraphRunner::predict(const SegmentInput& in) {
  if (in.misses >= 2)
    return at::Tensor();
  c10::Storage storage;
  if (in.step_argument >= 0 && static_cast<size_t>(in.step_argument) < inputs_.size()) {
    const auto& x = inputs_[in.step_argument];
    auto s = x.alive.lock();
    if (!s)
      return at::Tensor();
    storage = c10::Storage(std::move(s));
    if (x.geometry->lazy_bits) // no compiled segment takes one
      return at::Tensor();
    if (is_foreign(x.storage)) { // other code may write it meanwhile: see same_bytes in segment.cpp
      at::Tensor copy = copy_as_it_lies(storage, *x.geometry);
      return matches_shape(*in.geometry, *copy.unsafeGetTensorImpl()) ? copy : at::Tensor();
    }
    if (!same_shape(*x.geometry, *in.geometry))
      return at::Tensor();
    return record_of(x.storage) ? at::Tensor() : tensor_over(storage, *x.geometry);
  } else if (in.has_last) {
    auto s = in.last.lock();
    if (!s)
      return at::Tensor();
    storage = c10::Storage(std::move(s));
  } else {
    return at::Tensor();
  }
  if (record_of(storage.unsafeGetStorageImpl()) || is_foreign(storage.unsafeGetStorageImpl()))
    return at::Tensor();
  return tensor_over(storage, *in.last_geometry);
}

// A value of an earlier segment: of those that may stand there, the one that this iteration made. Validation tells
// later whether Python meant it.
at::Tensor GraphRunner::computed(const SegmentInput& in) {
  auto value = [&](int32_t slot) {
    int32_t sid = it_->sid_of(slot);
    bool there = sid >= 0 && it_->memory(sid).unsafeGetStorageImpl();
    return there ? tensor_over(it_->memory(sid), *in.geometry) : at::Tensor();
  };
  at::Tensor t = value(in.slot);
  for (size_t k = 0; !t.defined() && k < in.alternatives.size(); k++)
    t = value(in.alternatives[k]);
  return t;
}

// All inputs of the artifact. Waits for Python only where a value cannot be predicted. False: replay instead.
bool GraphRunner::gather_inputs(const Segment& s, int64_t at, std::vector<at::Tensor>* inputs) {
  Iteration& it = *it_;
  if (s.commit &&
      it.wait_validated(at, static_cast<int64_t>(s.nodes.size()), &stats_.stall_s) != Iteration::Ahead::Validated)
    return false;
  for (const auto& in : s.inputs) {
    if (in.geometry && in.slot >= 0) {
      at::Tensor t = computed(in);
      if (!t.defined())
        return false;
      inputs->push_back(std::move(t));
      continue;
    }
    if (in.geometry && !s.commit) {
      at::Tensor t = predict(in);
      if (t.defined()) {
        inputs->push_back(std::move(t));
        continue;
      }
    }
    if (!it.wait_input(at + in.position, &stats_.stall_s))
      return false;
    Entry& e = it.entry(at + in.position);
    if (e.node->id != s.nodes[in.position] || e.variant != s.variants[in.position])
      return false;
    if (!in.geometry) {
      if (!number_fits(e, in))
        return false;
      inputs->push_back(number_tensor(e, in));
      continue;
    }
    at::Tensor t = segment_argument(e, in.input);
    if (!t.defined() || !matches_shape(*in.geometry, *t.unsafeGetTensorImpl()))
      return false;
    inputs->push_back(std::move(t));
  }
  return true;
}

// Two inputs that were distinct memory when the artifact was compiled must be distinct now if one of them is written.
static bool distinct_where_written(const Segment& s, const std::vector<at::Tensor>& inputs) {
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!s.inputs[i].written)
      continue;
    for (size_t j = 0; j < inputs.size(); j++)
      if (j != i && s.inputs[j].geometry && s.inputs[j].storage != s.inputs[i].storage &&
          inputs[i].storage().unsafeGetStorageImpl() == inputs[j].storage().unsafeGetStorageImpl())
        return false;
  }
  return true;
}

// Runs the compiled segment that begins at `at`. Returns the log index behind it, or `at` if it must be replayed.
int64_t GraphRunner::run_segment(const Segment& s, int64_t at) {
  Iteration& it = *it_;
  SegmentRun run{&s, at, {}};
  auto n = static_cast<int64_t>(s.nodes.size());
  if (!gather_inputs(s, at, &run.used))
    return give_up(s, at, "an input was not there");
  if (!distinct_where_written(s, run.used))
    return give_up(s, at, "inputs share memory");
  if (s.commit) // everything is known: check before the writes
    if (auto why = disagreement(it, run, at, at + n))
      return give_up(s, at, *why);
  at::Tensor rng;
  auto generator = at::detail::getDefaultCPUGenerator();
  if (s.random)
    rng = generator.get_state();
  it.set_run(&run);
  current_run() = &run;
  current_iteration() = &it;
  auto t0 = Clock::now();
  std::vector<at::Tensor> results;
  try {
    results = s.artifact->run(run.used);
  } catch (...) { // the ops themselves know better what is wrong: replay raises eager's error
    current_run() = nullptr;
    it.set_run(nullptr);
    if (s.commit)
      throw; // memory may be half written
    if (rng.defined())
      generator.set_state(rng);
    return give_up(s, at, "the artifact raised");
  }
  double run_s = std::chrono::duration<double>(Clock::now() - t0).count();
  stats_.exec_s += run_s;
  stats_.compiled_runs++;
  current_run() = nullptr;
  std::optional<std::string> why;
  if (!s.commit) {
    if (it.wait_validated(at, n, &stats_.stall_s) == Iteration::Ahead::Void)
      why = it.void_reason().empty() ? "Python went another way" : it.void_reason();
    else
      why = disagreement(it, run, at, at + n);
  }
  if (!why)
    why = unexpected_survivor(s, at);
  if (why && s.commit) {
    // The writes are done; the values that the artifact did not return are gone. Cannot happen: commit segments are
    // checked before they run, and survivors are known by then.
    it.set_run(nullptr);
    TORCH_INTERNAL_ASSERT(false, "coexec: a commit segment lost a value: ", *why);
  }
  it.set_run(nullptr);
  if (why) {
    if (rng.defined())
      generator.set_state(rng);
    for (const auto& in : s.inputs)
      in.misses += in.geometry && in.slot < 0 && in.has_last && *why != "Python went another way";
    return give_up(s, at, *why);
  }
  t0 = Clock::now();
  commit(s, at, run, results);
  note_trial(s, true, run_s + std::chrono::duration<double>(Clock::now() - t0).count());
  s.runs++;
  run.used.clear(); // a batch must not die by this thread's hand after Python has gone on
  it.set_done(at + n); // last: Python may look at the segment from now on
  return at + n;
}

int64_t GraphRunner::give_up(const Segment& s, int64_t at, const std::string& why) {
  it_->discard_published(at, at + static_cast<int64_t>(s.nodes.size()));
  s.discards++;
  s.last_discard = why;
  stats_.discarded_runs++;
  return at;
}

// Memory made in the segment that Python still holds although the artifact does not return it.
std::optional<std::string> GraphRunner::unexpected_survivor(const Segment& s, int64_t at) {
  for (size_t p = 0; p < s.nodes.size(); p++) {
    const Node& n = program_->at(s.nodes[p]);
    if (n.kind != Kind::Compute)
      continue;
    for (size_t k = 0; k < n.outputs.size(); k++) {
      if (!n.outputs[k].defined || n.outputs[k].alias >= 0)
        continue;
      int32_t sid = n.slot_base + static_cast<int32_t>(k);
      bool returned = false;
      for (const auto& o : s.outputs)
        returned |= o.slot == sid;
      if (!returned && it_->record_alive(sid)) {
        program_->note_survivor(sid);
        return "Python kept the result of " + n.info->name;
      }
    }
  }
  return std::nullopt;
}

void GraphRunner::remember_sources(const Segment& s, int64_t at) {
  for (const auto& in : s.inputs) {
    if (!in.geometry || in.slot >= 0)
      continue;
    at::Tensor t = segment_argument(it_->entry(at + in.position), in.input);
    if (!t.defined())
      continue;
    auto* p = t.storage().unsafeGetStorageImpl();
    in.step_argument = -1;
    for (size_t k = 0; k < inputs_.size(); k++) {
      const auto& x = inputs_[k];
      auto alive = x.storage ? x.alive.lock() : c10::intrusive_ptr<c10::StorageImpl>();
      if (!alive)
        continue;
      bool same = x.storage == p && same_shape(*x.geometry, *in.geometry);
      bool copied = !same && is_foreign(x.storage) && same_bytes(t, tensor_over(c10::Storage(alive), *x.geometry));
      if (same || copied)
        in.step_argument = static_cast<int32_t>(k);
    }
    in.last = c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(p));
    in.last_geometry = intern_of(*t.unsafeGetTensorImpl());
    in.has_last = true;
  }
}

void GraphRunner::commit(const Segment& s, int64_t at, const SegmentRun& run, std::vector<at::Tensor>& results) {
  Iteration& it = *it_;
  if (!s.commit)
    remember_sources(s, at);
  size_t r = 0;
  for (const auto& o : s.outputs) {
    auto& t = results[r++];
    TORCH_INTERNAL_ASSERT(matches(*o.geometry, *t.unsafeGetTensorImpl()), "coexec: a compiled segment returned ",
        t.sizes(), " strides ", t.strides());
    it.set_memory(o.slot, t.storage());
  }
  if (!s.commit)
    for (int32_t m : s.mutated) {
      at::Tensor target = run.used[m];
      target.copy_(results[r++]);
    }
  results.clear();
  for (size_t p = 0; p < s.nodes.size(); p++) {
    Entry& e = it.entry(at + static_cast<int64_t>(p));
    it.release_frees(e);
    e.args.clear();
    e.patches.clear();
  }
}
} // namespace coexec
