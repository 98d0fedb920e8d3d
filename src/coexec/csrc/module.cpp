// Python bindings of the native core.
#include "bind_reports.h"
#include "bind_segments.h"
#include "bind_trace.h"
#include "to_python.h"

namespace coexec {
namespace {
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
} // namespace
} // namespace coexec

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace coexec;
  bind_segments(m);
  py::class_<Step>(m, "Step", py::dynamic_attr())
      .def(py::init<>())
      .def("begin_trace",
          [](Step& s, py::handle args, int levels, bool block) {
            std::vector<at::Tensor> tensors;
            collect_tensors(args, &tensors, 0);
            translated([&] { s.begin(Phase::Trace, tensors, step_frame(levels, block)); });
          })
      .def("begin_coexec",
          [](Step& s, py::handle args, int levels, bool block, bool lazy, bool overlap) {
            std::vector<at::Tensor> tensors;
            collect_tensors(args, &tensors, 0);
            translated([&] { s.begin(Phase::Coexec, tensors, step_frame(levels, block), lazy, overlap); });
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
