// Output metadata for shapes that were never seen: the op's meta kernel, where it was seen to tell the truth.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include "step.h"

namespace coexec {
namespace {

struct OnlyMeta {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({kKey, c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
          c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
          c10::DispatchKey::Functionalize, c10::DispatchKey::AutocastCPU})};
};

at::Tensor on_meta(const Geometry& g) {
  auto t = at::empty_strided(g.sizes, g.strides, at::TensorOptions().dtype(g.dtype).device(at::kMeta));
  if (g.lazy_bits)
    set_lazy_bits(*t.unsafeGetTensorImpl(), g.lazy_bits);
  if (g.offset == 0)
    return t;
  // The offset decides nothing but the outputs' offset of views.
  t.unsafeGetTensorImpl()->set_storage_offset(g.offset);
  return t;
}

// Strides that CPU kernels choose by more than metadata rules: never guessed.
bool chooses_layout(const std::string& name) {
  if (name == "aten::linalg_vector_norm") // a reduction like others
    return false;
  return name.find("mkldnn") != std::string::npos || name.find("fft") != std::string::npos ||
      name.find("linalg") != std::string::npos || name.find("lstm") != std::string::npos;
}
// Matrix products lay out their result alike, however their operands lie.
bool ignores_layout(const std::string& name) {
  return name == "aten::mm" || name == "aten::addmm" || name == "aten::bmm" || name == "aten::baddbmm";
}
// Sizes aside, do they lie in memory alike? Kernels choose the strides of their outputs by that, and meta kernels do
// not always choose the same.
bool same_layout(const Geometry& a, const Geometry& b) {
  auto dims = a.sizes.size();
  if (a.dtype != b.dtype || dims != b.sizes.size())
    return false;
  auto contiguous = [](const Geometry& g) { // also where a dimension has one element, whose stride is free
    int64_t expected = 1;
    for (size_t d = g.sizes.size(); d-- > 0;) {
      if (g.strides[d] != expected)
        return false;
      expected *= std::max<int64_t>(g.sizes[d], 1);
    }
    return true;
  };
  if (contiguous(a) || contiguous(b))
    return contiguous(a) && contiguous(b);
  for (size_t d = 0; d < dims; d++) {
    if ((a.strides[d] == 0) != (b.strides[d] == 0) || (a.sizes[d] == 1) != (b.sizes[d] == 1))
      return false;
    for (size_t e = d + 1; e < dims; e++)
      if ((a.strides[d] < a.strides[e]) != (b.strides[d] < b.strides[e]))
        return false;
  }
  return true;
}

bool same_layouts(const Variant& a, const Variant& b) {
  for (size_t k = 0; k < a.inputs.size(); k++)
    if (!same_layout(*a.inputs[k], *b.inputs[k]))
      return false;
  return true;
}
} // namespace

// Runs the meta kernel on inputs of these geometries; fills `v->outputs` and `v->nbytes`. False if it cannot.
static bool run_meta(const Node& n, c10::ArrayRef<c10::IValue> args, Variant* v) {
  OnlyMeta guards;
  torch::jit::Stack stack;
  std::vector<at::Tensor> inputs;
  size_t k = 0;
  auto next = [&] {
    inputs.push_back(on_meta(*v->inputs[k++]));
    return inputs.back();
  };
  for (size_t i = 0; i < args.size(); i++) {
    const Arg& a = n.args[i];
    if (a.type == Arg::Tensor) {
      stack.emplace_back(next());
    } else if (a.type == Arg::List && n.info->args[i].cls == ArgClass::TensorList) {
      c10::List<at::Tensor> l;
      for (bool p : a.present)
        l.push_back(p ? next() : at::Tensor());
      stack.emplace_back(std::move(l));
    } else if (a.type == Arg::List) {
      c10::List<std::optional<at::Tensor>> l;
      for (bool p : a.present)
        l.push_back(p ? std::optional<at::Tensor>(next()) : std::nullopt);
      stack.emplace_back(std::move(l));
    } else if (args[i].isDevice()) {
      stack.emplace_back(at::Device(at::kMeta));
    } else {
      stack.push_back(args[i]);
    }
  }
  n.info->handle->callBoxed(&stack);
  std::vector<at::Tensor> outs;
  for (auto& r : stack) {
    if (r.isTensor())
      outs.push_back(r.toTensor());
    else if (r.isTensorList())
      for (const at::Tensor& t : r.toTensorList())
        outs.push_back(t);
    else
      return false;
  }
  if (outs.size() != n.outputs.size())
    return false;
  for (int16_t w : n.writes) // an `out=` argument that the op would resize is no longer what Python holds
    if (intern_of(*inputs[w].unsafeGetTensorImpl()) != v->inputs[w])
      return false;
  for (size_t o = 0; o < outs.size(); o++) {
    if (outs[o].defined() != n.outputs[o].defined)
      return false;
    if (!outs[o].defined()) {
      v->outputs.push_back(nullptr);
      v->nbytes.push_back(0);
      continue;
    }
    // Aliasing is a property of the op (a copy instead of a view would be another op): it must show here, too.
    const auto* st = outs[o].storage().unsafeGetStorageImpl();
    int16_t alias = n.outputs[o].alias;
    bool aliases = false;
    for (auto& in : inputs)
      aliases |= in.storage().unsafeGetStorageImpl() == st;
    if (aliases != (alias >= 0))
      return false;
    v->outputs.push_back(intern_of(*outs[o].unsafeGetTensorImpl()));
    v->nbytes.push_back(st->nbytes());
  }
  return true;
}

// Does the meta kernel say what really happened when `seen` was observed? Asked once.
static bool tells_the_truth(const Node& n, c10::ArrayRef<c10::IValue> args, Variant& seen) {
  if (seen.meta != Variant::Meta::Untried)
    return seen.meta == Variant::Meta::Agrees;
  Variant again;
  again.inputs = seen.inputs;
  std::vector<c10::IValue> old(args.begin(), args.end());
  size_t number = 0;
  for (size_t i = 0; i < n.args.size(); i++)
    if (n.args[i].type == Arg::Number)
      old[i] = seen.numbers[number++];
  bool agrees = run_meta(n, old, &again) && again.outputs == seen.outputs;
  seen.meta = agrees ? Variant::Meta::Agrees : Variant::Meta::Disagrees;
  return agrees;
}

bool Step::cannot_be_told(const Node& n) const {
  auto lies = [](const auto& v) { return v->meta == Variant::Meta::Disagrees; };
  return n.no_meta || !n.info->handle || chooses_layout(n.info->name) ||
      std::any_of(n.variants.begin(), n.variants.end(), lies);
}

const Variant* Step::infer_variant(Node& n, c10::ArrayRef<c10::IValue> args) {
  if (n.no_meta || n.variants.empty() || !n.info->handle || chooses_layout(n.info->name))
    return nullptr;
  try {
    auto made = std::make_shared<Variant>();
    Variant& v = *made;
    for (auto& in : in_)
      v.inputs.push_back(in.geometry ? in.geometry : intern_of(*in.tensor->unsafeGetTensorImpl()));
    for (size_t i = 0; i < n.args.size(); i++)
      if (n.args[i].type == Arg::Number)
        v.numbers.push_back(args[i]);
    // Was it guessed wrong before?
    if (std::any_of(n.variants.begin(), n.variants.end(), [](const auto& s) { return s->wrong.load(); })) {
      n.no_meta = true;
      return nullptr;
    }
    // Something was observed with inputs that lay like these, and the meta kernel would have said the same.
    bool free = ignores_layout(n.info->name);
    auto seen = std::find_if(n.variants.begin(), n.variants.end(),
        [&](const auto& s) { return s->observed && (free || same_layouts(*s, v)); });
    if (seen == n.variants.end() || !tells_the_truth(n, args, **seen) || !run_meta(n, args, &v))
      return nullptr;
    stats.inferred_shapes++;
    return add_variant(n, std::move(made));
  } catch (const std::exception&) { // no meta kernel, or one that needs data; eager will say what is wrong, if anything
    n.no_meta = true;
    return nullptr;
  }
}
} // namespace coexec
