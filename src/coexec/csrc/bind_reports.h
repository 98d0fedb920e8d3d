#pragma once
// What happened, for stats(), explain() and timeline().
// (A part of module.cpp, and of no other file: PyTorch's headers for Python take far longer to compile than this does.)
#include "to_python.h"

namespace coexec {
namespace {

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
