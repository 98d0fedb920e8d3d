// What a trace teaches the program that the PythonRunner follows: nodes, paths, dataflow, shapes.
#include "step.h"

namespace coexec {
void Step::extend(const std::vector<int32_t>& nodes) {
  TORCH_CHECK(nodes.size() == recorder.ops.size(), "coexec: one node per op of the trace");
  graph.join_iteration(); // it may still be looking for what comes after the last op
  for (size_t i = 0; i < nodes.size(); i++)
    if (nodes[i] >= static_cast<int32_t>(program.size()))
      TORCH_CHECK(program.add(new_node(recorder.ops[i])).id == nodes[i],
          "coexec: nodes must be numbered in order of appearance");
  link_path(nodes);
  for (size_t i = 0; i < nodes.size(); i++) {
    const auto& t = recorder.ops[i];
    if (t.node >= 0) // of the prefix that was co-executed: known
      continue;
    Node& n = program.at(nodes[i]);
    learn_producers(n, t, nodes);
    if (learn_arguments(n, t) && segments && n.segment >= 0)
      segments->by_id[n.segment]->stale.store(true);
    if (t.kind == Kind::Compute || (t.kind == Kind::View && !t.outputs.empty()))
      learn_variant(n, t);
  }
}

std::unique_ptr<Node> Step::new_node(const TraceOp& t) {
  auto n = std::make_unique<Node>();
  n->info = t.info;
  n->kind = t.kind;
  n->location = t.location;
  n->uid = t.uid;
  n->folded = t.folded;
  n->guarded = place(t.location).guarded;
  n->args.assign(t.args.begin(), t.args.end());
  n->returns.assign(t.returns.begin(), t.returns.end());
  n->outputs.assign(t.outputs.begin(), t.outputs.end());
  n->writes.assign(t.writes.begin(), t.writes.end());
  n->producers.resize(t.inputs.size());
  for (const auto& o : n->outputs)
    if (n->kind == Kind::Compute && o.alias >= 0 && o.same_arg < 0)
      n->passes_on = o.alias;
  return n;
}

void Step::link_path(const std::vector<int32_t>& nodes) {
  int32_t previous = kStart;
  auto link = [&](int32_t id) {
    auto& c = program.at(previous).children;
    // Of two nodes for one op the one that waits for nothing: an earlier trace did not know that Python reads it.
    bool first = id != kEnd && program.at(id).kind == Kind::Host;
    if (!program.at(previous).child(id))
      c.insert(first ? c.begin() : c.end(), Child{id});
    previous = id;
  };
  for (int32_t id : nodes)
    link(id);
  if (recorder.complete)
    link(kEnd);
}

void Step::learn_producers(Node& n, const TraceOp& t, const std::vector<int32_t>& nodes) {
  for (size_t k = 0; k < t.inputs.size(); k++) {
    auto v = t.inputs[k].value;
    int32_t slot = v.producer < 0 ? kExternal : program.at(nodes[v.producer]).slot_base + v.output;
    auto& p = n.producers[k];
    if (std::find(p.begin(), p.end(), slot) == p.end())
      p.push_back(slot);
  }
}

// A number that was seen to change is fed from now on. True if one was not until now: artifacts have it as a constant,
// and none of the facts that they are chosen by tells of it (a number that decides a shape is such a fact).
bool Step::learn_arguments(Node& n, const TraceOp& t) {
  bool varies = false;
  for (size_t a = 0; a < t.args.size(); a++) {
    const auto& seen = t.args[a];
    auto& known = n.args[a];
    known.snapshot |= seen.snapshot;
    if ((seen.type == Arg::Number || seen.type == Arg::Wrapped) && !same_value(seen.value, known.value)) {
      bool shapes = seen.type == Arg::Number && n.info->args[a].shapes;
      varies |= !known.fed && !shapes;
      known.fed = true;
    }
  }
  return varies;
}

// The shapes of this trace, unless they are known.
void Step::learn_variant(Node& n, const TraceOp& t) {
  auto made = std::make_shared<Variant>();
  Variant& seen = *made;
  std::vector<const ArgInfo*> number_info;
  for (size_t a = 0; a < t.args.size(); a++)
    if (t.args[a].type == Arg::Number) {
      seen.numbers.push_back(t.args[a].value);
      number_info.push_back(&n.info->args[a]);
    }
  for (const auto& in : t.inputs)
    seen.inputs.push_back(in.geometry);
  seen.outputs.assign(t.geometries.begin(), t.geometries.end());
  seen.nbytes.assign(t.nbytes.begin(), t.nbytes.end());
  for (auto& v : n.variants) {
    bool same = v->inputs == seen.inputs && v->numbers.size() == seen.numbers.size();
    for (size_t k = 0; same && k < v->numbers.size(); k++)
      same = same_shape_number(*number_info[k], v->numbers[k], seen.numbers[k]);
    if (same && (v->outputs == seen.outputs || v->observed))
      return;
  }
  seen.observed = true;
  add_variant(n, std::move(made));
}

// From now on these locations get real memory at once (recorded as HOST ops).
void Step::learn_native_fills() {
  for (int32_t slot : it_->native_fills)
    if (const Node& n = program.at(program.node_of_slot(slot)); n.info->allocates)
      recorder.native_fills.insert(n.location);
  it_->native_fills.clear();
}
} // namespace coexec
