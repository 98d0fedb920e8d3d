#pragma once
// Traces and descriptions of graphs as Python's records.
// (A part of module.cpp, and of no other file: PyTorch's headers for Python take far longer to compile than this does.)
#include "to_python.h"

namespace coexec {
namespace {

// Static attributes and the numbers that may vary, as records.OpRecord wants them.
std::pair<py::tuple, py::tuple> attributes(c10::ArrayRef<Arg> args) {
  py::list st, numbers;
  for (const auto& a : args) {
    switch (a.type) {
      case Arg::Static:
        st.append(to_python(a.value));
        break;
      case Arg::Undefined:
        st.append(py::str("undefined"));
        break;
      case Arg::List: {
        py::tuple p(a.present.size());
        for (size_t i = 0; i < a.present.size(); i++)
          p[i] = py::bool_(static_cast<bool>(a.present[i]));
        st.append(p);
        break;
      }
      case Arg::Wrapped:
        st.append(py::int_(static_cast<int>(a.wrapped_dtype)));
        numbers.append(to_python(a.value));
        break;
      case Arg::Number:
        numbers.append(to_python(a.value));
        break;
      case Arg::Object:
        st.append(py::bool_(a.value.toBool()));
        break;
      case Arg::Tensor:
        break;
    }
  }
  return {py::tuple(st), py::tuple(numbers)};
}

py::object export_trace(Step& s) {
  py::module_ records = py::module_::import("coexec.records");
  py::object op_record = records.attr("OpRecord"), value_ref = records.attr("ValueRef"),
             external = records.attr("ExternalRecord"), trace = records.attr("Trace"), op_kind = records.attr("OpKind");
  std::vector<py::object> kinds;
  for (int k = 0; k < 6; k++)
    kinds.push_back(op_kind(k));
  auto& r = s.recorder;
  r.classify_host_ops();
  py::tuple ops(r.ops.size());
  for (size_t i = 0; i < r.ops.size(); i++) {
    auto& t = r.ops[i];
    auto [st, numbers] = attributes(t.args);
    auto inputs = tuple_of(t.inputs, [&](const TraceInput& x) { return value_ref(x.value.producer, x.value.output); });
    auto aliases = tuple_of(t.outputs, [](const Output& o) { return py::int_(o.alias); });
    auto writes = tuple_of(t.writes, [](int16_t w) { return py::int_(w); });
    ops[i] = op_record(t.info->name, t.uid, t.location, kinds[static_cast<int>(t.kind)], st, numbers, inputs,
        t.outputs.size(), writes, aliases, t.info->random, t.node, t.folded);
  }
  auto ext = tuple_of(
      r.externals, [&](const TraceExternal& e) { return external(e.storage, e.nbytes, e.step_argument, e.foreign); });
  return trace(ops, ext, r.complete);
}

py::dict geometry_dict(const Geometry& g) {
  py::dict d;
  d["dtype"] = py::str(torch::getTHPDtype(g.dtype)->name);
  d["sizes"] = tuple_of(g.sizes, [](int64_t x) { return py::int_(x); });
  d["strides"] = tuple_of(g.strides, [](int64_t x) { return py::int_(x); });
  d["offset"] = g.offset;
  d["lazy_bits"] = static_cast<int>(g.lazy_bits);
  return d;
}

// (node, argument types, argument values, tensor inputs (slot, external, geometry), outputs, facts, memories: per input
// (number, whether it is that of the latest pass, bytes)).
py::list export_description(Step& s) {
  py::list l;
  for (auto& d : s.description) {
    py::list types, values, inputs, memories, outs, nbytes, present;
    for (size_t i = 0; i < d.node->args.size() && i < d.args.size(); i++) {
      const Arg& a = d.node->args[i];
      const char* names[] = {"tensor", "undefined", "wrapped", "list", "static", "number", "object"};
      types.append(py::make_tuple(names[a.type], a.fed, static_cast<int>(d.node->info->args[i].cls),
          py::str(a.type == Arg::Wrapped ? torch::getTHPDtype(a.wrapped_dtype)->name : ""),
          tuple_of(a.present, [](bool p) { return py::bool_(p); })));
      values.append(d.args[i].isDevice() ? py::object(py::make_tuple("device", d.args[i].toDevice().str()))
                                         : to_python(d.args[i]));
    }
    for (auto& in : d.inputs) {
      inputs.append(
          py::make_tuple(in.slot, in.external, in.geometry ? py::object(geometry_dict(*in.geometry)) : py::none()));
      memories.append(py::make_tuple(in.sid, in.latest, in.nbytes));
    }
    for (size_t k = 0; d.variant && k < d.node->outputs.size(); k++) {
      const auto* g = d.variant->outputs[k];
      outs.append(py::make_tuple(d.out_slots[k], d.node->outputs[k].alias, d.node->outputs[k].same_arg >= 0,
          g ? py::object(geometry_dict(*g)) : py::none(), d.variant->nbytes[k]));
    }
    auto facts = d.variant ? facts_of(*d.node, *d.variant) : std::vector<int64_t>();
    l.append(py::make_tuple(
        d.node->id, static_cast<int>(d.node->kind), d.node->info->name, types, values, inputs, outs, facts, memories));
  }
  return l;
}

py::list export_externals(Step& s) {
  py::list l;
  for (auto& e : s.external_descriptions)
    l.append(py::make_tuple(e.storage, e.nbytes, geometry_dict(*e.geometry)));
  return l;
}

} // namespace
} // namespace coexec
