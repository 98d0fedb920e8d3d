#include "overlap.h"
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include "process_lock.h"
#include "raised.h"
#include "step.h"

namespace coexec {
namespace {
// Calls that returned early and whose end nobody has waited for yet.
struct Announced {
  std::atomic<size_t> n{0};
  std::vector<std::shared_ptr<Overlap>> overlaps;
};
Announced& announced() {
  static auto* a = new Announced();
  return *a;
}

// Held during forks with the locks of all that is announced; whoever has one of those takes locks of other tables, so
// they come first.
std::mutex announced_m;
void lock_announced(void*) {
  announced_m.lock();
  for (auto& o : announced().overlaps)
    o->lock();
}
void unlock_announced(void*) {
  for (auto& o : announced().overlaps)
    o->unlock();
  announced_m.unlock();
}
const bool held = hold_during_forks(&lock_announced, &unlock_announced, nullptr, true);

std::vector<std::shared_ptr<Overlap>> announced_now() {
  auto& a = announced();
  if (a.n.load(std::memory_order_acquire) == 0)
    return {};
  std::lock_guard<std::mutex> l(announced_m);
  return a.overlaps;
}

void withdraw(const Overlap* o) {
  auto& a = announced();
  std::shared_ptr<Overlap> gone; // may be the last reference: goes without the lock
  std::lock_guard<std::mutex> l(announced_m);
  for (auto i = a.overlaps.begin(); i != a.overlaps.end(); ++i)
    if (i->get() == o) {
      gone = std::move(*i);
      a.overlaps.erase(i);
      break;
    }
  a.n.store(a.overlaps.size(), std::memory_order_release);
}

// This thread's ops need not pass by any more.
void stop_watching(bool raise) {
  auto o = overlap_here();
  if (!raise && o && o->has_error())
    return; // the next op raises it
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  overlap_here().reset();
  if (raise && o)
    o->raise_error();
}

// As a Python exception of eager's type and text, with the note that a step's own end would have added.
[[noreturn]] void throw_python_error(const std::exception_ptr& e, Step* step) {
  pybind11::gil_scoped_acquire gil;
  try {
    throw_again(e);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (step)
    try {
      step->name_late_error(pybind11::handle(value));
    } catch (pybind11::error_already_set&) { // the note is a courtesy
    }
  PyErr_Restore(type, value, traceback);
  python_error error;
  error.persist();
  throw error;
}

template <class F>
void each_tensor(const OpInfo& info, c10::ArrayRef<c10::IValue> args, F&& f) {
  for (size_t i = 0; i < args.size(); i++) {
    bool writes = info.args[i].writes;
    for (auto w : info.undeclared_writes)
      writes |= static_cast<size_t>(w) == i;
    if (args[i].isTensor())
      f(args[i].toTensor(), writes);
    else if (args[i].isList() && info.args[i].cls != ArgClass::Number)
      for (const auto& e : args[i].toListRef())
        if (e.isTensor())
          f(e.toTensor(), writes);
  }
}

// A TorchBind object and the like, which may hold tensors.
bool has_object(const OpInfo& info, c10::ArrayRef<c10::IValue> args) {
  for (size_t i = 0; i < args.size(); i++)
    if (info.args[i].cls == ArgClass::Object && !args[i].isNone() && !args[i].isGenerator() && !args[i].isStorage())
      return true;
  return false;
}
} // namespace

Overlap::Overlap(
    Step* s, std::shared_ptr<Iteration> it, ForeignUse use, std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> keyed)
    : step(s), it_(std::move(it)), size_(it_->size()), use_(std::move(use)), keyed_(std::move(keyed)) {
  // Whoever waits for one of its values waits for all of it: it may be used again before the end.
  for (const auto* w : use_.writes)
    note_pending_write(w, it_, size_ - 1);
  for (const auto& s : it_->live_storages())
    record_of(s.unsafeGetStorageImpl())->last_write = size_ - 1;
}

bool Overlap::finished() const {
  if (settled())
    return true;
  std::shared_ptr<Iteration> it;
  {
    std::lock_guard<std::mutex> l(m_);
    it = it_;
  }
  return !it || it->failed() || it->done() >= size_;
}

void Overlap::settle() {
  std::shared_ptr<Iteration> it;
  {
    std::lock_guard<std::mutex> l(m_);
    it = it_;
  }
  if (!it)
    return;
  if (!it->failed() && it->done() < size_) {
    waits++;
    stall_s.fetch_add(it->wait_done(size_, false, Signals::Always));
  }
  it->prevent_run(); // one that expected more than there was
  std::vector<c10::Storage> live; // may be the last references: go without the lock
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> keyed;
  {
    std::lock_guard<std::mutex> l(m_);
    if (!it_)
      return;
    live = it->live_storages();
    for (const auto& s : live)
      make_ordinary(s.unsafeGetStorageImpl());
    keyed = std::move(keyed_);
    error_ = it->error();
    it_.reset();
    settled_.store(true, std::memory_order_release);
  }
  for (auto& w : keyed) // without the lock: it may need the GIL
    if (auto t = w.lock())
      clear_stale_key(t.get());
  forget_pending_writes(it.get());
  withdraw(this);
}

void Overlap::raise_error() {
  if (settled() && error_ && see_error())
    throw_python_error(error_, step);
}

bool Overlap::pending_memory(const c10::StorageImpl* s) const {
  return record_of(s) || use_.writes.count(s);
}

bool Overlap::touches(const at::Tensor& t, bool writes) const {
  return t.defined() && touch(t, writes, false) != Touch::Nothing;
}

Overlap::Touch Overlap::touch(const at::Tensor& t, bool writes, bool view) const {
  auto* impl = t.unsafeGetTensorImpl();
  if (is_special(*impl)) // its parts may be anything
    return Touch::Value;
  auto* s = impl->unsafe_storage().unsafeGetStorageImpl();
  if (pending_memory(s))
    return view ? Touch::View : Touch::Value;
  return writes && use_.reads.count(s) ? Touch::Value : Touch::Nothing;
}

Overlap::Touch Overlap::touch(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) const {
  const OpInfo* info = op_info(op);
  if (info->pass_through)
    return Touch::Nothing;
  // What the kernel of a custom op looks at, nobody knows.
  if ((info->random && use_.draws) || info->name.compare(0, 6, "aten::") != 0 || has_object(*info, args))
    return Touch::Value;
  bool view = info->is_view && !info->decompose && !op.hasTag(at::Tag::inplace_view);
  auto all = Touch::Nothing;
  each_tensor(*info, args, [&](const at::Tensor& t, bool writes) {
    if (t.defined())
      all = std::max(all, touch(t, writes, view));
  });
  for (const auto& v : args) // `set_` and its kin
    if (v.isStorage() && pending_memory(v.toStorage().unsafeGetStorageImpl()))
      return Touch::Value;
  return all;
}

void Overlap::key_until_settled(const at::Tensor& view) {
  if (!view.defined() || !pending_memory(view.storage().unsafeGetStorageImpl()))
    return;
  std::lock_guard<std::mutex> l(m_);
  if (!it_)
    return;
  set_key(view.unsafeGetTensorImpl());
  keyed_.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(view.unsafeGetTensorImpl()));
}

std::shared_ptr<Overlap>& overlap_here() {
  static thread_local std::shared_ptr<Overlap> o;
  return o;
}

void announce(const std::shared_ptr<Overlap>& o) {
  auto& a = announced();
  std::lock_guard<std::mutex> l(announced_m);
  a.overlaps.push_back(o);
  a.n.store(a.overlaps.size(), std::memory_order_release);
}

void settle_overlaps(bool raise) {
  for (auto& o : announced_now())
    o->settle();
  if (overlap_here())
    stop_watching(raise);
}

void settle_overlaps_of(const at::Tensor& t, bool writes) {
  for (auto& o : announced_now())
    if (o->touches(t, writes))
      o->settle();
  if (overlap_here() && overlap_here()->settled())
    stop_watching(true);
}

void settle_arguments(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  for (auto& o : announced_now())
    if (o->touch(op, args) != Overlap::Touch::Nothing)
      o->settle();
}

bool overlapped(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* stack) {
  auto o = overlap_here();
  if (!o) { // a guard of the thread's keys (a node of autograd, inference_mode) brought ours back
    if (c10::impl::tls_is_dispatch_key_included(kKey))
      c10::impl::tls_set_dispatch_key_included(kKey, false);
    return false;
  }
  auto touch =
      o->finished() ? Overlap::Touch::Value : o->touch(op, torch::jit::last(*stack, op.schema().arguments().size()));
  if (touch == Overlap::Touch::Value) {
    o->settle();
    stop_watching(true);
  }
  if (touch != Overlap::Touch::View)
    return false;
  {
    c10::impl::ExcludeDispatchKeyGuard g(kKey);
    op.redispatchBoxed(ks & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  }
  for (const auto& r : torch::jit::last(*stack, op.schema().returns().size())) {
    if (r.isTensor())
      o->key_until_settled(r.toTensor());
    else if (r.isTensorList())
      for (const at::Tensor& t : r.toTensorList())
        o->key_until_settled(t);
  }
  return true;
}

void watch_again() {
  if (overlap_here() && !overlap_here()->settled())
    c10::impl::tls_set_dispatch_key_included(kKey, true);
}
} // namespace coexec
