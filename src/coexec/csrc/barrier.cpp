// What Python does outside the dispatcher: reads of memory, random draws, switches. The graph must not overtake it.
#include "step.h"

namespace coexec {
namespace {
// They look at the memory and keep no pointer to it: earlier ops may go on reading it meanwhile.
bool only_looks(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "read", "tolist", "__repr__", "__deepcopy__", "__reduce_ex__", "tensor_split", "ctc_loss", "max_pool1d"};
  return names.count(name) != 0;
}
} // namespace

// Ordinary memory that the graph has nothing left to write to.
bool Step::is_final(const at::Tensor& t) const {
  const auto& impl = *t.unsafeGetTensorImpl();
  if (!t.defined() || is_special(impl) || record_of(impl))
    return false;
  return external_writes_.count(impl.unsafe_storage().unsafeGetStorageImpl()) == 0;
}

void Step::barrier(const std::string& name, const std::optional<at::Tensor>& t, bool foreign) {
  const OpInfo* info = pseudo_op("coexec::" + name);
  uint64_t location = op_location();
  close_barrier();
  if (phase == Phase::Coexec) {
    Node* next = known_barrier(info, location);
    if (!next)
      next = known_barrier(info, location = op_place());
    if (next) {
      if (!(t && only_looks(name) && is_final(*t))) {
        wait(it_->size(), Wait::Sync, location);
        it_->prevent_run();
      }
      in_.clear();
      if (t && t->defined() && t->unsafeGetTensorImpl()->has_storage())
        if (auto* r = record_of(*t->unsafeGetTensorImpl())) {
          in_.push_back({r, 0, nullptr, &*t, 0, -1});
          resolve_inputs();
        }
      advance(*next);
      barrier_open_ = true; // until Python is back: it has yet to do what the barrier is for
    } else {
      fall_back("new path", info->name, location);
    }
  }
  if (phase == Phase::Trace) {
    location = op_place();
    OpIdentity id = identify(info, location);
    recorder.record_pseudo(info, Kind::Barrier, id, t ? &*t : nullptr);
    remember_sequence(id.uid);
  }
  if (t && t->defined() && t->unsafeGetTensorImpl()->has_storage()) {
    if (t->key_set().has(kKey))
      clear_stale_key(t->unsafeGetTensorImpl());
    if (foreign)
      mark_foreign(t->storage());
  }
}

Node* Step::known_barrier(const OpInfo* info, uint64_t location) {
  for (const Child& c : current_->children)
    if (Node& n = program.at(c.id); n.info == info && n.location == location && in_turn(n))
      return &n;
  return nullptr;
}

void Step::close_barrier() {
  if (barrier_open_) {
    barrier_open_ = false;
    it_->publish(false);
    it_->allow_run();
  }
}
} // namespace coexec
