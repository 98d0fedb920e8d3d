#include "graph_runner.h"
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>
#include <chrono>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include "memory.h"
#include "openmp.h"

namespace coexec {
namespace {

// Longer than Python takes from one step to the next in a plain loop, shorter than an evaluation between two steps.
constexpr std::chrono::milliseconds kKeepWorkers(3);

// Everything above the kernels was done on Python's side already.
struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Fake, c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
          c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
          c10::DispatchKey::Functionalize, c10::DispatchKey::AutocastCPU})};
};

// `torch.set_flush_denormal` sets it for the calling thread.
unsigned float_mode() {
#ifdef __x86_64__
  return _mm_getcsr() & ~_MM_EXCEPT_MASK;
#else
  return 0;
#endif
}

void set_float_mode(unsigned mode) {
#ifdef __x86_64__
  if (float_mode() != mode)
    _mm_setcsr(mode);
#else
  (void)mode;
#endif
}

// PyTorch's own handler prints to stderr on a thread that is not Python's.
struct WarningsForPython : c10::WarningHandler {
  explicit WarningsForPython(Iteration* i) : it(i) {}
  void process(const c10::Warning& w) override {
    it->warn(at, w);
  }
  Iteration* it;
  int64_t at = 0; // entry that is executed
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

// The kernel laid out what it returned otherwise than its meta kernel said: the same values, as they were handed out.
bool lie_otherwise(const Geometry& g, const at::Tensor& t) {
  return t.defined() && t.dtype().toScalarType() == g.dtype && t.sizes() == c10::IntArrayRef(g.sizes) &&
      g.offset == 0 && !g.lazy_bits && !matches(g, *t.unsafeGetTensorImpl());
}

void keep_outputs(Iteration& it, Entry& e, std::vector<c10::IValue>& results, GraphStats& stats) {
  size_t k = 0;
  auto one = [&](at::Tensor t) {
    const auto& o = e.node->outputs[k];
    if (o.defined && o.alias < 0) {
      const auto* g = e.variant->outputs[k];
      if (!e.variant->observed && lie_otherwise(*g, t)) {
        t = at::empty_strided(g->sizes, g->strides, t.options()).copy_(t);
        e.variant->wrong.store(true, std::memory_order_relaxed);
        stats.moved_results++;
      }
      TORCH_INTERNAL_ASSERT(t.defined() && matches(*g, *t.unsafeGetTensorImpl()), "coexec: ", e.node->info->name,
          " returned ", t.sizes(), " strides ", t.strides(), " where ", c10::IntArrayRef(g->sizes), " strides ",
          c10::IntArrayRef(g->strides), " was handed out");
      it.set_memory(e.first_sid + static_cast<int32_t>(k), t.storage());
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
  WithoutGil no_gil; // the thread may need it to let go of the previous iteration's memory
  std::unique_lock<std::mutex> l(m_);
  if (!thread_.joinable()) {
    keep_freed_memory();
    thread_ = std::thread([this] { loop(); });
  }
  idle_cv_.wait(l, [&] { return !busy_; });
  it_ = std::move(it);
  segments_ = std::move(segments);
  inputs_ = std::move(inputs);
  if (capture) // one that has begun is of an iteration that failed or fell back: its inputs may be the reason
    capture->failed |= capture->begun();
  threads_ = at::get_num_threads();
  float_mode_ = float_mode();
  busy_ = true;
  cv_.notify_one();
}

void GraphRunner::join_iteration() {
  WithoutGil no_gil;
  std::unique_lock<std::mutex> l(m_);
  idle_cv_.wait(l, [&] { return !busy_; });
}

void GraphRunner::stop() {
  {
    std::lock_guard<std::mutex> l(m_);
    stop_ = true;
    cv_.notify_one();
  }
  WithoutGil no_gil;
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
  if (it_)
    it_->orphan();
  new std::shared_ptr<Iteration>(std::move(it_)); // leaked: its locks cannot be trusted either
}

void GraphRunner::loop() {
  pthread_setname_np(pthread_self(), "coexec-graph");
  for (;;) {
    {
      std::unique_lock<std::mutex> l(m_);
      auto wanted = [&] { return stop_ || busy_; };
      if (!cv_.wait_for(l, kKeepWorkers, wanted)) {
        l.unlock();
        release_openmp_workers();
        l.lock();
        cv_.wait(l, wanted);
      }
      if (stop_ && !busy_)
        return;
    }
    run_iteration();
    {
      // Without the lock, and before anybody is told: memory with a Python object needs the GIL to die.
      auto it = std::move(it_);
      auto inputs = std::move(inputs_);
    }
    std::lock_guard<std::mutex> l(m_);
    busy_ = false;
    idle_cv_.notify_all();
  }
}

// Only what kernels read. Not at::ThreadLocalState: it brings the saved-tensor hooks of Python along, and with them the
// GIL.
void GraphRunner::adopt_thread_state() {
  if (at::get_num_threads() != threads_)
    at::set_num_threads(threads_); // OpenMP's thread count belongs to the thread
  set_float_mode(float_mode_);
}

void GraphRunner::run_iteration() {
  BelowEverything guards;
  adopt_thread_state();
  Iteration& it = *it_;
  replay_until_ = 0;
  timed_ = learning_ = nullptr;
  seen_at_.assign(program_->size(), -1);
  WarningsForPython warnings(&it);
  c10::WarningUtils::WarningHandlerGuard collect(&warnings);
  for (int64_t i = 0;;) {
    warnings.at = i;
    try {
      if (const PlannedSegment* p = segment_at(i)) {
        int64_t next = run_planned(*p, i);
        if (next > i) {
          i = next;
          continue;
        }
        replay_until_ = i + static_cast<int64_t>(p->nodes.size());
      }
    } catch (...) {
      it.set_failed(i, std::current_exception());
      return;
    }
    note_wait(i);
    int32_t before = i == 0 ? kStart : it.entry(i - 1).node->id;
    if (!stalled(before, [&](double* s) { return it.wait_entry(i, s); }))
      return;
    if (segment_at(i)) // only now is it known which way Python went
      continue;
    Entry& e = it.entry(i);
    if (learning_)
      learn_sources(e, i);
    auto t0 = Clock::now();
    try {
      it.release_frees(e);
      if (!e.args.empty())
        execute(e);
    } catch (...) {
      it.set_failed(i, std::current_exception());
      return;
    }
    auto t1 = Clock::now();
    double op_s = std::chrono::duration<double>(t1 - t0).count();
    it.spans->add_op(e.node->id, t0, t1);
    stats_.exec_s += op_s;
    if (timed_) {
      timed_s_ += op_s;
      if (e.node->id == timed_->nodes.back()) {
        note_trial(*timed_, false, timed_s_);
        timed_ = nullptr;
      }
    }
    seen_at_[e.node->id] = i;
    it.set_done(++i);
  }
}

// Case Select and Loop Cond have no message of their own: the next entry of the log says which way Python went.
void GraphRunner::note_wait(int64_t at) {
  if (it_->validated() > at || it_->closed())
    return;
  const Node& n = at == 0 ? program_->at(kStart) : *it_->entry(at - 1).node;
  if (n.planned_child() < 0)
    (n.loop_cond ? stats_.loop_cond_waits : stats_.case_select_waits)++;
}

void GraphRunner::execute(Entry& e) {
  if (capture && e.node->segment == capture->segment)
    capture_inputs(e);
  fill_placeholders(*it_, e);
  stats_.replayed_ops++;
  e.node->info->handle->callBoxed(&e.args);
  keep_outputs(*it_, e, e.args, stats_);
  e.args.clear();
  e.patches.clear();
}
} // namespace coexec
