#include "graph_runner.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>
#include <torch/library.h>
#include <chrono>

namespace coexec {
namespace {

// Everything above the kernels was done on Python's side already.
struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Fake, c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
          c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
          c10::DispatchKey::Functionalize, c10::DispatchKey::AutocastCPU})};
};

void fill_placeholders(Iteration& it, Entry& e) {
  for (const auto& p : e.patches) {
    at::Tensor t = tensor_over(p.external ? c10::Storage(p.external) : it.memory(p.sid), *p.geometry);
    auto& v = e.args[p.arg];
    if (p.element < 0)
      v = std::move(t);
    else if (v.isTensorList())
      v.toTensorList().set(p.element, std::move(t));
    else
      v.toOptionalTensorList().set(p.element, std::move(t));
  }
}

void keep_outputs(Iteration& it, Entry& e, std::vector<c10::IValue>& results) {
  size_t k = 0;
  auto one = [&](const at::Tensor& t) {
    const auto& o = e.node->outputs[k];
    if (o.defined && o.alias < 0) {
      const auto* g = e.variant->outputs[k];
      TORCH_INTERNAL_ASSERT(t.defined() && matches(*g, *t.unsafeGetTensorImpl()), "coexec: ", e.node->info->name,
          " returned ", t.sizes(), " strides ", t.strides(), " where ", c10::IntArrayRef(g->sizes), " strides ",
          c10::IntArrayRef(g->strides), " was handed out");
      it.set_memory(e.node->slot_base + static_cast<int32_t>(k), t.storage());
    }
    k++;
  };
  for (auto& r : results) {
    if (r.isTensor())
      one(r.toTensor());
    else
      for (const at::Tensor& t : r.toTensorList())
        one(t);
  }
}
} // namespace

GraphRunner::~GraphRunner() {
  stop();
}

void GraphRunner::start(
    std::shared_ptr<Iteration> it, std::shared_ptr<const SegmentTable> segments, std::vector<StepInput> inputs) {
  std::unique_lock<std::mutex> l(m_);
  if (!thread_.joinable())
    thread_ = std::thread([this] { loop(); });
  idle_cv_.wait(l, [&] { return !busy_; });
  it_ = std::move(it);
  segments_ = std::move(segments);
  inputs_ = std::move(inputs);
  threads_ = at::get_num_threads();
  busy_ = true;
  cv_.notify_one();
}

void GraphRunner::join_iteration() {
  std::unique_lock<std::mutex> l(m_);
  idle_cv_.wait(l, [&] { return !busy_; });
}

void GraphRunner::stop() {
  {
    std::lock_guard<std::mutex> l(m_);
    stop_ = true;
    cv_.notify_one();
  }
  if (thread_.joinable())
    thread_.join();
}

// Mutexes and condition variables may be held by the thread that does not exist here: they are built anew in place.
void GraphRunner::abandon() {
  if (!thread_.joinable())
    return;
  thread_.detach();
  new (&thread_) std::thread();
  new (&m_) std::mutex();
  new (&cv_) std::condition_variable();
  new (&idle_cv_) std::condition_variable();
  busy_ = false;
  new std::shared_ptr<Iteration>(std::move(it_)); // leaked: its locks cannot be trusted either
}

void GraphRunner::loop() {
  pthread_setname_np(pthread_self(), "coexec-graph");
  for (;;) {
    {
      std::unique_lock<std::mutex> l(m_);
      cv_.wait(l, [&] { return stop_ || busy_; });
      if (stop_ && !busy_)
        return;
    }
    run_iteration();
    std::lock_guard<std::mutex> l(m_);
    it_.reset();
    inputs_.clear();
    busy_ = false;
    idle_cv_.notify_all();
  }
}

// Only what kernels read. Not at::ThreadLocalState: it brings the saved-tensor hooks of Python along, and with them the
// GIL.
void GraphRunner::adopt_thread_state() {
  if (at::get_num_threads() != threads_)
    at::set_num_threads(threads_); // OpenMP's thread count belongs to the thread
}

void GraphRunner::run_iteration() {
  BelowEverything guards;
  adopt_thread_state();
  Iteration& it = *it_;
  replay_until_ = 0;
  timed_ = nullptr;
  for (int64_t i = 0;;) {
    try {
      if (const Segment* s = segment_at(i)) {
        int64_t next = run_segment(*s, i);
        if (next > i) {
          i = next;
          continue;
        }
        replay_until_ = i + static_cast<int64_t>(s->nodes.size());
      }
    } catch (...) {
      it.set_failed(i, std::current_exception());
      return;
    }
    if (!it.wait_entry(i, &stats_.stall_s))
      return;
    Entry& e = it.entry(i);
    auto t0 = Clock::now();
    try {
      it.release_frees(e);
      if (!e.args.empty())
        execute(e);
    } catch (...) {
      it.set_failed(i, std::current_exception());
      return;
    }
    double op_s = std::chrono::duration<double>(Clock::now() - t0).count();
    stats_.exec_s += op_s;
    if (timed_) {
      timed_s_ += op_s;
      if (e.node->id == timed_->nodes.back()) {
        note_trial(*timed_, false, timed_s_);
        timed_ = nullptr;
      }
    }
    it.set_done(++i);
  }
}

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
  if (!s || !s->artifact || s->slower.load(std::memory_order_relaxed))
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
    if (is_foreign(x.storage)) { // other code may write it meanwhile: see same_bytes in segment.cpp
      at::Tensor copy =
          at::empty_strided(x.geometry->sizes, x.geometry->strides, at::TensorOptions().dtype(x.geometry->dtype));
      copy.copy_(tensor_over(storage, *x.geometry));
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

namespace {
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
} // namespace

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

namespace {
int64_t append(FILE* f, const void* data, size_t n) {
  std::fseek(f, 0, SEEK_END);
  while (std::ftell(f) % 64)
    std::fputc(0, f);
  int64_t start = std::ftell(f);
  return std::fwrite(data, 1, n, f) == n ? start : -1;
}
} // namespace

// An input is written just before the first op that uses it: nothing of the segment has changed it then.
void GraphRunner::capture_inputs(Entry& e) {
  Capture& c = *capture;
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
        int64_t own = p.geometry->offset * static_cast<int64_t>(c10::elementSize(p.geometry->dtype));
        int64_t low = i.low < 0 ? own : i.low;
        if (st.unsafeGetStorageImpl() && static_cast<int64_t>(st.nbytes()) >= low + i.nbytes)
          i.start = append(f, static_cast<const char*>(st.data()) + low, i.nbytes);
      }
    }
    c.failed |= i.start < 0;
  }
  if (f)
    std::fclose(f);
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

void GraphRunner::execute(Entry& e) {
  if (capture && e.node->segment == capture->segment)
    capture_inputs(e);
  fill_placeholders(*it_, e);
  stats_.replayed_ops++;
  e.node->info->handle->callBoxed(&e.args);
  keep_outputs(*it_, e, e.args);
  e.args.clear();
  e.patches.clear();
}
} // namespace coexec
