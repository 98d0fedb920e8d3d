// The GraphRunner runs compiled segments: gathers inputs (predicted ones too), runs ahead, commits or discards.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>
#include <algorithm>
#include "graph_runner.h"

namespace coexec {
// The planned segment that begins at log index `at` and has a compiled version, if the path is known: the op is
// validated, or it is the only one that is planned to come (no Case Select).
const PlannedSegment* GraphRunner::segment_at(int64_t at) {
  if (!segments_ || at < replay_until_ || it_->lazy)
    return nullptr;
  int32_t node = -1;
  if (it_->validated() > at) {
    node = it_->entry(at).node->id;
  } else {
    node = (at == 0 ? program_->at(kStart) : *it_->entry(at - 1).node).planned_child();
    if (node < 0 || node == kEnd)
      return nullptr;
  }
  const Node& n = program_->at(node);
  if (n.segment < 0 || n.position != 0)
    return nullptr;
  const PlannedSegment* p = segments_->by_id[n.segment].get();
  if (p->stale.load(std::memory_order_relaxed))
    return nullptr;
  for (const auto& s : p->versions)
    if (!s->slower.load(std::memory_order_relaxed))
      return p;
  return nullptr;
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

// Of an external that is expected before Python has named it; null if nothing is expected.
const Geometry* GraphRunner::predicted_geometry(const SegmentInput& in) {
  if (in.misses >= 2)
    return nullptr;
  if (in.step_argument >= 0 && static_cast<size_t>(in.step_argument) < inputs_.size()) {
    const auto& x = inputs_[in.step_argument];
    // No compiled segment takes a conjugated or negated view.
    return !x.storage || x.alive.expired() || x.geometry->lazy_bits ? nullptr : x.geometry;
  }
  return in.has_last && !in.last.expired() ? in.last_geometry : nullptr;
}

at::Tensor GraphRunner::predict(const SegmentInput& in) {
  bool argument = in.step_argument >= 0 && static_cast<size_t>(in.step_argument) < inputs_.size();
  auto s = argument ? inputs_[in.step_argument].alive.lock() : in.last.lock();
  if (!s)
    return at::Tensor();
  const Geometry& g = argument ? *inputs_[in.step_argument].geometry : *in.last_geometry;
  auto* memory = s.get();
  if (record_of(memory))
    return at::Tensor();
  c10::Storage storage(std::move(s));
  if (!is_foreign(memory))
    return tensor_over(storage, g);
  // Other code may write it meanwhile: see same_bytes in segment.cpp. Of the last iteration's, it may have written it.
  // What the segment writes must not land in a copy.
  return argument && !in.written ? copy_as_it_lies(storage, g) : at::Tensor();
}

// How a value that an earlier op of this iteration made lies in memory; null if none made it.
const Geometry* GraphRunner::geometry_of(int32_t slot, int64_t before) {
  int32_t node = program_->node_of_slot(slot);
  int64_t i = seen_at_[node];
  if (i < 0 || i >= before)
    return nullptr;
  const Variant* v = it_->entry(i).variant;
  return v ? v->outputs[slot - program_->at(node).slot_base] : nullptr;
}

// A value of an earlier segment: of those that may stand there, the one that this iteration made. Validation tells
// later whether Python meant it.
at::Tensor GraphRunner::computed(const SegmentInput& in, int64_t before) {
  auto value = [&](int32_t slot) {
    int32_t sid = it_->sid_of(slot);
    const Geometry* g = geometry_of(slot, before);
    bool there = g && sid >= 0 && it_->memory(sid).unsafeGetStorageImpl();
    return there ? tensor_over(it_->memory(sid), *g) : at::Tensor();
  };
  at::Tensor t = value(in.slot);
  for (size_t k = 0; !t.defined() && k < in.alternatives.size(); k++)
    t = value(in.alternatives[k]);
  return t;
}

// Collects the inputs of the artifact as far as they are known. False: one is not what the artifact takes. `unknown`:
// position of the first op that Python must have validated before more can be said, or -1. `guess`: of the first input
// that is expected to lie as in the last iteration, or -1. A guess never speaks against an artifact: a part of a batch
// has other sizes with each batch.
bool GraphRunner::gather_inputs(const Segment& s, SegmentRun* run, int32_t* unknown, int32_t* guess) {
  Iteration& it = *it_;
  *unknown = *guess = -1;
  std::vector<const Geometry*> geometries(s.inputs.size(), nullptr);
  run->used.assign(s.inputs.size(), at::Tensor());
  std::vector<bool> predicted(s.inputs.size(), false);
  for (size_t k = 0; k < s.inputs.size(); k++) {
    const auto& in = s.inputs[k];
    at::Tensor t;
    if (in.geometry && in.slot >= 0 && in.latest) {
      t = computed(in, run->base);
      if (!t.defined())
        return misfit("a value of an earlier segment is not there");
    } else if (in.geometry && in.slot < 0 && !s.commit && it.validated() <= run->base + in.position &&
        (geometries[k] = predicted_geometry(in))) {
      predicted[k] = true;
      if (in.step_argument < 0 && *guess < 0)
        *guess = in.position;
    } else if (it.validated() <= run->base + in.position) {
      *unknown = *unknown < 0 ? in.position : *unknown;
      continue;
    } else {
      Entry& e = it.entry(run->base + in.position);
      if (e.node->id != s.nodes[in.position] || (!in.geometry && !number_fits(e, in)))
        return misfit("another path, or a number of another type");
      t = !in.geometry  ? number_tensor(e, in)
          : in.slot < 0 ? segment_argument(e, in.input)
                        : computed_argument(it, e, in.input);
      if (!t.defined())
        return misfit("a computed value where memory from outside was, or the other way round");
    }
    if (in.geometry && !predicted[k])
      geometries[k] = intern_of(*t.unsafeGetTensorImpl());
    if (s.symbols.empty() && in.geometry && !same_shape(*geometries[k], *in.geometry)) {
      if (!predicted[k] || in.step_argument >= 0)
        return misfit("an input of other sizes");
      *unknown = *unknown < 0 ? in.position : *unknown;
      continue;
    }
    run->used[k] = std::move(t);
  }
  if (*unknown >= 0)
    return true;
  if (!s.symbols.empty() && !bind_symbols(s, geometries, &run->symbols)) {
    *unknown = *guess;
    return *guess >= 0 || misfit("sizes that its guards or patterns exclude");
  }
  for (size_t k = 0; k < s.inputs.size(); k++) { // last: a copy is made of what other code may change
    if (!predicted[k])
      continue;
    run->used[k] = predict(s.inputs[k]);
    if (!run->used[k].defined()) { // it died meanwhile
      if (it.validated() > run->base + s.inputs[k].position)
        return misfit("a predicted input was gone");
      s.inputs[k].misses++;
      *unknown = s.inputs[k].position;
      return true;
    }
  }
  return true;
}

// Can version `s` compute what comes? Fills `run`.
GraphRunner::Fit GraphRunner::fit(const Segment& s, SegmentRun* run, int32_t* unknown) {
  run->segment = &s;
  int32_t guess = -1;
  if (!gather_inputs(s, run, unknown, &guess))
    return Fit::No;
  if (*unknown >= 0)
    return Fit::Unknown;
  int64_t there = std::min<int64_t>(it_->validated() - run->base, static_cast<int64_t>(s.nodes.size()));
  for (int64_t p = 0; p < there; p++) {
    const Entry& e = it_->entry(run->base + p);
    if (e.node->id == s.nodes[p] && fits_entry(s, p, e, run->symbols))
      continue;
    *unknown = e.node->id == s.nodes[p] ? guess : -1;
    misfit("an op on other shapes");
    return *unknown >= 0 ? Fit::Unknown : Fit::No;
  }
  return Fit::Yes;
}

// The first version that fits, with its inputs in `run`. Waits for Python only where an input cannot be predicted.
// Null: replay.
const Segment* GraphRunner::choose(const PlannedSegment& p, SegmentRun* run) {
  Iteration& it = *it_;
  bool commits = p.versions.front()->commit;
  if (commits && stalled(p.nodes.front(), [&](double* seconds) {
        return it.wait_validated(run->base, static_cast<int64_t>(p.nodes.size()), seconds);
      }) != Iteration::Ahead::Validated) {
    give_up(*p.versions.front(), run->base, "Python did not get to its end");
    return nullptr;
  }
  for (;;) {
    const Segment* waiting = nullptr;
    int32_t position = -1;
    for (const auto& s : p.versions) {
      int32_t unknown = -1;
      if (s->slower.load(std::memory_order_relaxed))
        continue;
      Fit f = fit(*s, run, &unknown);
      if (f == Fit::Yes)
        return s.get();
      if (f == Fit::Unknown && !waiting) {
        waiting = s.get();
        position = unknown;
      }
    }
    if (!waiting) {
      p.unserved++;
      p.last_misfit.store(misfit_, std::memory_order_relaxed);
      return nullptr;
    }
    if (!stalled(p.nodes[position], [&](double* seconds) { return it.wait_input(run->base + position, seconds); })) {
      learning_ = waiting;
      learning_base_ = run->base;
      p.awaited_node = waiting->nodes[position];
      p.awaited++;
      give_up(*waiting, run->base, "an input was not there");
      return nullptr;
    }
  }
}

// Inputs that shared memory which is written must share it as they did when the artifact was compiled.
static bool apart_as_compiled(const Segment& s, const SegmentRun& run) {
  return std::all_of(s.distances.begin(), s.distances.end(), [&](const SegmentDistance& d) {
    const at::Tensor &t = run.used[d.input], &reference = run.used[d.reference];
    int64_t bytes = t.storage_offset() * static_cast<int64_t>(t.itemsize()) -
        reference.storage_offset() * static_cast<int64_t>(reference.itemsize());
    auto expected = d.expression < 0 ? d.bytes : evaluate(s.expressions[d.expression], run.symbols);
    return t.storage().unsafeGetStorageImpl() == reference.storage().unsafeGetStorageImpl() && bytes == expected;
  });
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

template <class T>
static bool all_within(const at::Tensor& t, int64_t low, int64_t high, std::optional<int64_t> ignored) {
  at::Tensor dense = t.contiguous();
  const T* p = dense.const_data_ptr<T>();
  return std::all_of(p, p + dense.numel(), [&](T x) { return (x >= low && x < high) || (ignored && x == *ignored); });
}

// Dtypes as in backends/index_ranges.py: labels may come as bytes or floats, and be cast in the step.
static bool all_indices_within(const at::Tensor& t, int64_t low, int64_t high, std::optional<int64_t> ignored) {
  switch (t.scalar_type()) {
#define COEXEC_WITHIN(T, name) \
  case at::ScalarType::name:   \
    return all_within<T>(t, low, high, ignored);
    AT_FORALL_SCALAR_TYPES_AND(Bool, COEXEC_WITHIN)
#undef COEXEC_WITHIN
    default:
      return false;
  }
}

static bool indices_within(const Segment& s, const SegmentRun& run) {
  return std::all_of(s.ranges.begin(), s.ranges.end(), [&](const IndexRange& r) {
    int64_t size = r.expression < 0 ? r.size : evaluate(s.expressions[r.expression], run.symbols).value_or(0);
    int64_t low = r.from_end ? -size : 0;
    return all_indices_within(run.used[r.input], low, size, r.ignored);
  });
}

// Runs a version of the segment that begins at `at`. Returns the log index behind it, or `at` if it must be replayed.
int64_t GraphRunner::run_planned(const PlannedSegment& p, int64_t at) {
  SegmentRun run{nullptr, at, {}, {}};
  const Segment* s = choose(p, &run);
  if (!s)
    return at;
  if (s->trial > 0 && s->trial % 2 == 0) { // replay's turn
    timed_ = s;
    timed_s_ = 0;
    return at;
  }
  return run_segment(*s, run);
}

int64_t GraphRunner::run_segment(const Segment& s, SegmentRun& run) {
  Iteration& it = *it_;
  int64_t at = run.base;
  auto n = static_cast<int64_t>(s.nodes.size());
  if (!distinct_where_written(s, run.used))
    return give_up(s, at, "inputs share memory");
  if (!apart_as_compiled(s, run))
    return give_up(s, at, "inputs lie otherwise in memory that is written");
  if (!indices_within(s, run))
    return give_up(s, at, "an index is out of range");
  if (s.commit) { // everything is known: check before the writes
    auto why = disagreement(it, run, at, at + n);
    if (!why) // Python has gone on: what it does not hold now it will never hold
      why = unexpected_survivor(s, at);
    if (why)
      return give_up(s, at, *why);
  }
  at::Tensor rng;
  auto generator = at::detail::getDefaultCPUGenerator();
  if (s.random)
    rng = generator.get_state();
  if (!it.begin_run(&run))
    return give_up(s, at, "Python went another way");
  current_run() = &run;
  current_iteration() = &it;
  auto t0 = Clock::now();
  std::vector<at::Tensor> results;
  try {
    results = s.artifact->run(run.used);
  } catch (...) { // the ops themselves know better what is wrong: replay raises eager's error
    current_run() = nullptr;
    if (!s.commit && rng.defined())
      generator.set_state(rng);
    it.end_run();
    if (s.commit)
      throw; // memory may be half written
    return give_up(s, at, "the artifact raised");
  }
  auto t1 = Clock::now();
  double run_s = std::chrono::duration<double>(t1 - t0).count();
  CallSpans::add(it.spans->graph, {Span::Kind::Segment, 0, s.nodes.front(), 0, n, t0, t1});
  stats_.exec_s += run_s;
  stats_.compiled_runs++;
  current_run() = nullptr;
  std::optional<std::string> why;
  if (!s.commit) {
    if (stalled(s.nodes.back(), [&](double* seconds) { return it.wait_validated(at, n, seconds); }) ==
        Iteration::Ahead::Void)
      why = it.void_reason().empty() ? "Python went another way" : it.void_reason();
    else
      why = disagreement(it, run, at, at + n);
  }
  if (!why)
    why = unexpected_survivor(s, at);
  // The writes of a commit segment are done. It was checked before, and what was dead then is dead.
  TORCH_INTERNAL_ASSERT(!why || !s.commit, "coexec: a commit segment lost a value: ", *why);
  if (why) {
    if (rng.defined())
      generator.set_state(rng);
    note_misses(run);
    it.end_run(); // last: Python may draw from now on
    return give_up(s, at, *why);
  }
  it.end_run();
  t0 = Clock::now();
  for (int64_t p = 0; p < n; p++)
    seen_at_[s.nodes[p]] = at + p;
  commit(s, at, run, results);
  note_trial(s, true, run_s + std::chrono::duration<double>(Clock::now() - t0).count());
  s.runs++;
  run.used.clear(); // a batch must not die by this thread's hand after Python has gone on
  it.set_done(at + n); // last: Python may look at the segment from now on
  return at + n;
}

// Which inputs of a discarded run were predicted wrong. The others are predicted again: a segment in whose middle
// Python stops cannot start without.
void GraphRunner::note_misses(const SegmentRun& run) {
  for (size_t k = 0; k < run.used.size(); k++) {
    const auto& in = run.segment->inputs[k];
    int64_t i = run.base + in.position;
    if (!in.geometry || in.slot >= 0 || !in.has_last || it_->validated() <= i ||
        it_->entry(i).node->id != run.segment->nodes[in.position])
      continue;
    at::Tensor named = segment_argument(it_->entry(i), in.input);
    const at::Tensor& used = run.used[k];
    bool same = named.defined() && named.storage().unsafeGetStorageImpl() == used.storage().unsafeGetStorageImpl() &&
        named.storage_offset() == used.storage_offset();
    in.misses += !same && (in.written || !(named.defined() && same_bytes(named, used)));
  }
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
      int32_t slot = n.slot_base + static_cast<int32_t>(k);
      int32_t sid = it_->entry(at + static_cast<int64_t>(p)).first_sid + static_cast<int32_t>(k);
      bool returned = false;
      for (const auto& o : s.outputs)
        returned |= o.slot == slot;
      if (!returned && it_->record_alive(sid)) {
        program_->note_survivor(slot);
        return "Python kept the result of " + n.info->name;
      }
    }
  }
  return std::nullopt;
}

void GraphRunner::remember_source(const SegmentInput& in, const Entry& e) {
  at::Tensor t = segment_argument(e, in.input);
  if (!t.defined())
    return;
  auto* p = t.storage().unsafeGetStorageImpl();
  in.step_argument = -1;
  for (size_t k = 0; k < inputs_.size(); k++) {
    const auto& x = inputs_[k];
    auto alive = x.storage ? x.alive.lock() : c10::intrusive_ptr<c10::StorageImpl>();
    if (!alive)
      continue;
    bool same = x.storage == p && matches_shape(*x.geometry, *t.unsafeGetTensorImpl());
    if (same && x.geometry->offset == t.storage_offset()) { // of two slices of one batch, this one
      in.step_argument = static_cast<int32_t>(k);
      break;
    }
    bool copied = !same && is_foreign(x.storage) && same_bytes(t, tensor_over(c10::Storage(alive), *x.geometry));
    if (same || copied)
      in.step_argument = static_cast<int32_t>(k);
  }
  in.last = c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(p));
  in.last_geometry = intern_of(*t.unsafeGetTensorImpl());
  in.has_last = true;
}

void GraphRunner::remember_sources(const Segment& s, int64_t at) {
  for (const auto& in : s.inputs)
    if (in.geometry && in.slot < 0)
      remember_source(in, it_->entry(at + in.position));
}

// Where the inputs of a segment come from that cannot start before it knows: Python stops inside it, at a value that it
// computes, before it names them.
void GraphRunner::learn_sources(const Entry& e, int64_t at) {
  auto position = static_cast<size_t>(at - learning_base_);
  if (position >= learning_->nodes.size() || e.node->id != learning_->nodes[position]) {
    learning_ = nullptr;
    return;
  }
  for (const auto& in : learning_->inputs)
    if (in.geometry && in.slot < 0 && in.position == static_cast<int32_t>(position))
      remember_source(in, e);
}

void GraphRunner::commit(const Segment& s, int64_t at, const SegmentRun& run, std::vector<at::Tensor>& results) {
  Iteration& it = *it_;
  if (!s.commit)
    remember_sources(s, at);
  size_t r = 0;
  for (const auto& o : s.outputs) {
    auto& t = results[r++];
    const Geometry* g = geometry_of(o.slot, at + static_cast<int64_t>(s.nodes.size()));
    TORCH_INTERNAL_ASSERT(g && lies_alike(*g, *t.unsafeGetTensorImpl()), "coexec: a compiled segment returned ",
        t.sizes(), " strides ", t.strides());
    const Node& n = program_->at(program_->node_of_slot(o.slot));
    it.set_memory(it.entry(at + n.position).first_sid + o.slot - n.slot_base, t.storage());
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
