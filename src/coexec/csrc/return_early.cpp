// The end of a call under `overlap=True`: the step returns while its graph still runs, and takes note of the end later.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include "raised.h"
#include "step.h"

namespace coexec {
// Not where the end could be missed: what follows may run without the key (a node of autograd restores the thread's
// keys when it is over, a functorch transform too), or looks at the iteration at once.
bool Step::can_return_early() const {
  static const c10::DispatchKeySet transforms(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
          c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize});
  return overlap_allowed_ && it_->size() > 0 && it_->done() < it_->size() && !it_->failed() && !describing &&
      !graph.capture && !torch::autograd::get_current_node().defined() &&
      !c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms);
}

void Step::return_early() {
  for (const auto& [storage, index] : external_writes_)
    foreign_use_.writes.insert(storage);
  for (const auto& p : segments ? segments->by_id : std::vector<std::shared_ptr<PlannedSegment>>())
    for (const auto& s : p->versions)
      foreign_use_.draws |= s->random; // it puts the generator back if its run is discarded
  learn_survivors();
  overlap_ = std::make_shared<Overlap>(this, it_, std::move(foreign_use_), std::move(keyed_));
  keyed_.clear();
  announce(overlap_);
  overlap_here() = overlap_; // the key stays included
  active_step() = nullptr;
  phase = Phase::Off;
  stats.returned_early++;
  timeline.returned();
  it_->close();
}

bool Step::complete() {
  if (!overlap_)
    return true;
  overlap_->settle(); // a signal's exception leaves all as it is
  auto overlap = std::move(overlap_);
  waits.add(Wait::Overlap, 0, overlap->stall_s, overlap->waits);
  overlap->step = nullptr;
  if (overlap_here() == overlap) {
    overlap_here().reset();
    c10::impl::tls_set_dispatch_key_included(kKey, false);
  }
  std::exception_ptr error;
  if (it_->failed()) {
    error = it_->error();
    phase = Phase::Coexec;
    settle();
  }
  recorder.complete = !error;
  auto it = it_;
  put_away();
  if (error && overlap->see_error())
    throw_again(error);
  issue_warnings(*it, static_cast<int64_t>(path.size()));
  return !error;
}

void Step::name_late_error(pybind11::handle error) {
  undo_failed(); // now: the handler of the error must find eager's state
  fallback = failure_;
  pybind11::cast(this, pybind11::return_value_policy::reference).attr("name_error")(error, this);
}
} // namespace coexec
