"""Exports the core to ONNX and runs it in an InferenceSession, over torch's memory on both sides."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

from coexec.backends.candidates.candidate import CandidateError, Runner
from coexec.backends.candidates.core import Call, Core
from coexec.backends.candidates.exported import export, foreign_core, quiet
from coexec.backends.candidates.frame import framed
from coexec.backends.candidates.program import Program

NAME = "onnxruntime"
FILE = "model.onnx"

ELEMENTS = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.int16: onnx.TensorProto.INT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}

RACING = "ScatterND"

GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def build(program: Program, folder: Path, *, opset: int, threads: int) -> Mapping[str, object]:
    """Export, give the weights names without values, and start one session to see that the runtime takes it."""
    core = foreign_core(NAME, program)
    model = _exported(core, opset)
    _refuse_races(model.graph, threads)
    _name_values(model, core)
    _strip(model.graph)
    model.ClearField("metadata_props")
    (folder / FILE).write_bytes(model.SerializeToString())
    _session(folder / FILE, core, threads)
    return {}


def load(folder: Path, program: Program, *, threads: int) -> Runner:
    """A session over the stored model with the program's weights."""
    core = foreign_core(NAME, program)
    session, weights = _session(folder / FILE, core, threads)
    call = _fixed(session, weights, core) if not core.dynamic else _sized(session, weights, core)
    return framed(NAME, core, call, contiguous=True)


def _exported(core: Core, opset: int) -> Any:
    exported = export(NAME, core)
    with torch.no_grad(), quiet(), contextlib.redirect_stdout(io.StringIO()):
        try:
            found = torch.onnx.export(exported, dynamo=True, verbose=False, opset_version=opset, optimize=True)
        except Exception as error:
            raise CandidateError(NAME, f"torch.onnx.export: {type(error).__name__}: {_last_line(error)}") from error
    if found is None:
        raise CandidateError(NAME, "torch.onnx.export returned nothing")
    return found.model_proto


def _refuse_races(graph: Any, threads: int) -> None:
    """Threads of ScatterND with a reduction add to the same element at once: one call in ten loses updates."""
    for node in graph.node:
        reduction = next((a.s.decode() for a in node.attribute if a.name == "reduction"), "none")
        if node.op_type == RACING and reduction != "none" and threads > 1:
            raise CandidateError(
                NAME, f"{RACING} with reduction={reduction!r} loses updates on {threads} threads; on one it does not"
            )
        for inner in _graphs_of(node):
            _refuse_races(inner, threads)


def _graphs_of(node: Any) -> list[Any]:
    """Bodies of loops and branches."""
    return [graph for a in node.attribute if a.type in GRAPHS for graph in (a.g, *a.graphs)]


def _name_values(model: Any, core: Core) -> None:
    """Inputs become i0, i1 ...; results r0 ...; static inputs become initializers w0 ... without values."""
    graph = model.graph
    if len(graph.input) != len(core.sources) or len(graph.output) != len(core.outputs):
        counts = f"{len(graph.input)} inputs and {len(graph.output)} outputs"
        raise CandidateError(
            NAME, f"the exported model has {counts}, the graph {len(core.sources)}, {len(core.outputs)}"
        )
    renamed = {value.name: _input_name(core, i) for i, value in enumerate(graph.input)}
    _check_types(model, core)
    outputs = [value.name for value in graph.output]
    _rename(graph, renamed)
    for index, name in enumerate(outputs):
        source = renamed.get(name, name)
        graph.node.append(onnx.helper.make_node("Identity", [source], [f"r{index}"]))
        graph.output[index].name = f"r{index}"
    inputs = list(graph.input)
    del graph.input[:]
    for position, value in enumerate(inputs):
        if position in core.static:
            graph.initializer.append(_initializer(core, position))
        else:
            value.name = _input_name(core, position)
            graph.input.append(value)


def _input_name(core: Core, position: int) -> str:
    return f"w{position}" if position in core.static else f"i{position}"


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for inner in _graphs_of(node):
            _rename(inner, names)


def _strip(graph: Any) -> None:
    """Without the exporter's notes: they hold the source lines and file names of whoever built the model."""
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    for node in graph.node:
        for inner in _graphs_of(node):
            _strip(inner)


def _initializer(core: Core, position: int) -> Any:
    """A tensor that the model expects from outside: its "file" does not exist, the session is given the memory."""
    value = core.examples[position]
    tensor = onnx.TensorProto()
    tensor.name, tensor.data_type = f"w{position}", ELEMENTS[value.dtype]
    tensor.dims.extend(value.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, text in (("location", "weights"), ("offset", "0"), ("length", str(value.nbytes))):
        tensor.external_data.add(key=key, value=text)
    return tensor


def _check_types(model: Any, core: Core) -> None:
    """The exporter may widen or drop a dtype: binding memory under a wrong type would read garbage."""
    dtypes = [t.dtype for t in core.examples] + [o.dtype for o in core.outputs]
    for value, dtype in zip([*model.graph.input, *model.graph.output], dtypes, strict=True):
        if value.type.tensor_type.elem_type != ELEMENTS.get(dtype, -1):
            raise CandidateError(NAME, f"{value.name} has dtype {dtype}, which the exported model does not keep")


def _session(path: Path, core: Core, threads: int) -> tuple[Any, list[Any]]:
    """(session, what it refers to and must outlive it)."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    # Spinning workers keep the cores busy between calls and slow torch's own threads down up to six times.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.add_session_config_entry("session.set_denormal_as_zero", "0")  # eager keeps denormals
    tensors = {i: t.contiguous() for i, t in core.weights().items()}
    values = {f"w{i}": onnxruntime.OrtValue.ortvalue_from_numpy(t.numpy()) for i, t in tensors.items()}
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise CandidateError(NAME, f"InferenceSession: {_last_line(error)}") from error
    return session, [tensors, values]


def _fixed(session: Any, keep: Any, core: Core) -> Call:
    """Inputs and outputs are bound by address: nothing is copied. Outputs are new memory for every call."""
    inputs = [(f"i{i}", ELEMENTS[core.examples[i].dtype], tuple(core.examples[i].shape)) for i in core.live]
    outputs = [(f"r{n}", ELEMENTS[o.dtype], o.sizes or (), o.dtype) for n, o in enumerate(core.outputs)]

    def call(live: list[torch.Tensor]) -> list[torch.Tensor]:
        binding = session.io_binding()  # one per call: several threads may call at once
        for (name, element, sizes), tensor in zip(inputs, live, strict=True):
            binding.bind_input(name, "cpu", 0, element, sizes, tensor.data_ptr())
        results = []
        for name, element, sizes, dtype in outputs:
            result = torch.empty(sizes, dtype=dtype)
            binding.bind_output(name, "cpu", 0, element, sizes, result.data_ptr())
            results.append(result)
        session.run_with_iobinding(binding)
        return results

    call.keeps_alive = keep  # type: ignore[attr-defined]  # ORT does not own the memory of the weights
    return call


def _sized(session: Any, keep: Any, core: Core) -> Call:
    """With symbolic sizes the runtime allocates outputs; they are taken over without a copy."""
    inputs = [(f"i{i}", ELEMENTS[core.examples[i].dtype]) for i in core.live]
    names = [f"r{n}" for n in range(len(core.outputs))]

    def call(live: list[torch.Tensor]) -> list[torch.Tensor]:
        binding = session.io_binding()
        for (name, element), tensor in zip(inputs, live, strict=True):
            binding.bind_input(name, "cpu", 0, element, tuple(tensor.shape), tensor.data_ptr())
        for name in names:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        return [torch.from_numpy(value.numpy()) for value in binding.get_outputs()]

    call.keeps_alive = keep  # type: ignore[attr-defined]
    return call


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[-1][:300]
