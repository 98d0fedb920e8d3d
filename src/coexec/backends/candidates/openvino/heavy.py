"""Converts the core to OpenVINO's IR and runs it over torch's memory.

`openvino.torch` is never imported: it switches a setting of Dynamo for the whole process, and its backend falls back to
Inductor without a word. The converter is given an exported program instead.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import openvino
import torch

from coexec.backends.candidates.candidate import CandidateError, Runner
from coexec.backends.candidates.core import Call, Core
from coexec.backends.candidates.exported import export, foreign_core, quiet
from coexec.backends.candidates.frame import framed
from coexec.backends.candidates.program import Program

NAME = "openvino"
FILE = "model.xml"

TYPES = {
    torch.float32: openvino.Type.f32,
    torch.float64: openvino.Type.f64,
    torch.int64: openvino.Type.i64,
    torch.int32: openvino.Type.i32,
    torch.int16: openvino.Type.i16,
    torch.int8: openvino.Type.i8,
    torch.uint8: openvino.Type.u8,
    torch.bool: openvino.Type.boolean,
}


def settings(threads: int) -> dict[str, Any]:
    """Of the CPU plugin. Without the precision it computes in bfloat16 on processors that can: wrong by up to 0.14."""
    return {
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # pinned threads would share cores with torch's
    }


def build(program: Program, folder: Path, *, threads: int) -> Mapping[str, object]:
    """Convert, store, and compile once to see that the runtime takes it."""
    core = foreign_core(NAME, program)
    model = _converted(core)
    # Half precision weights are the default of save_model.
    openvino.save_model(model, str(folder / FILE), compress_to_fp16=False)
    _compiled(folder / FILE, core, threads)
    return {}


def load(folder: Path, program: Program, *, threads: int) -> Runner:
    """The stored model with the program's weights, compiled by the plugin (a tenth of a second: it only plans)."""
    core = foreign_core(NAME, program)
    compiled, keep = _compiled(folder / FILE, core, threads)
    return framed(NAME, core, _call(compiled, keep, core), contiguous=True)


def _converted(core: Core) -> Any:
    exported = export(NAME, core)
    with torch.no_grad(), quiet():
        try:
            model = openvino.convert_model(exported)
        except Exception as error:
            raise CandidateError(NAME, f"convert_model: {type(error).__name__}: {_first_line(error)}") from error
    if len(model.inputs) != len(core.sources) or len(model.outputs) != len(core.outputs):
        counts = f"{len(model.inputs)} inputs and {len(model.outputs)} outputs"
        raise CandidateError(NAME, f"the model has {counts}, the graph {len(core.sources)} and {len(core.outputs)}")
    if not core.dynamic:
        model.reshape({i: list(t.shape) for i, t in enumerate(core.examples)})
    _check_types(model, core)
    return model


def _check_types(model: Any, core: Core) -> None:
    """The converter may change a dtype: memory shared under a wrong type would be garbage."""
    dtypes = [t.dtype for t in core.examples] + [o.dtype for o in core.outputs]
    for port, dtype in zip([*model.inputs, *model.outputs], dtypes, strict=True):
        if port.get_element_type() != TYPES.get(dtype):
            raise CandidateError(NAME, f"a tensor of dtype {dtype} became {port.get_element_type().get_type_name()}")


def _compiled(path: Path, core: Core, threads: int) -> tuple[Any, list[torch.Tensor]]:
    """(compiled model, tensors whose memory it uses)."""
    runtime = openvino.Core()
    model = runtime.read_model(str(path))
    parameters = model.get_parameters()
    keep = []
    for position, tensor in core.weights().items():
        keep.append(tensor.contiguous())
        shared = openvino.Tensor(keep[-1].numpy(), shared_memory=True)
        parameters[position].output(0).replace(openvino.op.Constant(shared, shared_memory=True).output(0))
        model.remove_parameter(parameters[position])
    try:
        return runtime.compile_model(model, "CPU", settings(threads)), keep
    except Exception as error:
        raise CandidateError(NAME, f"compile_model: {_first_line(error)}") from error


def _call(compiled: Any, keep: list[torch.Tensor], core: Core) -> Call:
    local = threading.local()  # a request is for one thread at a time
    fixed = [None if o.sizes is None else (o.sizes, o.dtype) for o in core.outputs]

    def call(live: list[torch.Tensor]) -> list[torch.Tensor]:
        request = getattr(local, "request", None)
        if request is None:
            request = local.request = compiled.create_infer_request()
        for index, tensor in enumerate(live):
            request.set_input_tensor(index, openvino.Tensor(tensor.detach().numpy(), shared_memory=True))
        results: list[torch.Tensor | None] = []
        for index, layout in enumerate(fixed):
            result = None if layout is None else torch.empty(layout[0], dtype=layout[1])
            if result is not None:
                request.set_output_tensor(index, openvino.Tensor(result.numpy(), shared_memory=True))
            results.append(result)
        request.infer()
        return [_taken(request, i) if r is None else r for i, r in enumerate(results)]

    call.keeps_alive = keep  # type: ignore[attr-defined]
    return call


def _taken(request: Any, index: int) -> torch.Tensor:
    """A copy: the request writes its next result to the same memory."""
    return torch.from_numpy(numpy.array(request.get_output_tensor(index).data))


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    return lines[-1].strip()[:300]
