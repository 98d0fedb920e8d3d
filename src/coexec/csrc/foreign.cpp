// Memory that code outside PyTorch can read and write: NumPy, DLPack, a user's pointer.
#include <ATen/ops/from_blob.h>
#include <c10/util/flat_hash_map.h>
#include "process_lock.h"
#include "recorder.h"

namespace coexec {
namespace {
// from_numpy, from_dlpack and frombuffer all wrap foreign memory with at::from_blob and a std::function deleter; its C
// deleter is one function, found here by making such a tensor.
c10::DeleterFnPtr from_blob_deleter() {
  static c10::DeleterFnPtr d = [] {
    static float x = 0;
    auto t = at::from_blob(&x, {1}, [](void*) {}, at::kFloat);
    return t.storage().data_ptr().get_deleter();
  }();
  return d;
}

// Storages with living arrays over them. The weak reference keeps an entry's address from being reused.
struct Exposed {
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int arrays;
  };
  std::atomic<size_t> n{0};
  ska::flat_hash_map<const c10::StorageImpl*, Entry> storages;
};
ProcessMutex exposed_m;
Exposed& exposed() {
  static auto* e = new Exposed();
  return *e;
}
} // namespace

bool is_foreign(const c10::StorageImpl* s) {
  auto& d = const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks();
  if (d.get_deleter() == from_blob_deleter())
    return true;
  auto& e = exposed();
  if (e.n.load(std::memory_order_relaxed) == 0)
    return false;
  std::lock_guard<ProcessMutex> l(exposed_m);
  return e.storages.count(s) != 0;
}

void mark_foreign(const c10::Storage& s) {
  auto& e = exposed();
  std::lock_guard<ProcessMutex> l(exposed_m);
  auto* p = s.unsafeGetStorageImpl();
  auto it = e.storages.find(p);
  if (it == e.storages.end())
    e.storages.emplace(p,
        Exposed::Entry{
            c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(p)), 1});
  else
    it->second.arrays++;
  e.n.store(e.storages.size());
}

void unmark_foreign(const c10::StorageImpl* p) {
  auto& e = exposed();
  std::lock_guard<ProcessMutex> l(exposed_m);
  auto it = e.storages.find(p);
  if (it != e.storages.end() && --it->second.arrays == 0)
    e.storages.erase(it);
  e.n.store(e.storages.size());
}
} // namespace coexec
