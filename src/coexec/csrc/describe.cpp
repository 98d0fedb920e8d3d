// Telling Python what an iteration did, for the backends: ops with their values, and which memory outlived its segment.
#include "step.h"

namespace coexec {

int32_t Step::describe_external(const at::Tensor& t) {
  const auto* g = intern_of(*t.unsafeGetTensorImpl());
  auto* st = t.storage().unsafeGetStorageImpl();
  int32_t storage = -1;
  for (size_t i = 0; i < described_storages_.size(); i++)
    if (described_storages_[i].storage().unsafeGetStorageImpl() == st)
      storage = static_cast<int32_t>(i);
  if (storage < 0) {
    storage = static_cast<int32_t>(described_storages_.size());
    described_storages_.push_back(t);
  }
  for (size_t i = 0; i < external_descriptions.size(); i++)
    if (external_descriptions[i].storage == storage && external_descriptions[i].geometry == g)
      return static_cast<int32_t>(i);
  external_descriptions.push_back({storage, st->nbytes(), g});
  return static_cast<int32_t>(external_descriptions.size() - 1);
}

void Step::describe(Node& n, const Variant* v, Entry& e, c10::ArrayRef<c10::IValue> args) {
  OpDescription d;
  d.node = &n;
  d.variant = v ? v->shared_from_this() : nullptr;
  for (size_t i = 0; i < args.size(); i++) {
    auto type = n.args[i].type;
    if (type == Arg::Wrapped)
      d.args.push_back(wrapped_value(*args[i].toTensor().unsafeGetTensorImpl()));
    else
      d.args.push_back(type == Arg::Static || type == Arg::Number ? args[i] : c10::IValue());
  }
  bool executed = !e.args.empty();
  for (size_t k = 0; k < in_.size(); k++) {
    const In& in = in_[k];
    if (in.record) {
      bool latest = it_->sid_of(in.slot) == in.record->sid;
      d.inputs.push_back({in.slot, in.record->sid, latest, in.record->nbytes, -1, in.geometry});
      continue;
    }
    at::Tensor t = executed ? segment_argument(e, static_cast<int16_t>(k)) : *in.tensor;
    if (!t.defined() || is_special(*t.unsafeGetTensorImpl())) {
      d.inputs.push_back({kExternal, -1, true, 0, -1, nullptr});
      continue;
    }
    int32_t id = describe_external(executed ? t : tensor_over(t.storage(), *intern_of(*t.unsafeGetTensorImpl())));
    d.inputs.push_back({kExternal, -1, true, 0, id, external_descriptions[id].geometry});
  }
  for (size_t k = 0; v && k < n.outputs.size(); k++) {
    const auto& o = n.outputs[k];
    int32_t slot = n.slot_base + static_cast<int32_t>(k);
    if (!o.defined)
      slot = -1;
    else if (o.alias >= 0)
      slot = in_[o.alias].record ? in_[o.alias].record->slot_of(v->outputs[k]) : -1;
    d.out_slots.push_back(slot);
  }
  description.push_back(std::move(d));
}

// Not so where a loop begins its segment again.
static bool follows_in_segment(const Node& a, const Node& b) {
  return a.segment == b.segment && a.position + 1 == b.position;
}

// Which memory did Python hold beyond the segment that made it? Backends must return it.
void Step::learn_survivors() {
  int64_t n = static_cast<int64_t>(path.size());
  for (int64_t i = 0; i < n;) {
    int32_t segment = program.at(path[i]).segment;
    int64_t end = i + 1;
    while (end < n && segment >= 0 && follows_in_segment(program.at(path[end - 1]), program.at(path[end])))
      end++;
    if (segment >= 0 && segments && segments->by_id[segment]->nodes.size() == static_cast<size_t>(end - i)) {
      uint64_t shapes = 0;
      for (int64_t j = i; j < end; j++)
        shapes = mix(shapes, reinterpret_cast<uintptr_t>(it_->entry(j).variant));
      segments->by_id[segment]->note_pass(shapes);
    }
    int64_t gone = it_->entry(end - 1).awaited ? end - 1 : end; // what died later was held while the segment ended
    if (segment >= 0)
      for (int64_t j = i; j < end; j++) {
        const Node& node = program.at(path[j]);
        for (size_t k = 0; k < node.outputs.size(); k++) {
          auto output = static_cast<int32_t>(k);
          if (node.kind == Kind::Compute && node.outputs[k].defined && node.outputs[k].alias < 0 &&
              it_->death(it_->entry(j).first_sid + output) > gone)
            program.note_survivor(node.slot_base + output);
        }
      }
    i = end;
  }
}
} // namespace coexec
