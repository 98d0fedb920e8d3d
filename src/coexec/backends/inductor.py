"""Inductor: a lowered segment becomes a shared library that C++ calls without the GIL (AOTInductor).

The graph is already functional and decomposed, so AOTAutograd is skipped: Inductor's joint-graph passes and its inner
compiler run on it directly, as they would on a graph of torch.compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.codecache import CppCodeCache  # noqa: F401  (initializes the code cache before V is used)
from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner, get_cpp_wrapper_config
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

from coexec.backends.divisions import unknown_divisor
from coexec.backends.expressions import NotExpressibleError
from coexec.backends.fed import NotLowerableError
from coexec.backends.guards import guards_of, holds
from coexec.backends.index_errors import raising_indices
from coexec.backends.index_ranges import computed_index
from coexec.backends.layout import prefer_channels_last
from coexec.backends.lower import Symbolic, lower
from coexec.backends.ops import draws
from coexec.backends.publish import check_generated_code, place_publishes, register_publish
from coexec.backends.spec import SegmentSpec
from coexec.backends.symbolic import SymbolicSpec
from coexec.backends.trim import without_input_checks
from coexec.backends.value_checks import op_not_to_be_undone

LOW_PRECISION = frozenset({"float16", "bfloat16"})

AS_USUAL: Mapping[str, Any] = {}
"""No settings but those of :func:`options`: what co-execution compiles while a step runs."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler left in its folder."""

    library: Path  # the .so; the list of custom ops lies beside it under the same name with .json
    code: str  # generated C++ of the wrapper, for checks and for people
    seconds: float  # wall time of lowering and compilation
    facts: dict[str, Any] = field(default_factory=dict)  # small JSON facts: node counts, places of publishes, "code"


def options(spec: SegmentSpec, folder: Path) -> dict[str, Any]:
    """Inductor's settings for this segment."""
    low = any(v.dtype in LOW_PRECISION for v in spec.values().values())
    return {
        "cpp_wrapper": True,
        "aot_inductor.output_path": str(folder / "segment.so"),
        "fallback_random": any(draws(op) for op in spec.ops),  # eager's kernels draw, in program order
        "emulate_precision_casts": low,  # eager rounds to bfloat16 after every op
        "cpp.threads": spec.threads,
        "post_grad_custom_post_pass": _before_scheduling,
        "freezing": False,
        "compile_threads": 1,
    }


def _before_scheduling(graph: Graph) -> None:
    """Our passes over the optimized graph."""
    if config.layout_optimization:
        prefer_channels_last(graph)
    place_publishes(graph)


def compile_segment(spec: SegmentSpec, folder: Path, settings: Mapping[str, Any] = AS_USUAL) -> Compiled:
    """Compile `spec` into `folder`, which exists and is empty.

    Args:
        spec: the segment.
        folder: where the compiler works and leaves the library.
        settings: of `torch._inductor.config`, in place of the usual ones (a variant of the tuner).

    Raises:
        NotLowerableError: an op cannot be compiled, with the reason.
        PublishLostError: the generated code does not publish what the segment says.
        Exception: whatever Inductor or the C++ compiler raises.
    """
    return _compile(spec, folder, None, settings)


def compile_symbolic(spec: SymbolicSpec, folder: Path, settings: Mapping[str, Any] = AS_USUAL) -> Compiled:
    """Compile a segment for many sizes. `facts["guards"]` of the result says for which it is valid.

    Arguments as for :func:`compile_segment`.

    Raises:
        NotExpressibleError: what the compiler assumed of sizes cannot be checked, or not all observed ones satisfy it.
        Exception: as :func:`compile_segment`.
    """
    symbolic = Symbolic(spec)
    compiled = _compile(spec.observed[0], folder, symbolic, settings)
    guards = guards_of(symbolic.env, symbolic.numbers)
    for at in zip(*spec.values, strict=True):
        if not holds(guards, at):
            raise NotExpressibleError(f"code compiled at sizes {spec.hints} is not valid at {at}, which were seen too")
    compiled.facts["guards"] = guards
    return compiled


def _compile(spec: SegmentSpec, folder: Path, symbolic: Symbolic | None, settings: Mapping[str, Any]) -> Compiled:
    start = time.perf_counter()
    refuse_what_cannot_be_undone(spec, symbolic is not None)
    register_publish()
    with config.patch({**options(spec, folder), **settings}):
        graph = lower(spec, select_decomp_table(), symbolic)
        nodes = len(graph.graph.nodes)
        library = Path(_compile_graph(graph))
    code = next(folder.glob("*.wrapper.cpp")).read_text()
    places = check_generated_code(code, [p.channel for p in spec.publishes], _adopt_custom_ops(folder, library))
    facts = {"nodes": nodes, "publish_places": places, "code": _digest_of_code(code, folder)}
    return Compiled(library, code, time.perf_counter() - start, facts)


def refuse_what_cannot_be_undone(spec: SegmentSpec, any_size: bool) -> None:
    """Errors: NotLowerableError where the segment could fail in its middle when it has written memory of the user."""
    if spec.mode != "commit":
        return
    if op := computed_index(spec, any_size):
        raise NotLowerableError(
            op.op, "its index is computed in a segment that writes in place, and may be out of range"
        )
    if op := unknown_divisor(spec, any_size):
        raise NotLowerableError(op.op, "its integer divisor may be zero in a segment that writes in place")
    if op := op_not_to_be_undone(spec):
        raise NotLowerableError(op.op, "its kernel may raise in a segment that writes in place")


def _digest_of_code(code: str, folder: Path) -> str:
    """The same for libraries that are the same: the compiler's commands, which name the kernels' files by the digest of
    their content, stand at the end of the wrapper. Only the folder differs from one compilation to the next."""
    return hashlib.sha256(code.replace(str(folder), "").encode()).hexdigest()


def _adopt_custom_ops(folder: Path, library: Path) -> dict[str, Any]:
    """Put the list of custom ops where the loader looks for it, and return it."""
    listing = next(folder.glob("*.wrapper.json"), None)
    if listing is None:
        return {}
    shutil.copyfile(listing, library.with_suffix(".json"))
    serialized: dict[str, Any] = json.loads(listing.read_text())
    return serialized


def _compile_graph(graph: GraphModule) -> str:
    """Run Inductor on a functional graph over fake tensors; return the library's path."""
    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    with _compiling(inputs[0].fake_mode if inputs else None):
        graph = _recursive_joint_graph_passes(graph, input_device=torch.device("cpu"))
        output = next(iter(reversed(graph.graph.nodes)))
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        artifact: Any = compile_fx_inner(
            graph,
            inputs,
            static_input_idxs=(),
            cudagraphs=BoxedBool(False),
            is_inference=True,
            boxed_forward_device_index=BoxedDeviceIndex(None),
            cpp_wrapper=True,
        )
    return str(artifact.filename)


@contextlib.contextmanager
def _compiling(fake_mode: Any) -> Iterator[None]:
    """The surroundings that Inductor's inner compiler expects in AOT mode."""
    with (
        torch.no_grad(),
        config.patch(get_cpp_wrapper_config()),
        V.set_aot_compilation(True),
        V.set_fake_mode(fake_mode),
        tracing(TracingContext(fake_mode)),
        without_input_checks(),
        raising_indices(),
    ):
        yield
