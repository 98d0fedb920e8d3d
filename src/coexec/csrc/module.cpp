// Python bindings of the native core.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>
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
std::pair<py::tuple, py::tuple> attributes(const std::vector<Arg>& args) {
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
                       t.outputs.size(), writes, aliases, t.info->random, t.node);
  }
  auto ext = tuple_of(r.externals, [&](const TraceExternal& e) {
    return external(e.storage, e.nbytes, e.step_argument, e.foreign);
  });
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

py::object fallback_of(Step& s) {
  if (!s.fallback)
    return py::none();
  return py::make_tuple(s.fallback->reason, s.fallback->op, s.fallback->location, s.fallback->after_node);
}

// The chain of a location, innermost first: (code object, byte offset).
py::list chain_of(Step& s, uint64_t location) {
  py::list l;
  auto it = s.locations.find(location);
  if (it != s.locations.end())
    for (auto& f : it->second.chain)
      l.append(py::make_tuple(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(f.code)), f.offset));
  return l;
}

py::dict stats_of(Step& s) {
  py::dict d;
  d["ops"] = s.stats.ops;
  d["traced_ops"] = s.stats.traced_ops;
  d["feeds"] = s.stats.feeds;
  d["fetches"] = s.stats.fetches;
  d["python_stall_s"] = s.stats.stall_s;
  const char* names[] = {"fetch", "sync", "step end", "fallback", "foreign write", "case select", "input"};
  py::dict waits;
  for (int i = 0; i < static_cast<int>(Wait::Count); i++)
    waits[names[i]] = s.stats.waits[i];
  d["waits"] = waits;
  auto& g = s.graph.stats();
  d["graph_exec_s"] = g.exec_s;
  d["graph_stall_s"] = g.stall_s;
  d["replayed_ops"] = g.replayed_ops;
  d["compiled_runs"] = g.compiled_runs;
  d["discarded_runs"] = g.discarded_runs;
  return d;
}
} // namespace
} // namespace coexec

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace coexec;
  py::class_<Step>(m, "Step", py::dynamic_attr())
      .def(py::init<>())
      .def("begin_trace", [](Step& s, py::handle args, int levels) {
        std::vector<at::Tensor> tensors;
        collect_tensors(args, &tensors, 0);
        translated([&] { s.begin(Phase::Trace, std::move(tensors), levels, false); });
      })
      .def("begin_coexec", [](Step& s, py::handle args, int levels, bool lazy) {
        std::vector<at::Tensor> tensors;
        collect_tensors(args, &tensors, 0);
        translated([&] { s.begin(Phase::Coexec, std::move(tensors), levels, lazy); });
      })
      .def("finish", [](Step& s) { translated([&] { s.finish(); }); })
      .def("abort", [](Step& s) { translated([&] { s.abort(); }); })
      .def("drain", [](Step& s) { translated([&] { s.drain(); }); })
      .def("abandon", [](Step& s) { s.abandon(); })
      .def("forget_thread", [](Step& s) { s.graph.abandon(); })
      .def("stop", [](Step& s) {
        py::gil_scoped_release no_gil;
        s.graph.stop();
      })
      .def("extend", [](Step& s, const std::vector<int32_t>& nodes) { translated([&] { s.extend(nodes); }); })
      .def("trace", [](Step& s) { return translated([&] { return export_trace(s); }); })
      .def("barrier", [](Step& s, const std::string& name, std::optional<at::Tensor> t, bool foreign) {
        translated([&] { s.barrier(name, t, foreign); });
      })
      .def("chain", &chain_of)
      .def("stats", &stats_of)
      .def_property_readonly("fallback", &fallback_of)
      .def_readonly("has_trace", &Step::has_trace)
      .def_readonly("path", &Step::path)
      .def_readwrite("paused", &Step::paused)
      .def_property("native_code_fills", [](Step& s) { return s.recorder.native_code_fills; },
                    [](Step& s, bool v) { s.recorder.native_code_fills = v; })
      .def_property_readonly("phase", [](Step& s) { return static_cast<int>(s.phase); });
  m.def("active_step", [] { return active_step(); }, py::return_value_policy::reference);
  m.def("is_placeholder", [](const at::Tensor& t) { return record_of(*t.unsafeGetTensorImpl()) != nullptr; });
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
