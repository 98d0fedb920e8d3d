// Waiting for values, and leaving co-execution in the middle of an iteration with exactly eager's state.
#include "step.h"

namespace coexec {
void Step::wait(int64_t n, Wait why) {
  stats.waits[static_cast<int>(why)]++;
  stats.stall_s += it_->wait_done(n);
}

void Step::resolve_record(StorageRecord* r) {
  const auto& real = it_->memory(r->sid);
  if (real.unsafeGetStorageImpl())
    resolve(r, real);
  else
    fail(r, "coexec: this tensor was never computed, because an earlier operation of the step failed");
}

void Step::resolve_inputs() {
  for (auto& in : in_)
    if (in.record) {
      if (auto* r = record_of(*in.tensor->unsafeGetTensorImpl())) // another argument may have resolved it
        resolve_record(r);
      if (in.tensor->key_set().has(kKey))
        clear_stale_key(in.tensor->unsafeGetTensorImpl());
      in.record = nullptr;
    }
}

void Step::resolve_all() {
  for (auto* r : it_->live_records())
    resolve_record(r);
}

// Cancels the graph, makes every placeholder ordinary, and goes on as the tracing phase from the op at hand.
void Step::fall_back(const std::string& reason, const std::string& op, uint64_t location) {
  close_barrier();
  fallback = Fallback{reason, op, location, current_->id};
  it_->wait_done(it_->size(), false);
  it_->close();
  graph.join_iteration();
  if (auto at = it_->failed_at(); at >= 0 && static_cast<size_t>(at) < path.size()) {
    const Node& failed = program.at(path[at]);
    fallback = Fallback{"kernel error", failed.info->name, failed.location, failed.id};
    path.resize(at); // ops from the failed one on never happened
  }
  drop_keys();
  forget_pending_writes(it_.get());
  learn_native_fills();
  to_recorder();
  phase = Phase::Trace;
  has_trace = true;
  if (it_->failed())
    std::rethrow_exception(it_->error());
}

void Step::to_recorder() {
  std::vector<Node*> prefix;
  for (int32_t id : path)
    prefix.push_back(&program.at(id));
  recorder.begin_with_prefix(argument_storages(), prefix);
  for (auto* r : it_->live_records()) {
    auto views = r->views;
    c10::Storage storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(r->impl));
    bool computed = it_->memory(r->sid).unsafeGetStorageImpl() != nullptr;
    resolve_record(r);
    if (!computed)
      continue;
    for (auto& v : views) {
      int32_t node = program.node_of_slot(v.slot);
      if (log_index_[node] >= 0)
        recorder.register_value(
            storage, v.geometry, {static_cast<int32_t>(log_index_[node]), v.slot - program.at(node).slot_base});
    }
  }
}
} // namespace coexec
