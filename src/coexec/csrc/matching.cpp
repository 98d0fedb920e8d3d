// Where an op of the user's thread is, and whether it is the one that a node of the TraceGraph stands for.
#include <ATen/SequenceNumber.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/autograd/function.h>
#include <typeinfo>
#include "step.h"

namespace coexec {
uint64_t Step::op_location() {
  uint64_t h = location_hash(frame_);
  auto node = torch::autograd::get_current_node();
  in_backward_ = node.defined();
  if (in_backward_) {
    // All of a backward pass has one Python location: the op that made the node tells its ops apart.
    uint64_t seq = node->sequence_nr();
    uint64_t by = last_backward_uid_; // AccumulateGrad has no number of its own: it follows what fed it
    if (seq != UINT64_MAX) {
      uint64_t k = seq - sequence_base_;
      by = seq >= sequence_base_ && k < uid_of_sequence_.size() ? uid_of_sequence_[k] : 0x5bd1e995;
    }
    h = mix(h, by);
  }
  // Process-wide state that decides what an op does is part of where it is.
  if (auto d = c10::get_default_dtype_as_scalartype(); d != at::kFloat)
    h = mix(h, static_cast<uint64_t>(d) + 1);
  return h;
}

void Step::remember_sequence(uint64_t uid) {
  uint64_t now = at::sequence_number::peek();
  if (now > sequence_base_ && now - sequence_base_ > uid_of_sequence_.size())
    uid_of_sequence_.resize(now - sequence_base_, uid);
  if (in_backward_)
    last_backward_uid_ = uid;
}

bool Step::match_input(const Node& n, const at::Tensor& t, int16_t arg, int16_t element) {
  auto* impl = t.unsafeGetTensorImpl();
  StorageRecord* r = record_of(*impl);
  In in{r, kExternal, nullptr, &t, arg, element};
  if (r) {
    // C++ type first: a `.data =` copy is a plain TensorImpl over our storage.
    auto* p = typeid(*impl) == typeid(PlaceholderImpl) ? static_cast<PlaceholderImpl*>(impl) : nullptr;
    if (p && p->record == r && matches(*p->geometry, *impl)) {
      in.geometry = p->geometry;
      in.slot = p->slot;
    } else {
      in.geometry = intern_of(*impl);
      in.slot = r->slot_of(in.geometry);
      if (in.slot < 0)
        in.slot = r->views.front().slot; // as Recorder::input: any value names the memory
    }
  } else if (n.kind != Kind::Sync && n.kind != Kind::Fetch && is_special(*impl)) {
    return false;
  }
  size_t k = in_.size();
  in_.push_back(in);
  if (n.kind == Kind::Sync)
    return true; // runs on real tensors, whatever made them
  if (k >= n.producers.size())
    return false;
  for (int32_t s : n.producers[k])
    if (s == in.slot)
      return true;
  return false;
}

bool Step::match(const Node& n, c10::ArrayRef<c10::IValue> args) {
  in_.clear();
  for (size_t i = 0; i < args.size(); i++) {
    const auto& v = args[i];
    const Arg& a = n.args[i];
    switch (a.type) {
      case Arg::Tensor: {
        if (!v.isTensor() || !v.toTensor().defined())
          return false;
        const auto& t = v.toTensor();
        if (t.unsafeGetTensorImpl()->is_wrapped_number() || !match_input(n, t, static_cast<int16_t>(i), -1))
          return false;
        break;
      }
      case Arg::Undefined:
        if (!(v.isNone() || (v.isTensor() && !v.toTensor().defined())))
          return false;
        break;
      case Arg::Wrapped: {
        if (!v.isTensor() || !v.toTensor().defined())
          return false;
        auto* t = v.toTensor().unsafeGetTensorImpl();
        if (!t->is_wrapped_number() || t->dtype().toScalarType() != a.wrapped_dtype)
          return false;
        if (!a.fed && !same_value(a.value, wrapped_value(*t)))
          return false;
        break;
      }
      case Arg::List: {
        if (!v.isList())
          return false;
        auto l = v.toListRef();
        if (l.size() != a.present.size())
          return false;
        for (size_t k = 0; k < l.size(); k++) {
          bool defined = l[k].isTensor() && l[k].toTensor().defined();
          if (defined != a.present[k])
            return false;
          if (defined && !match_input(n, l[k].toTensor(), static_cast<int16_t>(i), static_cast<int16_t>(k)))
            return false;
        }
        break;
      }
      case Arg::Static:
        if (!same_value(a.value, v))
          return false;
        break;
      case Arg::Number:
        if (!a.fed && !same_value(a.value, v))
          return false;
        break;
      case Arg::Object:
        if (a.value.toBool() == v.isNone())
          return false;
        break;
    }
  }
  return true;
}

const Variant* Step::find_variant(Node& n, c10::ArrayRef<c10::IValue> args) {
  for (auto& v : n.variants) {
    bool same = true;
    for (size_t k = 0; same && k < in_.size(); k++)
      same = in_[k].geometry ? in_[k].geometry == v.inputs[k]
                             : matches_shape(*v.inputs[k], *in_[k].tensor->unsafeGetTensorImpl());
    size_t number = 0;
    for (size_t i = 0; same && i < n.args.size(); i++)
      if (n.args[i].type == Arg::Number) {
        if (n.args[i].fed)
          same = number < v.numbers.size() && same_shape_number(n.info->args[i], v.numbers[number], args[i]);
        number++;
      }
    if (same)
      return &v;
  }
  return nullptr;
}
} // namespace coexec
