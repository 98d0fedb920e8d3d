#include "op_info.h"
#include <unordered_map>
#include <unordered_set>
#include "location.h"
#include "process_lock.h"

namespace coexec {
namespace {

bool is_tensor(const c10::TypePtr& t) {
  return t->isSubtypeOf(*c10::TensorType::get());
}

ArgClass classify(const c10::Argument& a) {
  c10::TypePtr t = a.type(), real = a.real_type();
  if (auto o = t->cast<c10::OptionalType>())
    t = o->getElementType();
  if (auto o = real->cast<c10::OptionalType>())
    real = o->getElementType();
  switch (real->kind()) {
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
    case c10::TypeKind::DeviceObjType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::QSchemeType:
      return ArgClass::Static;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
    case c10::TypeKind::ComplexType:
    case c10::TypeKind::NumberType:
      return ArgClass::Number;
    default:
      break;
  }
  if (is_tensor(t))
    return ArgClass::Tensor;
  if (auto l = t->cast<c10::ListType>()) {
    auto e = l->getElementType();
    if (is_tensor(e))
      return ArgClass::TensorList;
    if (auto o = e->cast<c10::OptionalType>())
      return is_tensor(o->getElementType()) ? ArgClass::OptTensorList : ArgClass::Object;
    switch (e->kind()) {
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
      case c10::TypeKind::FloatType:
      case c10::TypeKind::ComplexType:
      case c10::TypeKind::NumberType:
        return ArgClass::Number;
      case c10::TypeKind::BoolType:
      case c10::TypeKind::StringType:
        return ArgClass::Static;
      default:
        return ArgClass::Object;
    }
  }
  return ArgClass::Object;
}

// Kernels that check values, not only shapes: an error can come although the very same shapes ran before.
bool checks_values(const std::string& base) {
  static const std::unordered_set<std::string> names = {"embedding", "embedding_dense_backward", "embedding_renorm",
      "embedding_renorm_", "_embedding_bag", "_embedding_bag_forward_only", "index", "index_put_", "index_put",
      "_index_put_impl_", "_unsafe_index", "index_select", "index_add", "index_add_", "index_copy", "index_copy_",
      "index_fill", "index_fill_", "index_reduce", "index_reduce_", "gather", "scatter", "scatter_", "scatter_add",
      "scatter_add_", "scatter_reduce", "scatter_reduce_", "masked_scatter", "masked_scatter_", "take", "put", "put_",
      "nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward", "binary_cross_entropy",
      "one_hot", "multinomial", "bincount", "multi_margin_loss", "multilabel_margin_loss_forward", "_ctc_loss",
      "max_unpool2d", "max_unpool3d", "histc", "cholesky", "cholesky_inverse", "cholesky_solve", "bernoulli",
      "bernoulli_", "normal", "normal_", "binomial", "poisson", "_assert_async", "_assert_scalar", "repeat_interleave",
      "segment_reduce", "_segment_reduce_backward", "grid_sampler_2d", "bucketize", "searchsorted", "geqrf", "ormqr",
      "_standard_gamma", "_sample_dirichlet"};
  return names.count(base) || base.rfind("linalg_", 0) == 0 || base.rfind("_linalg_", 0) == 0;
}

// Divisions that have an integer result where both operands are integers.
bool divides(const std::string& name, std::string base) {
  if (!base.empty() && base.back() == '_')
    base.pop_back();
  return base == "floor_divide" || base == "remainder" || base == "fmod" ||
      (base == "div" && name.find("_mode") != std::string::npos);
}

// Arithmetic that nothing but a number too large makes fail. (Not what a zero, a negative power or a rounding mode
// does.)
bool takes_any_number(const std::string& name, std::string base) {
  static const std::unordered_set<std::string> names = {"add", "sub", "rsub", "mul", "div", "true_divide", "addcmul",
      "addcdiv", "lerp", "addmm", "addmv", "addr", "addbmm", "baddbmm", "clamp", "clamp_min", "clamp_max", "maximum",
      "minimum", "eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "fill", "threshold", "leaky_relu", "elu",
      "native_layer_norm", "native_group_norm", "native_batch_norm", "atan2", "copysign"};
  bool rounds = name.find("_mode") != std::string::npos;
  if (base.rfind("_foreach_", 0) == 0)
    base = base.substr(9);
  else if (base.rfind("_fused_", 0) == 0) // optimizers
    return true;
  if (!base.empty() && base.back() == '_')
    base.pop_back();
  return names.count(base) && !rounds;
}

std::unique_ptr<OpInfo> make(const c10::OperatorHandle& op) {
  auto i = std::make_unique<OpInfo>();
  const auto& s = op.schema();
  i->schema = &s;
  i->handle = op;
  i->name = s.overload_name().empty() ? s.name() : s.name() + "." + s.overload_name();
  i->name_hash = std::hash<std::string>()(i->name);
  i->n_returns = s.returns().size();
  const auto ns = s.name().substr(0, s.name().find("::")), base = s.name().substr(s.name().find("::") + 2);
  bool writes = false, object_list = false;
  for (const auto& a : s.arguments()) {
    bool w = a.alias_info() && a.alias_info()->isWrite();
    writes |= w;
    i->args.push_back({classify(a), w, false});
  }
  for (size_t k = 0; k < i->args.size(); k++) {
    auto t = s.arguments()[k].type();
    if (auto o = t->cast<c10::OptionalType>())
      t = o->getElementType();
    if (auto l = t->cast<c10::ListType>())
      t = l->getElementType();
    bool integer = t->kind() == c10::TypeKind::IntType || t->kind() == c10::TypeKind::SymIntType;
    // Only these take Scalars for their size.
    bool sized_by_scalar = base == "arange" || base == "range";
    i->args[k].shapes = i->args[k].cls == ArgClass::Number && (integer || sized_by_scalar);
  }
  bool tensor_returns = true, aliased = !s.returns().empty();
  for (const auto& r : s.returns()) {
    auto l = r.type()->cast<c10::ListType>();
    tensor_returns &= is_tensor(r.type()) || (l && is_tensor(l->getElementType()));
    aliased &= r.alias_info() != nullptr || (l && r.alias_info());
  }
  i->pass_through = ns == "profiler";
  i->in_python = ns == "torch_nn"; // linear_cross_entropy
  // An op with a CPU kernel of its own (mish_backward) runs it in eager: its decomposition rounds differently.
  i->decompose = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  i->is_fetch = s.name() == "aten::_local_scalar_dense";
  i->is_view = aliased && !writes;
  i->bumps_version = writes && base.rfind("_foreach_", 0) == 0;
  if (i->name == "aten::native_batch_norm") { // running statistics
    i->undeclared_writes = {3, 4};
    i->undeclared_if = 5;
  }
  i->random = op.hasTag(at::Tag::nondeterministic_seeded);
  i->probability = i->name == "aten::bernoulli_.float" || i->name == "aten::bernoulli.p" ? 1 : -1;
  i->may_raise = i->probability < 0 && checks_values(base);
  i->divides = divides(i->name, base);
  i->takes_any_number = takes_any_number(i->name, base);
  i->list_op = i->name == "aten::unbind.int" ? ListOp::Unbind
      : i->name == "aten::stack"             ? ListOp::Stack
      : i->name == "aten::cat"               ? ListOp::Cat
                                             : ListOp::None;
  static const std::unordered_set<std::string> allocating = {
      "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"};
  i->allocates = allocating.count(base) != 0;
  static const std::unordered_set<std::string> products = {"mm", "addmm", "bmm", "baddbmm"};
  i->heavy = products.count(base) || base.find("convolution") != std::string::npos ||
      base.find("attention") != std::string::npos || base.find("lstm") != std::string::npos;
  // Output sizes that depend on values although no tag says so; the last one copies its argument's offset and the
  // size of the memory behind it, which are no part of a variant.
  static const std::unordered_set<std::string> sized_by_values = {"_pack_padded_sequence", "_pad_packed_sequence",
      "_ctc_loss", "segment_reduce", "_embedding_bag", "_embedding_bag_forward_only", "to_padded_tensor",
      "_new_zeros_with_same_feature_meta"};
  static const std::unordered_set<std::string> resizing = {"set_", "resize_", "resize_as_", "_resize_output_",
      "set_data", "record_stream", "resize_as_sparse_", "_to_sparse", "sparse_resize_", "_pin_memory", "pin_memory",
      "swap_"};
  // `out=` variants lack the tag of their ops.
  static const std::unordered_set<std::string> tagged = {"_unique", "_unique2", "unique_dim", "unique_consecutive",
      "unique_dim_consecutive", "bincount", "index", "repeat_interleave"};
  bool untagged_out = tagged.count(base) && writes;
  i->sized_by_masks = i->name == "aten::index.Tensor"; // tagged as dynamic for their sake alone
  bool sized_by_data = !i->sized_by_masks && op.hasTag(at::Tag::dynamic_output_shape);
  i->always_sync = !i->is_fetch && !i->in_python &&
      (ns != "aten" || !tensor_returns || object_list || resizing.count(base) || sized_by_values.count(base) ||
          untagged_out || sized_by_data || op.hasTag(at::Tag::data_dependent_output) || s.is_vararg() || s.is_varret());
  return i;
}

ProcessMutex op_info_m, pseudo_op_m;
} // namespace

static const OpInfo* shared_op_info(const c10::OperatorHandle& op) {
  static auto* table = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OpInfo>>();
  std::lock_guard<ProcessMutex> l(op_info_m);
  auto& e = (*table)[&op.schema()];
  if (!e)
    e = make(op);
  return e.get();
}

const OpInfo* op_info(const c10::OperatorHandle& op) {
  // The same few operators come again and again: what this thread has seen needs no lock.
  constexpr size_t kRecent = 64;
  static thread_local std::pair<const c10::FunctionSchema*, const OpInfo*> recent[kRecent] = {};
  const auto* schema = &op.schema();
  auto& seen = recent[mix(0, reinterpret_cast<uintptr_t>(schema)) % kRecent];
  if (seen.first != schema)
    seen = {schema, shared_op_info(op)};
  return seen.second;
}

const OpInfo* pseudo_op(const std::string& name) {
  static auto* table = new std::unordered_map<std::string, std::unique_ptr<OpInfo>>();
  std::lock_guard<ProcessMutex> l(pseudo_op_m);
  auto& e = (*table)[name];
  if (!e) {
    e = std::make_unique<OpInfo>();
    e->schema = nullptr;
    e->name = name;
    e->name_hash = std::hash<std::string>()(name);
  }
  return e.get();
}
} // namespace coexec
