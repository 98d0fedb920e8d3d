// Placeholders: tensors that Python holds while the GraphRunner still computes their value.
//
// Whether a value is unresolved is a property of its *storage*: the DataPtr of an unresolved storage has no data, and
// its context is a StorageRecord. Resolving puts the real memory into that same StorageImpl, so every tensor over it
// (views, saved tensors, `.data` copies) becomes ordinary at once.
#pragma once
#include <atomic>
#include "geometry.h"
#include "process_lock.h"

namespace coexec {

// The key the interceptor sits on. Upstream reserves it (torch 2.13 has no kernel there): a later torch may take it.
constexpr auto kKey = c10::DispatchKey::Fake;

class Iteration;
struct PlaceholderImpl;

// Guards the life of every record and its list: a placeholder may die on one thread while another makes it ordinary.
using RecordsLock = ProcessLock<SpinLock>;
RecordsLock& records_lock();

// A value of the iteration: slot numbers are the Program's (node output) or -1.
struct RecordedView {
  const Geometry* geometry;
  int32_t slot;
  int64_t index; // in the log, of the op that made it: the op of a loop makes its slot again and again
};

// One unresolved storage. Lives as long as its StorageImpl keeps it as DataPtr context, or until resolved.
struct StorageRecord {
  std::shared_ptr<Iteration> iteration; // keeps the real memory reachable
  int32_t sid; // its memory, see Iteration
  size_t nbytes;
  c10::StorageImpl* impl = nullptr; // not owned: the StorageImpl owns us
  c10::weak_intrusive_ptr<c10::StorageImpl> alive{
      c10::intrusive_ptr<c10::StorageImpl>()}; // `impl`, for whoever has no reference of its own
  c10::SmallVector<RecordedView, 2> views; // first slot per geometry; written by the PythonRunner only
  int64_t last_write = -1; // log index of the latest op that wrote this memory
  PlaceholderImpl* impls = nullptr; // intrusive list of the placeholder impls over this storage

  int32_t slot_of(const Geometry* g) const {
    for (const auto& v : views)
      if (v.geometry == g)
        return v.slot;
    return -1;
  }
};

struct PlaceholderImpl final : c10::TensorImpl {
  const Geometry* geometry; // as handed out; a later in-place metadata change makes it stale (checked in debug)
  int32_t slot;
  StorageRecord* record = nullptr; // null once resolved
  PlaceholderImpl *next = nullptr, **link = nullptr; // in record->impls

  PlaceholderImpl(c10::Storage storage, c10::DispatchKeySet ks, const Geometry* g, int32_t slot);
  // A view inherits its base's key set as it is (an inference tensor's view stays one).
  PlaceholderImpl(ImplType view, c10::Storage storage, c10::DispatchKeySet ks, const Geometry* g, int32_t slot);
  ~PlaceholderImpl() override;
  void release_resources() override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& v, bool allow) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& v, bool allow) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;
  const char* tensorimpl_type_name() const override {
    return "coexec::PlaceholderImpl";
  }
  void drop_key() {
    key_set_ = key_set_.remove(c10::DispatchKey::Fake);
  }
  void attach(); // to the record of its storage, if it is unresolved
  void detach_from_record();

 private:
  template <class V>
  c10::intrusive_ptr<TensorImpl> copy(V&& v, bool allow) const;
};

// The record of an unresolved storage, or null. One load and a compare.
StorageRecord* record_of(const c10::StorageImpl* s);
inline StorageRecord* record_of(const c10::TensorImpl& t) {
  return t.has_storage() ? record_of(t.unsafe_storage().unsafeGetStorageImpl()) : nullptr;
}

// New unresolved memory, and a tensor over it.
// `native_may_fill`: memory of aten::empty, which native code above the dispatcher likes to fill through its pointer;
// the first such access resolves it and notes it in the iteration.
at::Tensor make_placeholder(
    std::shared_ptr<Iteration> it, int32_t sid, RecordedView value, size_t nbytes, bool native_may_fill);
// Another tensor over the same unresolved memory, as a view op returns it.
at::Tensor make_placeholder_view(const at::Tensor& base, int32_t slot, const Geometry* g);

// Puts the real memory in place; if the value will never exist (an op failed), every access to the data raises. The
// record is gone afterwards. Any thread that holds a reference to the storage, once the memory is final.
void make_ordinary(const c10::StorageImpl* s);
// What a thread outside the step may know of an unresolved storage.
struct Unresolved {
  std::shared_ptr<Iteration> iteration; // null: the storage is an ordinary one
  int32_t sid = -1, slot = -1; // memory, and the value that made it
  int64_t last_write = -1;
};
Unresolved unresolved(const c10::StorageImpl* s);
// Whether its value will never exist, because an op of its step failed. Also once it is an ordinary storage.
bool never_computed(const c10::StorageImpl* s);
// Clears a key left on an ordinary tensor (a `.data =` copy made before its storage was resolved).
void clear_stale_key(c10::TensorImpl* t);
// An ordinary tensor with a write still to come: other threads are stopped by the key until the write is done.
void set_key(c10::TensorImpl* t);

// Writes to memory from outside that the GraphRunner still has to do, for readers that are not inside the step.
void note_pending_write(const c10::StorageImpl* s, const std::shared_ptr<Iteration>& it, int64_t index);
void forget_pending_writes(const Iteration* it);
void await_pending_write(const c10::StorageImpl* s);

} // namespace coexec
