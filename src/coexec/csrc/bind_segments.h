#pragma once
// Segments: their native side as runtime/spec_builder.py describes it, and captures of their inputs.
// (A part of module.cpp, and of no other file: PyTorch's headers for Python take far longer to compile than this does.)
#include <map>
#include "to_python.h"

namespace coexec {
namespace {

at::ScalarType number_type(const std::string& name) {
  return name == "float64" ? at::kDouble
      : name == "int64"    ? at::kLong
      : name == "bool"     ? at::kBool
                           : at::kComplexDouble;
}

using DescribedOps = std::unordered_map<int32_t, const OpDescription*>; // by node
using InputOfMemory = std::map<std::pair<int32_t, int32_t>, int32_t>; // (slot, memory) -> input of the segment

DescribedOps described_ops(const Step& s) {
  DescribedOps of_node;
  for (auto& x : s.description)
    of_node[x.node->id] = &x;
  return of_node;
}

// From (position, arg, element, number type): a number that the step supplies.
SegmentInput fed_number(const py::tuple& t) {
  SegmentInput in{};
  in.position = t[0].cast<int32_t>();
  in.slot = kExternal;
  in.arg = t[1].cast<int16_t>();
  in.element = t[2].cast<int16_t>();
  in.number_type = number_type(t[3].cast<std::string>());
  in.storage = -1;
  return in;
}

// From (position, input, slot, latest, written, storage): a tensor that an op of the segment reads.
SegmentInput read_tensor(Step& s, const std::vector<int32_t>& nodes, const DescribedOps& of_node, const py::tuple& t) {
  SegmentInput in{};
  in.position = t[0].cast<int32_t>();
  in.input = t[1].cast<int16_t>();
  in.slot = t[2].cast<int32_t>();
  in.latest = t[3].cast<bool>();
  in.written = t[4].cast<bool>();
  in.storage = t[5].cast<int32_t>();
  const auto& seen = of_node.at(nodes[in.position])->inputs[in.input];
  in.geometry = seen.geometry;
  if (in.slot < 0)
    return in;
  // Not the memory, but the view of it that the op was given: its geometry may change.
  in.slot = seen.slot;
  // One that is made in the segment itself is not there when it starts: Python's own entry has it.
  in.latest &= std::find(nodes.begin(), nodes.end(), s.program.node_of_slot(in.slot)) == nodes.end();
  for (int32_t other : s.program.at(nodes[in.position]).producers[in.input])
    if (other >= 0 && other != in.slot)
      in.alternatives.push_back(other);
  return in;
}

// What is looked at when the op at position `p` is matched: each of its inputs is still the memory that was described.
void add_checks(Segment& g, int32_t p, const OpDescription& op, const InputOfMemory& slot_inputs,
    const std::unordered_map<int32_t, int32_t>& external_inputs) {
  if (op.node->kind != Kind::Compute)
    return; // nothing is executed: whoever uses a view is checked for the memory it sees
  for (size_t k = 0; k < op.inputs.size(); k++) {
    const auto& in = op.inputs[k];
    SegmentCheck c{p, static_cast<int16_t>(k), in.slot, in.sid, -1};
    if (auto v = slot_inputs.find({in.slot, in.sid}); in.slot >= 0 && v != slot_inputs.end())
      c.segment_input = v->second;
    if (in.slot < 0) {
      auto e = external_inputs.find(in.external);
      if (e == external_inputs.end())
        continue;
      c.segment_input = e->second;
    }
    g.checks.push_back(c);
  }
}

// The native side of a segment that `description` covers. See runtime/spec_builder.py for the arguments.
std::shared_ptr<Segment> make_segment(Step& s, const py::dict& d) {
  auto g = std::make_shared<Segment>();
  g->nodes = d["nodes"].cast<std::vector<int32_t>>();
  g->commit = d["commit"].cast<bool>();
  g->random = d["random"].cast<bool>();
  g->mutated = d["mutated"].cast<std::vector<int32_t>>();
  DescribedOps of_node = described_ops(s);
  for (int32_t n : g->nodes)
    g->variants.push_back(of_node.count(n) ? of_node[n]->variant : nullptr);
  for (auto h : d["inputs"].cast<py::list>()) {
    auto t = h.cast<py::tuple>();
    g->inputs.push_back(t.size() == 4 ? fed_number(t) : read_tensor(s, g->nodes, of_node, t));
  }
  for (int32_t slot : d["outputs"].cast<std::vector<int32_t>>())
    g->outputs.push_back({slot});
  InputOfMemory slot_inputs;
  for (auto h : d["slot_inputs"].cast<py::list>()) {
    auto t = h.cast<py::tuple>();
    slot_inputs[{t[0].cast<int32_t>(), t[1].cast<int32_t>()}] = t[2].cast<int32_t>();
  }
  auto external_inputs = d["external_inputs"].cast<std::unordered_map<int32_t, int32_t>>();
  for (size_t p = 0; p < g->nodes.size(); p++)
    if (auto it = of_node.find(g->nodes[p]); it != of_node.end())
      add_checks(*g, static_cast<int32_t>(p), *it->second, slot_inputs, external_inputs);
  for (int32_t p : d["publishes"].cast<std::vector<int32_t>>()) {
    const auto& read = of_node.at(g->nodes[p])->inputs[0];
    g->fetches.push_back({p, 0, read.slot, read.sid, -1});
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
  for (auto h : d["distances"].cast<py::list>()) {
    auto t = h.cast<py::tuple>();
    g->distances.push_back({t[0].cast<int32_t>(), t[1].cast<int32_t>(), t[2].cast<int64_t>(), -1});
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
  auto distances = d["distances"].cast<std::vector<int32_t>>();
  TORCH_CHECK(distances.size() == g.distances.size(), "coexec: one expression per distance, or -1");
  for (size_t k = 0; k < distances.size(); k++)
    g.distances[k].expression = distances[k];
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

void bind_segments(py::module_& m) {
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
}
} // namespace
} // namespace coexec
