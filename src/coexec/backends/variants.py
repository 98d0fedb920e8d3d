"""Ways to compile a segment that co-execution does not try while a step runs: the tuner does, offline.

A variant is the same AOTInductor library for the same runtime, with other settings of the compiler. Each stands for one
decision of Inductor that a cost model makes, and makes wrongly for some segments. One that cannot change a segment says
so before it is compiled.

Left out on purpose, for the CPU backend of torch 2.13: `mm` and `addmm` by templates and prepacked weights (only for
frozen weights), unsafe mathematics (a check on some inputs says nothing of infinities on others), and what is for GPUs.

Another package adds its own with an entry point::

    [project.entry-points."coexec.segment_variants"]
    mine = "mypackage.variants:variants"    # () -> Iterable[Variant]
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from coexec.backends.candidates.candidate import Availability, CandidateError
from coexec.backends.index_ranges import takes_indices
from coexec.backends.segment_program import SegmentProgram
from coexec.backends.spec import SegmentSpec
from coexec.backends.symbolic import SymbolicSpec

log = logging.getLogger("coexec.backends")

ENTRY_POINTS = "coexec.segment_variants"

USUAL = "coexec-segment"
"""The library as it is compiled while a step runs: what the others are measured against."""

REPLAY = f"{USUAL}-replay"
"""No library: the recorded ops."""

LIBRARY, CUSTOM_OPS = "segment.so", "segment.json"

CODE = "code"
"""Fact of a compiled segment: digest of the generated code, and of how it was compiled."""

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Takes a segment's inputs in order; returns what an artifact returns."""


class Variant(Protocol):
    """One way to run a segment."""

    @property
    def name(self) -> str:
        """Stored in decisions: "coexec-segment-" and letters, digits and dashes."""

    @property
    def bakes_constants(self) -> bool:
        """Never: a segment's parameters are inputs. (Asked of every candidate.)"""

    def availability(self) -> Availability:
        """Whether it can make a difference on this machine. Cheap."""

    def options_in_key(self) -> Mapping[str, object]:
        """Plain JSON: whatever changes the library."""

    def build(self, program: SegmentProgram, folder: Path) -> Mapping[str, Any]:
        """Compile into `folder` (exists, empty); return plain JSON facts, those of the usual library among them.

        Errors: CandidateError if it cannot change this segment; whatever the compiler raises.
        """

    def load(self, program: SegmentProgram, number: int, folder: Path) -> Run:
        """What runs observation `number` of the segment."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A library made with some settings of the compiler."""

    name: str
    why: str = ""  # what it changes, and when that is faster
    settings: Mapping[str, Any] = field(default_factory=dict)  # of torch._inductor.config
    needs: tuple[str, ...] = ()  # beginnings of op names, one of which a segment must have
    refusal: Callable[[SegmentSpec], str] = lambda spec: ""  # why it cannot change this segment
    machine: Callable[[], str] = lambda: ""  # why it cannot change anything here

    @property
    def bakes_constants(self) -> bool:
        return False

    def availability(self) -> Availability:
        reason = self.machine()
        return Availability(not reason, reason=reason)

    def options_in_key(self) -> Mapping[str, object]:
        return dict(self.settings)

    def build(self, program: SegmentProgram, folder: Path) -> Mapping[str, Any]:
        from coexec.backends.inductor import compile_segment, compile_symbolic

        if reason := self.why_not(program.observed[0].spec):
            raise CandidateError(self.name, reason)
        spec = program.spec
        with tempfile.TemporaryDirectory(prefix=".compile-", dir=folder.parent) as scratch:
            if isinstance(spec, SymbolicSpec):
                compiled = compile_symbolic(spec, Path(scratch), self.settings)
            else:
                compiled = compile_segment(spec, Path(scratch), self.settings)
            shutil.copyfile(compiled.library, folder / LIBRARY)
            if (custom_ops := compiled.library.with_suffix(".json")).exists():
                shutil.copyfile(custom_ops, folder / CUSTOM_OPS)
        # Live inputs come with the step that is to use it.
        return {"verified": False, "compile_s": compiled.seconds, **compiled.facts}

    def load(self, program: SegmentProgram, number: int, folder: Path) -> Run:
        from coexec.backends.verify import load

        return load(folder / LIBRARY)

    def why_not(self, spec: SegmentSpec) -> str:
        """Why this segment would be compiled as usual; "" if it may not be."""
        if self.needs and not any(op.op.startswith(self.needs) for op in spec.ops):
            return f"it changes nothing: the segment has none of {', '.join(self.needs)}"
        return self.refusal(spec)


@dataclass(frozen=True, slots=True)
class Replay:
    """The recorded ops, run by Python here and by the native core in a step, which is faster by microseconds per op.

    So where it is faster than every library here, it is there; where it is not, the step's own trial finds out.
    """

    name: str = REPLAY
    bakes_constants: bool = False

    def availability(self) -> Availability:
        return Availability(True)

    def options_in_key(self) -> Mapping[str, object]:
        return {}

    def build(self, program: SegmentProgram, folder: Path) -> Mapping[str, Any]:
        return {}

    def load(self, program: SegmentProgram, number: int, folder: Path) -> Run:
        from coexec.backends import publish
        from coexec.backends.reference import run_reference

        spec = program.observed[number].spec

        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            results = run_reference(spec, inputs)
            channels = (entry.channel for entry in spec.publishes)
            publish.received.extend(zip(channels, results.published, strict=True))
            return [*results.outputs, *(results.mutated if spec.mode == "functional" else ())]

        return run


def variants() -> dict[str, Variant]:
    """Everything that the tuner tries on a segment by name, in its order; without the usual library."""
    found: dict[str, Variant] = {}
    for variant in (*BUILT_IN, *_registered()):
        if variant.name in found or not variant.name.startswith(f"{USUAL}-"):
            log.warning("segment variant %r is left out: a name begins with %s- and is taken once", variant.name, USUAL)
        else:
            found[variant.name] = variant
    return found


def get(name: str) -> Variant:
    """The variant called `name`, the usual library among them. Errors: CandidateError."""
    found = USUALLY if name == USUAL else variants().get(name)
    if found is None:
        raise CandidateError(name, f"no such variant of a segment. Known: {', '.join(variants())}.")
    return found


@functools.cache
def _registered() -> tuple[Variant, ...]:
    """What other packages offer; a broken one must not take the others down."""
    found: list[Variant] = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            found += point.load()()
        except Exception as error:
            log.warning("entry point %s of %s is skipped: %r", point.name, ENTRY_POINTS, error)
    return tuple(found)


# What comes with coexec -----------------------------------------------------------------------------------------------


def _no_wide_vectors() -> str:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "" if wide else "this processor has no vectors of 512 bits, so none are used anyway"


def _one_thread(spec: SegmentSpec) -> str:
    return "it changes nothing: the segment runs with one thread" if spec.threads == 1 else ""


def _indices(spec: SegmentSpec) -> str:
    found = next((op.op for op in spec.ops if takes_indices(op.op)), None)
    return f"an index of {found} that is out of range would end the process in a generated product" if found else ""


USUALLY = Compiled(USUAL)

BUILT_IN: tuple[Variant, ...] = (
    Compiled(
        f"{USUAL}-simd256",
        "vectors of 256 bits: shorter tails of short rows, and processors that slow down at 512",
        {"cpp.simdlen": 256},
        machine=_no_wide_vectors,
    ),
    Compiled(
        f"{USUAL}-contiguous",
        "no channels-last memory: with few channels the conversions cost more than the convolutions gain",
        {"layout_optimization": False},
        needs=("aten::convolution", "aten::_convolution", "aten::mkldnn_convolution"),
    ),
    Compiled(
        f"{USUAL}-recompute",
        "values are computed again instead of stored, up to larger expressions: less memory traffic in chains",
        {
            "realize_reads_threshold": 16,
            "realize_cpu_opcount_threshold": 200,
            "realize_cpu_acc_reads_threshold": 48,
        },
    ),
    Compiled(
        f"{USUAL}-apart",
        "unrelated loops are not run side by side: fewer streams of memory at a time (optimizers over many parameters)",
        {"cpp.max_horizontal_fusion_size": 1},
    ),
    Compiled(
        f"{USUAL}-together",
        "many more loops in one parallel region: fewer barriers between threads",
        {"cpp.max_horizontal_fusion_size": 256, "max_fusion_size": 512},
    ),
    Compiled(
        f"{USUAL}-coarse",
        "a loop is divided among threads only if each gets 4096 elements (512 as usual): small ones wait for nobody",
        {"cpp.min_chunk_size": 4096},
        refusal=_one_thread,
    ),
    Compiled(
        f"{USUAL}-templates",
        "batched matrix products by generated kernels with what follows fused in, where they beat the library's",
        {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP,ATEN"},
        needs=("aten::bmm", "aten::baddbmm", "aten::matmul", "aten::einsum"),
        refusal=_indices,
    ),
    Compiled(
        f"{USUAL}-fma",
        "products and sums become one instruction, which rounds once; checked against float64 as all others are",
        {"cpp.enable_floating_point_contract_flag": "fast"},
    ),
    Replay(),
)
