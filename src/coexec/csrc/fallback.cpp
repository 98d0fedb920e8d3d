// Waiting for values, and leaving co-execution in the middle of an iteration with exactly eager's state.
#include <cstring>
#include "raised.h"
#include "step.h"

namespace coexec {
void Step::note_wait(Wait why, uint64_t location, double seconds) {
  waits.add(why, location, seconds);
  if (seconds == 0)
    return;
  auto now = Clock::now();
  auto start = now - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  CallSpans::add(it_->spans->python, {Span::Kind::Wait, static_cast<uint8_t>(why), -1, location, 1, start, now});
}

void Step::wait(int64_t n, Wait why, uint64_t location, double waited_s) {
  note_wait(why, location, waited_s + it_->wait_done(n));
  issue_warnings(*it_, n);
}

void Step::resolve_inputs() {
  for (auto& in : in_)
    if (in.record) {
      make_ordinary(in.tensor->storage().unsafeGetStorageImpl()); // another argument may have done it
      if (in.tensor->key_set().has(kKey))
        clear_stale_key(in.tensor->unsafeGetTensorImpl());
      in.record = nullptr;
    }
}

void Step::resolve_all() {
  for (const auto& s : it_->live_storages())
    make_ordinary(s.unsafeGetStorageImpl());
}

// Cancels the graph, makes every placeholder ordinary, and goes on as the tracing phase from the op at hand.
void Step::fall_back(const std::string& reason, const std::string& op, uint64_t location) {
  close_barrier();
  co_executed_in_a_row_ = 0;
  fallback = Fallback{reason, op, location, current_->id};
  note_wait(Wait::Fallback, location, it_->wait_done(it_->size(), false, Signals::Never));
  it_->close();
  graph.join_iteration();
  undo_failed();
  if (failure_)
    fallback = failure_;
  drop_keys();
  forget_pending_writes(it_.get());
  learn_native_fills();
  to_recorder();
  phase = Phase::Trace;
  has_trace = true;
  issue_warnings(*it_, static_cast<int64_t>(path.size()));
  if (it_->failed())
    throw_again(it_->error());
}

// Ops from the failed one on never happened. Once: the user may have repaired things since an error that came late.
void Step::undo_failed() {
  auto error = failure_ ? std::nullopt : kernel_error();
  if (!error)
    return;
  failure_ = error;
  path.resize(it_->failed_at());
  undo_host_writes(it_->failed_at());
  forget_failed_gradients();
}

std::optional<Fallback> Step::kernel_error() {
  auto at = it_->failed_at();
  if (at < 0 || static_cast<size_t>(at) >= path.size())
    return std::nullopt;
  const Node& failed = program.at(path[at]);
  return Fallback{"kernel error", failed.info->name, failed.location, failed.id};
}

void Step::note_host_write(const In& in) {
  auto* s = in.tensor->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  host_writes_.push_back({it_->size(), c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(s),
      std::string(static_cast<const char*>(s->data()), s->nbytes())});
}

void Step::undo_host_writes(int64_t from) {
  for (auto w = host_writes_.rbegin(); w != host_writes_.rend() && w->index >= from; ++w)
    if (w->storage->nbytes() == w->bytes.size())
      std::memcpy(w->storage->mutable_data(), w->bytes.data(), w->bytes.size());
  host_writes_.clear();
}

void Step::to_recorder() {
  std::vector<Node*> prefix;
  for (int32_t id : path)
    prefix.push_back(&program.at(id));
  recorder.begin_with_prefix(argument_storages(), prefix);
  for (const auto& storage : it_->live_storages()) {
    auto* r = record_of(storage.unsafeGetStorageImpl());
    auto views = r->views;
    bool computed = it_->memory(r->sid).unsafeGetStorageImpl() != nullptr;
    make_ordinary(storage.unsafeGetStorageImpl());
    if (!computed)
      continue;
    for (auto& v : views) {
      if (static_cast<size_t>(v.index) >= path.size()) // after an op that failed
        continue;
      const Node& maker = program.at(program.node_of_slot(v.slot));
      recorder.register_value(storage, v.geometry, {static_cast<int32_t>(v.index), v.slot - maker.slot_base});
    }
  }
}
} // namespace coexec
