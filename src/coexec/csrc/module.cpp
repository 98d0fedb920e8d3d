// Python bindings of the native core.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <map>
#include "step.h"

namespace py = pybind11;
namespace coexec {
namespace {

// Errors of kernels keep the Python type that eager gives them.
template <class F>
auto translated(F&& f) {
  try {
    return f();
  } catch (py::error_already_set&) {
    throw;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    throw py::error_already_set();
  }
}

py::object to_python(const c10::IValue& v) {
  if (v.isNone())
    return py::none();
  if (v.isList()) {
    auto l = v.toListRef();
    py::tuple t(l.size());
    for (size_t i = 0; i < l.size(); i++)
      t[i] = to_python(l[i]);
    return t;
  }
  if (v.isDevice())
    return py::str(v.toDevice().str());
  if (v.isTensor() || v.isObject() || v.isCapsule() || v.isGenerator())
    return py::str(v.tagKind());
  return torch::jit::toPyObject(v);
}

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

template <class V, class F>
py::tuple tuple_of(const V& v, F&& f) {
  py::tuple t(v.size());
  for (size_t i = 0; i < v.size(); i++)
    t[i] = f(v[i]);
  return t;
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

void collect_tensors(py::handle o, std::vector<at::Tensor>* out, int depth) {
  if (THPVariable_Check(o.ptr())) {
    out->push_back(THPVariable_Unpack(o.ptr()));
  } else if (depth < 8 && (PyTuple_Check(o.ptr()) || PyList_Check(o.ptr()))) {
    for (auto x : py::reinterpret_borrow<py::sequence>(o))
      collect_tensors(x, out, depth + 1);
  } else if (depth < 8 && PyDict_Check(o.ptr())) {
    for (auto x : py::reinterpret_borrow<py::dict>(o))
      collect_tensors(x.second, out, depth + 1);
  }
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

at::ScalarType number_type(const std::string& name) {
  return name == "float64" ? at::kDouble
      : name == "int64"    ? at::kLong
      : name == "bool"     ? at::kBool
                           : at::kComplexDouble;
}

// The native side of a segment that `description` covers. See runtime/spec_builder.py for the arguments.
std::shared_ptr<Segment> make_segment(Step& s, const py::dict& d) {
  auto g = std::make_shared<Segment>();
  g->nodes = d["nodes"].cast<std::vector<int32_t>>();
  g->commit = d["commit"].cast<bool>();
  g->random = d["random"].cast<bool>();
  g->mutated = d["mutated"].cast<std::vector<int32_t>>();
  g->publishes = d["publishes"].cast<std::vector<int32_t>>();
  auto external_inputs = d["external_inputs"].cast<std::unordered_map<int32_t, int32_t>>();
  std::map<std::pair<int32_t, int32_t>, int32_t> slot_inputs; // (slot, memory) -> input
  for (auto h : d["slot_inputs"].cast<py::list>()) {
    auto t = h.cast<py::tuple>();
    slot_inputs[{t[0].cast<int32_t>(), t[1].cast<int32_t>()}] = t[2].cast<int32_t>();
  }
  std::unordered_map<int32_t, const OpDescription*> of_node;
  for (auto& x : s.description)
    of_node[x.node->id] = &x;
  for (int32_t n : g->nodes)
    g->variants.push_back(of_node.count(n) ? of_node[n]->variant : nullptr);
  for (auto h : d["inputs"].cast<py::list>()) {
    // (position, input, slot, latest, written, storage) or (position, arg, element, number type)
    auto t = h.cast<py::tuple>();
    SegmentInput in{};
    in.position = t[0].cast<int32_t>();
    in.slot = kExternal;
    if (t.size() == 4) {
      in.arg = t[1].cast<int16_t>();
      in.element = t[2].cast<int16_t>();
      in.number_type = number_type(t[3].cast<std::string>());
      in.storage = -1;
    } else {
      in.input = t[1].cast<int16_t>();
      in.slot = t[2].cast<int32_t>();
      in.latest = t[3].cast<bool>();
      in.written = t[4].cast<bool>();
      in.storage = t[5].cast<int32_t>();
      const auto& seen = of_node.at(g->nodes[in.position])->inputs[in.input];
      in.geometry = seen.geometry;
      if (in.slot >= 0) { // not the memory, but the view of it that the op was given: its geometry may change
        in.slot = seen.slot;
        // One that is made in the segment itself is not there when it starts: Python's own entry has it.
        in.latest &= std::find(g->nodes.begin(), g->nodes.end(), s.program.node_of_slot(in.slot)) == g->nodes.end();
      }
      if (in.slot >= 0)
        for (int32_t other : s.program.at(g->nodes[in.position]).producers[in.input])
          if (other >= 0 && other != in.slot)
            in.alternatives.push_back(other);
    }
    g->inputs.push_back(std::move(in));
  }
  for (int32_t slot : d["outputs"].cast<std::vector<int32_t>>()) {
    g->outputs.push_back({slot});
  }
  for (size_t p = 0; p < g->nodes.size(); p++) {
    auto it = of_node.find(g->nodes[p]);
    if (it == of_node.end())
      continue;
    for (size_t k = 0; k < it->second->inputs.size(); k++) {
      const auto& in = it->second->inputs[k];
      if (it->second->node->kind != Kind::Compute)
        continue; // nothing is executed: whoever uses a view is checked for the memory it sees
      SegmentCheck c{static_cast<int32_t>(p), static_cast<int16_t>(k), in.slot, in.sid, -1};
      if (auto v = slot_inputs.find({in.slot, in.sid}); in.slot >= 0 && v != slot_inputs.end())
        c.segment_input = v->second;
      if (in.slot < 0) {
        auto e = external_inputs.find(in.external);
        if (e == external_inputs.end())
          continue;
        c.segment_input = e->second;
      }
      g->checks.push_back(c);
    }
  }
  for (auto h : d["number_checks"].cast<py::list>()) {
    auto t = h.cast<py::tuple>();
    auto p = t[0].cast<int32_t>();
    auto a = t[1].cast<int16_t>();
    g->number_checks.push_back({p, a, of_node.at(g->nodes[p])->args[a], -1});
  }
  for (auto h : d["ranges"].cast<py::list>()) {
    auto t = h.cast<py::tuple>();
    g->ranges.push_back(
        {t[0].cast<int32_t>(), t[1].cast<int64_t>(), -1, t[2].cast<bool>(), t[3].cast<std::optional<int64_t>>()});
  }
  return g;
}

Expression expression(py::handle tokens) {
  Expression e;
  for (auto t : tokens) {
    auto pair = t.cast<std::pair<int64_t, int64_t>>();
    e.emplace_back(static_cast<Token>(pair.first), pair.second);
  }
  return e;
}

// (facts, [(position, expression)], [free position]).
Pattern pattern(py::handle h) {
  auto t = h.cast<py::tuple>();
  return {t[0].cast<std::vector<int64_t>>(), t[1].cast<std::vector<std::pair<int32_t, int32_t>>>(),
      t[2].cast<std::vector<int32_t>>()};
}

// Makes a segment one for all shapes that the patterns allow. See runtime/dynamic_segment.py for the arguments.
void make_dynamic(Segment& g, const py::dict& d) {
  for (auto h : d["expressions"].cast<py::list>())
    g.expressions.push_back(expression(h));
  auto patterns = d["input_patterns"].cast<py::list>();
  for (size_t k = 0; k < g.inputs.size(); k++)
    if (g.inputs[k].geometry)
      g.inputs[k].pattern = pattern(patterns[k]);
  for (auto h : d["patterns"].cast<py::list>())
    g.patterns.push_back(pattern(h));
  TORCH_CHECK(g.patterns.size() == g.nodes.size(), "coexec: one pattern per node");
  auto numbers = d["numbers"].cast<std::vector<int32_t>>();
  TORCH_CHECK(numbers.size() == g.number_checks.size(), "coexec: one expression per number check, or -1");
  for (size_t k = 0; k < numbers.size(); k++)
    g.number_checks[k].expression = numbers[k];
  auto sizes = d["range_sizes"].cast<std::vector<int32_t>>();
  TORCH_CHECK(sizes.size() == g.ranges.size(), "coexec: one expression per index range, or -1");
  for (size_t k = 0; k < sizes.size(); k++)
    g.ranges[k].expression = sizes[k];
  for (auto h : d["symbols"].cast<py::list>()) {
    auto from = h.cast<std::pair<int32_t, int32_t>>();
    TORCH_CHECK(g.inputs.at(from.first).geometry, "coexec: a symbol is a size of a tensor");
    g.symbols.push_back({from.first, from.second});
  }
}

// In the order of the plan; each with the versions of it that are loaded.
void install_segments(Step& s,
    const std::vector<std::pair<std::shared_ptr<PlannedSegment>, std::vector<std::shared_ptr<Segment>>>>& segments) {
  s.graph.join_iteration(); // it may still be looking for what comes after the last op
  for (size_t n = 0; n < s.program.size(); n++)
    s.program.at(static_cast<int32_t>(n)).segment = -1;
  auto table = std::make_shared<SegmentTable>();
  for (auto& [g, versions] : segments) {
    g->id = static_cast<int32_t>(table->by_id.size());
    g->versions = versions;
    for (size_t p = 0; p < g->nodes.size(); p++) {
      Node& n = s.program.at(g->nodes[p]);
      n.segment = g->id;
      n.position = static_cast<int32_t>(p);
    }
    table->by_id.push_back(g);
  }
  s.segments = std::move(table);
}

py::object fallback_of(Step& s) {
  if (!s.fallback)
    return py::none();
  return py::make_tuple(s.fallback->reason, s.fallback->op, s.fallback->location, s.fallback->after_node);
}

py::list chain_of(Step& s, uint64_t location) {
  auto known = s.locations.find(location);
  return to_python(known == s.locations.end() ? FrameChain() : known->second.chain);
}

py::dict stats_of(Step& s) {
  py::dict d;
  d["ops"] = s.stats.ops;
  d["traced_ops"] = s.stats.traced_ops;
  d["inferred_shapes"] = s.stats.inferred_shapes;
  d["feeds"] = s.stats.feeds;
  d["fetches"] = s.stats.fetches;
  d["returned_early"] = s.stats.returned_early;
  d["python_stall_s"] = s.waits.seconds();
  auto& g = s.graph.stats();
  py::dict graph_waits;
  graph_waits["case select"] = g.case_select_waits;
  graph_waits["loop cond"] = g.loop_cond_waits;
  d["graph_waits"] = graph_waits;
  d["graph_exec_s"] = g.exec_s;
  d["graph_stall_s"] = g.stall_s;
  d["replayed_ops"] = g.replayed_ops;
  d["moved_results"] = g.moved_results;
  d["compiled_runs"] = g.compiled_runs;
  d["discarded_runs"] = g.discarded_runs;
  return d;
}

const char* const kWaits[] = {
    "fetch", "sync", "step end", "fallback", "foreign write", "case select", "input", "overlap"};

// (reason, chain of the place, count, seconds) each.
py::list waits_of(Step& s) {
  py::list l;
  for (int why = 0; why < static_cast<int>(Wait::Count); why++)
    for (const auto& [location, total] : s.waits.of(static_cast<Wait>(why)))
      l.append(py::make_tuple(kWaits[why], chain_of(s, location), total.count, total.seconds));
  return l;
}

int64_t ns(Clock::time_point t) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
}

// (kind, reason of a wait of Python's, node or -1, chain of the place of a wait of Python's, ops, start, end) each.
py::list spans_of(Step& s, const std::vector<Span>& spans) {
  const char* kinds[] = {"wait", "op", "replayed", "segment"};
  py::list l;
  for (const auto& p : spans)
    l.append(py::make_tuple(kinds[static_cast<int>(p.kind)], kWaits[p.why], p.node, chain_of(s, p.location), p.ops,
        ns(p.start), ns(p.end)));
  return l;
}

// (start, end, the PythonRunner's spans, the GraphRunner's) of each of the latest co-executed calls; times in ns.
py::list timeline_of(Step& s) {
  py::list l;
  for (const auto& call : s.timeline.calls())
    l.append(py::make_tuple(ns(call->start), ns(call->end), spans_of(s, call->python), spans_of(s, call->graph)));
  return l;
}
} // namespace
} // namespace coexec

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace coexec;
  py::class_<PlannedSegment, std::shared_ptr<PlannedSegment>>(m, "PlannedSegment")
      .def(py::init([](const std::vector<int32_t>& nodes) {
        auto g = std::make_shared<PlannedSegment>();
        g->nodes = nodes;
        return g;
      }))
      .def_readonly("id", &PlannedSegment::id)
      .def_readonly("passes", &PlannedSegment::passes)
      .def_property_readonly("stale", [](PlannedSegment& p) { return p.stale.load(); })
      .def_readonly("signatures", &PlannedSegment::signatures)
      .def_readonly("last_signature", &PlannedSegment::last_signature)
      .def_readonly("unserved", &PlannedSegment::unserved)
      .def_readonly("awaited", &PlannedSegment::awaited)
      .def_readonly("awaited_node", &PlannedSegment::awaited_node)
      .def_property_readonly("last_misfit", [](PlannedSegment& p) { return std::string(p.last_misfit.load()); });
  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def("load",
          [](Segment& g, const std::string& path) {
            py::gil_scoped_release no_gil;
            g.artifact = std::make_unique<torch::inductor::AOTIModelContainerRunnerCpu>(path, 1);
          })
      .def("make_dynamic", &make_dynamic)
      .def("set_guards",
          [](Segment& g, const py::list& guards) {
            g.guards.clear();
            for (auto h : guards)
              g.guards.push_back(expression(h));
          })
      .def_readonly("runs", &Segment::runs)
      .def_readonly("discards", &Segment::discards)
      .def_readonly("last_discard", &Segment::last_discard)
      .def_readonly("compiled_s", &Segment::compiled_s)
      .def_readonly("replayed_s", &Segment::replayed_s)
      .def_readonly("trial", &Segment::trial)
      .def_property_readonly("slower", [](Segment& g) { return g.slower.load(); });
  m.def("evaluate",
      [](py::handle tokens, const std::vector<int64_t>& symbols) { return evaluate(expression(tokens), symbols); });
  py::class_<Capture, std::shared_ptr<Capture>>(m, "Capture")
      .def(py::init([](int32_t segment, std::shared_ptr<Segment> only, const std::string& path, bool generator,
                        const py::list& items) {
        auto c = std::make_shared<Capture>();
        c->segment = segment;
        c->only = std::move(only);
        c->path = path;
        c->with_generator = generator;
        for (auto h : items) { // (position, input, extent, low, nbytes) or (position, arg, element, number type)
          auto t = h.cast<py::tuple>();
          Capture::Item i{};
          i.position = t[0].cast<int32_t>();
          if (t.size() == 5) {
            i.input = t[1].cast<int16_t>();
            i.extent = static_cast<Capture::Extent>(t[2].cast<int>());
            i.low = t[3].cast<int64_t>();
            i.nbytes = t[4].cast<int64_t>();
          } else {
            i.input = -1;
            i.arg = t[1].cast<int16_t>();
            i.element = t[2].cast<int16_t>();
            i.number_type = number_type(t[3].cast<std::string>());
          }
          c->items.push_back(i);
        }
        return c;
      }))
      .def_readonly("failed", &Capture::failed)
      .def_readonly("generator_start", &Capture::generator_start)
      .def_readonly("generator_nbytes", &Capture::generator_nbytes)
      .def_property_readonly("pieces", // (start in the file or -1, bytes, first byte in the storage) per item
          [](Capture& c) {
            return tuple_of(c.items, [](const Capture::Item& i) { return py::make_tuple(i.start, i.nbytes, i.low); });
          });
  py::class_<Step>(m, "Step", py::dynamic_attr())
      .def(py::init<>())
      .def("begin_trace",
          [](Step& s, py::handle args, int levels) {
            std::vector<at::Tensor> tensors;
            collect_tensors(args, &tensors, 0);
            translated([&] { s.begin(Phase::Trace, tensors, levels, false); });
          })
      .def("begin_coexec",
          [](Step& s, py::handle args, int levels, bool lazy, bool overlap) {
            std::vector<at::Tensor> tensors;
            collect_tensors(args, &tensors, 0);
            translated([&] { s.begin(Phase::Coexec, tensors, levels, lazy, overlap); });
          })
      .def("finish", [](Step& s) { return translated([&] { return s.finish(); }); })
      .def("complete", [](Step& s) { return translated([&] { return s.complete(); }); })
      .def_property_readonly("pending", &Step::pending)
      .def("abort", [](Step& s) { translated([&] { s.abort(); }); })
      .def("drain", [](Step& s) { translated([&] { s.drain(); }); })
      .def("abandon", [](Step& s) { s.abandon(); })
      .def("forget_thread", [](Step& s) { s.graph.abandon(); })
      .def("stop",
          [](Step& s) {
            py::gil_scoped_release no_gil;
            s.graph.stop();
          })
      .def("ran_plain", &Step::ran_plain)
      .def("extend", [](Step& s, const std::vector<int32_t>& nodes) { translated([&] { s.extend(nodes); }); })
      .def("fold_loop", &Step::fold_loop)
      .def("fold_location", &Step::fold_location)
      .def("fold_list", &Step::fold_list)
      .def("mark_loop_conds", &Step::mark_loop_conds)
      .def("mark_unplanned", &Step::mark_unplanned)
      .def("taken", &Step::taken)
      .def_property_readonly("edges_taken", [](Step& s) { return s.stats.edges_taken; })
      .def("trace", [](Step& s) { return translated([&] { return export_trace(s); }); })
      .def("barrier",
          [](Step& s, const std::string& name, std::optional<at::Tensor> t, bool foreign) {
            translated([&] { s.barrier(name, t, foreign); });
          })
      .def("description", &export_description)
      .def("externals", &export_externals)
      .def("make_segment", &make_segment)
      .def("install_segments", &install_segments)
      .def("survivors", [](Step& s) { return s.program.survivors(); })
      .def("slot_of", [](Step& s, int32_t node, int32_t output) { return s.program.at(node).slot_base + output; })
      .def("node_of_slot", [](Step& s, int32_t slot) { return s.program.node_of_slot(slot); })
      .def("bytes_written",
          [](Step& s, int32_t node, int32_t input) -> int64_t {
            auto& n = s.program.at(node); // of the latest shapes; a kind without shapes writes nothing
            if (n.variants.empty())
              return 0;
            const auto& g = *n.variants.front()->inputs[input];
            int64_t count = 1;
            for (auto x : g.sizes)
              count *= x;
            return count * static_cast<int64_t>(c10::elementSize(g.dtype));
          })
      .def_property(
          "capture", [](Step& s) { return s.graph.capture; },
          [](Step& s, std::shared_ptr<Capture> c) {
            s.graph.join_iteration();
            s.graph.capture = std::move(c);
          })
      .def_readwrite("describing", &Step::describing)
      .def("key_until_left", &Step::key_until_left)
      .def("chain", &chain_of)
      .def("stats", &stats_of)
      .def("waits", &waits_of)
      .def("timeline", &timeline_of)
      .def_property_readonly("stalled_in_calls_s", // without what follows a call that returned early
          [](Step& s) { return s.waits.seconds() - s.waits.seconds(Wait::Overlap); })
      .def_property_readonly("fallback", &fallback_of)
      .def_readonly("has_trace", &Step::has_trace)
      .def_readonly("path", &Step::path)
      .def_readwrite("paused", &Step::paused)
      .def("set_upcalls",
          [](Step& s, py::object warn, py::object forget_gradients) {
            s.upcalls = {std::move(warn), std::move(forget_gradients)};
          })
      .def_property_readonly("other_device", [](Step& s) { return s.recorder.other_device; })
      .def_property_readonly("phase", [](Step& s) { return static_cast<int>(s.phase); });
  m.def("active_step", [] { return active_step(); }, py::return_value_policy::reference);
  // As active_step; without one, what a call that returned early still owes to the memory of `t` (to everything, if
  // there is no `t`) is done first.
  m.def(
      "step_reading",
      [](const std::optional<at::Tensor>& t, bool writes) {
        Step* s = active_step();
        if (!s)
          translated([&] { t ? settle_overlaps_of(*t, writes) : settle_overlaps(true); });
        return s;
      },
      py::arg("tensor"), py::arg("writes") = true, py::return_value_policy::reference);
  m.def(
      "settle_overlaps", [](bool raise) { translated([&] { settle_overlaps(raise); }); },
      py::arg("raise_error") = true);
  m.def("real_value", [](const at::Tensor& t) { return translated([&] { return real_value(t); }); });
  // For the test of forks: keeps a table locked, as a thread does that adds to it.
  m.def("hold_geometries", &hold_geometries, py::arg("seconds"), py::call_guard<py::gil_scoped_release>());
  m.def("watch_again", &watch_again);
  m.def("is_placeholder", [](const at::Tensor& t) { return record_of(*t.unsafeGetTensorImpl()) != nullptr; });
  m.def("never_computed", [](const at::Tensor& t) {
    return t.has_storage() && never_computed(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  });
  m.def("has_key", [](const at::Tensor& t) { return t.key_set().has(c10::DispatchKey::Fake); });
  // Returns a key for unmark_foreign.
  m.def("mark_foreign", [](const at::Tensor& t) -> uintptr_t {
    if (!t.has_storage())
      return 0;
    mark_foreign(t.storage());
    return reinterpret_cast<uintptr_t>(t.storage().unsafeGetStorageImpl());
  });
  m.def("unmark_foreign", [](uintptr_t key) { unmark_foreign(reinterpret_cast<c10::StorageImpl*>(key)); });
}
