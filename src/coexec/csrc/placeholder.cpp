#include "placeholder.h"
#include <c10/core/CPUAllocator.h>
#include <c10/util/flat_hash_map.h>
#include "iteration.h"
#include "process_lock.h"

namespace coexec {
namespace {
RecordsLock records_m;
} // namespace

RecordsLock& records_lock() {
  return records_m;
}

namespace {

void storage_died(void* ctx) {
  auto* r = static_cast<StorageRecord*>(ctx);
  std::shared_ptr<Iteration> it; // may be the last reference: goes after the record
  {
    std::lock_guard<RecordsLock> l(records_lock());
    it = std::move(r->iteration);
    it->storage_died(r);
    for (auto* p = r->impls; p; p = p->next)
      p->record = nullptr;
  }
  delete r;
}

void release_memory(void* ctx) {
  delete static_cast<c10::Storage*>(ctx);
}

// key_set_ is protected and ordinary tensors are not ours: a pointer to member taken through a derived class is the
// legal way to it.
struct KeySetAccess : c10::TensorImpl {
  static c10::DispatchKeySet c10::TensorImpl::* member() {
    return &KeySetAccess::key_set_;
  }
};
} // namespace

PlaceholderImpl::PlaceholderImpl(c10::Storage storage, c10::DispatchKeySet ks, const Geometry* g, int32_t s)
    : TensorImpl(std::move(storage), ks, c10::scalarTypeToTypeMeta(g->dtype)), geometry(g), slot(s) {
  set_sizes_and_strides(g->sizes, g->strides, g->offset);
  set_lazy_bits(*this, g->lazy_bits); // a view may undo what its base's key set says
}

PlaceholderImpl::PlaceholderImpl(
    ImplType view, c10::Storage storage, c10::DispatchKeySet ks, const Geometry* g, int32_t s)
    : TensorImpl(view, std::move(storage), ks, c10::scalarTypeToTypeMeta(g->dtype)), geometry(g), slot(s) {
  set_sizes_and_strides(g->sizes, g->strides, g->offset);
  set_lazy_bits(*this, g->lazy_bits); // a view may undo what its base's key set says
}

PlaceholderImpl::~PlaceholderImpl() {
  detach_from_record();
}

void PlaceholderImpl::release_resources() {
  detach_from_record();
  TensorImpl::release_resources();
}

void PlaceholderImpl::attach() {
  std::lock_guard<RecordsLock> l(records_lock());
  StorageRecord* r = record_of(storage_.unsafeGetStorageImpl());
  if (!r) { // resolved meanwhile
    drop_key();
    return;
  }
  record = r;
  next = r->impls;
  link = &r->impls;
  if (next)
    next->link = &next;
  r->impls = this;
}

void PlaceholderImpl::detach_from_record() {
  if (!record)
    return;
  std::lock_guard<RecordsLock> l(records_lock());
  if (!record) // made ordinary meanwhile
    return;
  *link = next;
  if (next)
    next->link = link;
  record = nullptr;
}

template <class V>
c10::intrusive_ptr<c10::TensorImpl> PlaceholderImpl::copy(V&& v, bool allow) const {
  auto r = c10::make_intrusive<PlaceholderImpl>(ImplType::VIEW, c10::Storage(storage_), key_set_, geometry, slot);
  copy_tensor_metadata(this, r.get(), std::forward<V>(v), allow);
  r->attach();
  return r;
}

c10::intrusive_ptr<c10::TensorImpl> PlaceholderImpl::shallow_copy_and_detach(
    const c10::VariableVersion& v, bool allow) const {
  return copy(v, allow);
}
c10::intrusive_ptr<c10::TensorImpl> PlaceholderImpl::shallow_copy_and_detach(
    c10::VariableVersion&& v, bool allow) const {
  return copy(std::move(v), allow);
}

void PlaceholderImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) {
  detach_from_record();
  TensorImpl::shallow_copy_from(impl);
  if (auto* p = dynamic_cast<PlaceholderImpl*>(impl.get())) {
    geometry = p->geometry;
    slot = p->slot;
  }
  if (record_of(storage_.unsafeGetStorageImpl()))
    attach();
}

StorageRecord* record_of(const c10::StorageImpl* s) {
  auto& d = const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks();
  return d.get_deleter() == &storage_died ? static_cast<StorageRecord*>(d.get_context()) : nullptr;
}

namespace {
// Native code asks an unresolved storage for a pointer to write through: it is resolved on the spot. Typed accessors
// ask first whether there is data: a null pointer makes them raise PyTorch's "data is not allocated yet", which
// StepRunner explains. Memory of aten::empty says yes, because native code above the dispatcher fills it
// (`native_may_fill`); the address is never mapped, so a *read* of memory that nothing has filled faults instead of
// giving a wrong number. StorageImpl's own throwing flag is of no use: Tensor::is_alias_of reads the DataPtr of both
// storages.
void* const kNotMapped = reinterpret_cast<void*>(64);

void native_access(c10::StorageImpl* s) {
  auto u = unresolved(s);
  if (!u.iteration)
    return;
  bool returned = u.iteration->closed(); // `overlap=True`: nothing can be learned for the next iteration
  u.iteration->wait_done(returned ? u.iteration->size() : u.last_write + 1, false);
  if (!returned)
    u.iteration->note_native_fill(u.slot);
  make_ordinary(s);
}
} // namespace

at::Tensor make_placeholder(
    std::shared_ptr<Iteration> it, int32_t sid, RecordedView value, size_t nbytes, bool native_may_fill) {
  auto* r = new StorageRecord{std::move(it), sid, nbytes};
  r->views.push_back(value);
  auto st = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes,
      c10::DataPtr(native_may_fill ? kNotMapped : nullptr, r, &storage_died, c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(), /*resizable=*/true);
  r->impl = st.get();
  r->alive = c10::weak_intrusive_ptr<c10::StorageImpl>(st);
  st->set_materializer(&native_access);
  auto p = c10::make_intrusive<PlaceholderImpl>(
      c10::Storage(std::move(st)), c10::DispatchKeySet({c10::DispatchKey::CPU, kKey}), value.geometry, value.slot);
  p->record = r; // not shared yet: no lock
  p->link = &r->impls;
  r->impls = p.get();
  return at::Tensor(std::move(p));
}

at::Tensor make_placeholder_view(const at::Tensor& base, int32_t slot, const Geometry* g) {
  auto* b = base.unsafeGetTensorImpl();
  auto p = c10::make_intrusive<PlaceholderImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), b->key_set().add(kKey), g, slot);
  p->attach();
  return at::Tensor(std::move(p));
}

namespace {
void drop_placeholder_keys(StorageRecord* r) {
  for (auto* p = r->impls; p; p = p->next) {
    p->drop_key();
    p->record = nullptr;
  }
  r->impls = nullptr;
}

// Replaces the DataPtr without running its deleter's "storage died" bookkeeping.
void replace_data(StorageRecord* r, c10::DataPtr&& d, size_t nbytes) {
  auto* st = r->impl;
  st->_mutable_data_ptr_no_checks().release_context();
  st->_mutable_data_ptr_no_checks() = std::move(d);
  st->set_nbytes(nbytes);
}

// The deleter of the DataPtr tells these storages from others: their record is gone.
void nothing_to_delete(void*) {}
char nothing;

// The value will never exist: its op, or an earlier one, failed.
void mark_failed(StorageRecord* r) {
  replace_data(r, c10::DataPtr(nullptr, &nothing, &nothing_to_delete, c10::Device(c10::kCPU)), r->nbytes);
  r->impl->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "coexec: this tensor was never computed, because an earlier operation of the step failed");
}

void put_memory(StorageRecord* r, const c10::Storage& real) {
  auto& d = const_cast<c10::StorageImpl*>(real.unsafeGetStorageImpl())->_mutable_data_ptr_no_checks();
  replace_data(
      r, c10::DataPtr(d.get(), new c10::Storage(real), &release_memory, c10::Device(c10::kCPU)), real.nbytes());
}
} // namespace

void make_ordinary(const c10::StorageImpl* s) {
  std::shared_ptr<Iteration> it; // may be the last reference: goes without the lock
  std::lock_guard<RecordsLock> l(records_lock());
  auto* r = record_of(s);
  if (!r)
    return;
  it = r->iteration;
  const auto& real = it->memory(r->sid);
  r->impl->clear_materializer();
  if (real.unsafeGetStorageImpl())
    put_memory(r, real);
  else
    mark_failed(r);
  // After the data: a thread outside the step that finds no key goes straight to it.
  std::atomic_thread_fence(std::memory_order_release);
  drop_placeholder_keys(r);
  it->record_resolved(r);
  delete r;
}

bool never_computed(const c10::StorageImpl* s) {
  std::lock_guard<RecordsLock> l(records_lock());
  if (const auto* r = record_of(s))
    return r->iteration->failed() && !r->iteration->memory(r->sid).unsafeGetStorageImpl();
  return const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks().get_deleter() == &nothing_to_delete;
}

Unresolved unresolved(const c10::StorageImpl* s) {
  std::lock_guard<RecordsLock> l(records_lock());
  auto* r = record_of(s);
  return r ? Unresolved{r->iteration, r->sid, r->views.front().slot, r->last_write} : Unresolved{};
}

void clear_stale_key(c10::TensorImpl* t) {
  auto ks = KeySetAccess::member();
  t->*ks = (t->*ks).remove(kKey);
}

void set_key(c10::TensorImpl* t) {
  auto ks = KeySetAccess::member();
  t->*ks = (t->*ks).add(kKey);
}

namespace {
struct PendingWrites {
  ska::flat_hash_map<const c10::StorageImpl*, std::pair<std::shared_ptr<Iteration>, int64_t>> by_storage;
};
ProcessMutex pending_writes_m;
PendingWrites& pending_writes() {
  static auto* p = new PendingWrites();
  return *p;
}
} // namespace

void note_pending_write(const c10::StorageImpl* s, const std::shared_ptr<Iteration>& it, int64_t index) {
  auto& p = pending_writes();
  std::pair<std::shared_ptr<Iteration>, int64_t> write{it, index}; // leaves with the former one, without the lock
  std::lock_guard<ProcessMutex> l(pending_writes_m);
  p.by_storage[s].swap(write);
}

void forget_pending_writes(const Iteration* it) {
  auto& p = pending_writes();
  std::shared_ptr<Iteration> kept; // the last reference goes without the lock
  std::lock_guard<ProcessMutex> l(pending_writes_m);
  for (auto i = p.by_storage.begin(); i != p.by_storage.end();)
    if (i->second.first.get() == it) {
      kept = std::move(i->second.first);
      i = p.by_storage.erase(i);
    } else
      ++i;
}

void await_pending_write(const c10::StorageImpl* s) {
  auto& p = pending_writes();
  std::pair<std::shared_ptr<Iteration>, int64_t> w;
  {
    std::lock_guard<ProcessMutex> l(pending_writes_m);
    auto i = p.by_storage.find(s);
    if (i == p.by_storage.end())
      return;
    w = i->second;
  }
  w.first->wait_done(w.second + 1, false);
}
} // namespace coexec
