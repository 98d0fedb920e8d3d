// Where an op of the user's thread is, and whether it is the one that a node of the TraceGraph stands for.
#include <ATen/SequenceNumber.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarType.h>
#include <c10/util/TypeCast.h>
#include <torch/csrc/autograd/function.h>
#include <typeinfo>
#include "step.h"

namespace coexec {
uint64_t Step::op_location() {
  frames_ = location_hash(frame_);
  auto node = torch::autograd::get_current_node();
  in_backward_ = node.defined();
  if (in_backward_) {
    // All of a backward pass has one Python location: the op that made the node tells its ops apart.
    uint64_t seq = node->sequence_nr();
    backward_of_ = last_backward_uid_; // AccumulateGrad has no number of its own: it follows what fed it
    if (seq != UINT64_MAX) {
      uint64_t k = seq - sequence_base_;
      backward_of_ = seq >= sequence_base_ && k < uid_of_sequence_.size() ? uid_of_sequence_[k] : 0x5bd1e995;
    }
  }
  return in_this_state(frames_);
}

// The place whose code is that of the op at hand by value: where the op's own location is not known.
uint64_t Step::op_place() {
  return in_this_state(places_.first_like(frames_, frame_));
}

uint64_t Step::in_this_state(uint64_t h) const {
  if (in_backward_)
    h = mix(h, backward_of_);
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

namespace {
template <class T>
bool fits_real(const c10::Scalar& x) {
  return x.isComplex()      ? !c10::overflows<T, c10::complex<double>>(x.toComplexDouble())
      : x.isFloatingPoint() ? !c10::overflows<T, double>(x.toDouble())
                            : !c10::overflows<T, int64_t>(x.toLong());
}

// Whether a kernel for `dtype` can hold the number: too large a one raises.
bool fits(const c10::IValue& number, at::ScalarType dtype) {
  if (number.isList()) {
    auto l = number.toListRef();
    return std::all_of(l.begin(), l.end(), [&](const c10::IValue& x) { return fits(x, dtype); });
  }
  if (!number.isScalar())
    return true;
  switch (dtype) {
#define COEXEC_FITS(T, name) \
  case at::ScalarType::name: \
    return fits_real<T>(number.toScalar());
    AT_FORALL_SCALAR_TYPES_AND3(Bool, Half, BFloat16, COEXEC_FITS)
    COEXEC_FITS(c10::complex<float>, ComplexFloat)
    COEXEC_FITS(c10::complex<double>, ComplexDouble)
#undef COEXEC_FITS
    default:
      return false;
  }
}

std::optional<at::ScalarType> first_dtype(c10::ArrayRef<c10::IValue> args) {
  for (const auto& v : args) {
    if (v.isTensor() && v.toTensor().defined())
      return v.toTensor().scalar_type();
    if (v.isTensorList() && !v.toListRef().empty())
      return v.toListRef()[0].toTensor().scalar_type();
  }
  return std::nullopt;
}
} // namespace

// Whether the kernel is known to take a number that was not seen here before. One that it refuses has to raise at once,
// on its own line, where a handler covers the op: then Python waits at the op from now on, unless the number can only
// be too large.
bool Step::takes(const Node& n, size_t arg, const c10::IValue& number, c10::ArrayRef<c10::IValue> args) {
  const OpInfo& info = *n.info;
  if (n.kind != Kind::Compute) // it runs at once
    return true;
  if (arg == static_cast<size_t>(info.probability)) {
    double p = number.toScalar().toDouble();
    return p >= 0 && p <= 1;
  }
  if (!n.guarded || same_value(n.args[arg].value, number))
    return true;
  if (!info.takes_any_number) {
    recorder.untold.insert(mix(n.location, info.name_hash));
    return false;
  }
  auto dtype = first_dtype(args);
  return n.args[arg].type == Arg::Wrapped || !dtype || fits(number, *dtype);
}

// Nodes of one location and op are passes of a loop that is not folded; the one that this iteration has come to.
bool Step::in_turn(const Node& n) const {
  return n.folded || n.uid == mix(mix(n.location, n.info->name_hash), met_[n.pair]);
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
        if (a.fed ? !takes(n, i, wrapped_value(*t), args) : !same_value(a.value, wrapped_value(*t)))
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
        if (a.fed ? !takes(n, i, v, args) : !same_value(a.value, v))
          return false;
        break;
      case Arg::Object:
        if (a.value.toBool() == v.isNone())
          return false;
        break;
    }
  }
  return n.passes_on < 0 || in_[n.passes_on].record; // else the result is memory from outside: another node
}

const Variant* Step::find_variant(Node& n, c10::ArrayRef<c10::IValue> args) {
  for (size_t at = 0; at < n.variants.size(); at++) {
    const Variant& v = *n.variants[at];
    bool same = !v.wrong.load(std::memory_order_relaxed);
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
    if (same) {
      std::rotate(n.variants.begin(), n.variants.begin() + at, n.variants.begin() + at + 1);
      return &v;
    }
  }
  return nullptr;
}

// The newest shapes are the likeliest.
const Variant* Step::add_variant(Node& n, std::shared_ptr<Variant> v) {
  n.variants.insert(n.variants.begin(), std::move(v));
  if (n.variants.size() > Node::kManyVariants)
    crowded_.push_back(&n);
  return n.variants.front().get();
}

// Between iterations: no log refers to one. Those of a compiled segment stay, and so does what was observed most
// recently, which inferring needs.
void Step::forget_old_variants() {
  for (Node* n : crowded_) {
    size_t kept = 0, observed = 0;
    auto old = [&](const std::shared_ptr<Variant>& v) {
      bool keep = v.use_count() > 1 || kept < Node::kManyVariants / 2 || (v->observed && observed < 8);
      kept++;
      observed += v->observed;
      return !keep;
    };
    // In order: std::remove_if visits each element once, from the front.
    n->variants.erase(std::remove_if(n->variants.begin(), n->variants.end(), old), n->variants.end());
  }
  crowded_.clear();
}
} // namespace coexec
