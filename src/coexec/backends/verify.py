"""May this artifact take over? It is run on live inputs and compared with the ops as recorded, in float32 and float64.

Numbers: `|compiled - f64| <= max(2 |eager - f64|, 16 eps max|tensor|)`, each as the largest element of the tensor.
Where that fails, eager's distance is taken from a few more runs of eager in which every op rounds differently: for a
tensor that is all cancellation (the gradient of a bias before BatchNorm) one run of eager says little. Integers and
booleans are equal, except where such a run decides otherwise too. Besides: the geometry that the segment names, results
in memory of their own, inputs untouched (mode ``functional``), publishes in order, and the generator where eager would
leave it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from coexec.backends import publish
from coexec.backends.lower import same_strides
from coexec.backends.reference import (
    NoWideRunError,
    Results,
    copy_memory,
    run_reference,
    run_reference_pair,
)
from coexec.backends.spec import SegmentSpec, Value
from coexec.errors import InternalError

EAGER_FACTOR = 2.0
EPS_FACTOR = 16.0
NOISY_RUNS = (4, 24)
"""Runs of eager with other roundings: the first number, and the second if those do not justify a difference. Many are
needed where a rounding flips a decision (the sign before a ReLU) now and then and moves every gradient behind it."""

NOISY_RUNS_S = 30.0
"""No more noisy runs are started after this time."""

BLOCK_S = 2e-3
TIMING_ROUNDS = 7


@dataclass(slots=True)
class Report:
    """What the check found. `problems` is empty if the artifact may take over."""

    problems: list[str] = field(default_factory=list)
    worst: float = 0.0  # largest error in units of what is allowed
    compared: int = 0  # tensors
    by_noise: list[str] = field(default_factory=list)  # tensors that only the noisy runs of eager justify
    wide: bool = True  # a float64 run was possible
    replay_s: float = 0.0  # median, by this process's Python: the native replay has a few microseconds per op less
    compiled_s: float = 0.0  # median

    @property
    def accepted(self) -> bool:
        """No problem was found."""
        return not self.problems

    @property
    def ratio(self) -> float:
        """Replay's time over the artifact's: above 1 the artifact is faster. 0 if nothing was timed."""
        return self.replay_s / self.compiled_s if self.compiled_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """For meta.json and the worker's answer."""
        return {**asdict(self), "accepted": self.accepted, "ratio": self.ratio}


def load(library: Path) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The artifact as a function of its inputs. Holds the GIL: for checks only."""
    publish.register_publish()  # an artifact that publishes looks for the op when it is loaded
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    return runner.run


def verify(
    spec: SegmentSpec,
    library: Path,
    inputs: Sequence[torch.Tensor],
    generator_state: torch.Tensor | None = None,
    timed: bool = True,
) -> Report:
    """Check the artifact `library` of `spec` on `inputs`, which are left alone; so is this process's generator.

    Args:
        spec: the segment.
        library: its compiled form.
        inputs: live inputs, as the artifact would get them.
        generator_state: of the default CPU generator before the segment; by default as it is now.
        timed: also measure both.

    Raises:
        SpecError: the recorded ops do not do what the segment says.
    """
    return check(spec, load(library), inputs, generator_state, timed)


def check(
    spec: SegmentSpec,
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    generator_state: torch.Tensor | None = None,
    timed: bool = True,
) -> Report:
    """As :func:`verify`, of a function that does what an artifact does."""
    publish.register_publish()
    if spec.publishes and not publish.receives_here():
        raise InternalError("An artifact that publishes can only be checked in a process without the native core.")
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    state = before if generator_state is None else generator_state
    torch.set_num_threads(spec.threads)
    try:
        found = _Check(spec, run, inputs, state)
        found.values()
        if timed and found.report.accepted:
            found.time()
        return found.report
    finally:
        torch.set_rng_state(before)
        torch.set_num_threads(threads)


class _Check:
    """One verification."""

    def __init__(
        self,
        spec: SegmentSpec,
        run: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        state: torch.Tensor,
    ) -> None:
        self.spec, self.run, self.inputs, self.state = spec, run, inputs, state
        self.report = Report()
        self.noisy_runs: list[Results] = []
        self.noise = torch.Generator().manual_seed(0)

    def values(self) -> None:
        """Run both, compare everything."""
        narrow, wide = self.reference()
        after = torch.get_rng_state()
        compiled = self.compiled()
        if compiled is None:
            return
        if not torch.equal(torch.get_rng_state(), after):
            self.problem("the generator is left in another state than by eager")
        for kind in ("outputs", "mutated", "published"):
            triples = zip(getattr(compiled, kind), getattr(narrow, kind), getattr(wide, kind), strict=True)
            for position, (c, n, w) in enumerate(triples):
                self.compare(f"{kind} {position}", c, n, w)

    def reference(self) -> tuple[Results, Results]:
        """The float32 run and the float64 run (or the float32 run twice)."""
        torch.set_rng_state(self.state)
        try:
            return run_reference_pair(self.spec, self.inputs)
        except NoWideRunError:
            self.report.wide = False
        torch.set_rng_state(self.state)
        narrow = run_reference(self.spec, self.inputs, in_place=False)
        return narrow, narrow

    def compiled(self) -> Results | None:
        """The artifact's run, or None if what it returned has the wrong form."""
        spec, inputs = self.spec, copy_memory(self.spec, self.inputs)
        torch.set_rng_state(self.state)
        publish.received.clear()
        returned = self.run(list(inputs))
        received, publish.received[:] = publish.received[:], []
        expected = [spec.values()[v] for v in spec.outputs]
        contents = [spec.input_value(p) for p in spec.mutated] if spec.mode == "functional" else []
        if spec.mode == "functional":
            self.untouched(inputs)
        if [c for c, _ in received] != [p.channel for p in spec.publishes]:
            self.problem(f"published on channels {[c for c, _ in received]}")
            return None
        split, end = len(expected), len(expected) + len(contents)
        if len(returned) < end:  # more are draws that nobody uses
            self.problem(f"returned {len(returned)} tensors, {end} are expected")
            return None
        for position, (tensor, value) in enumerate(zip(returned[:split], expected, strict=True)):
            self.geometry(position, tensor, value)
        for position, (tensor, value) in enumerate(zip(returned[split:end], contents, strict=True), split):
            self.content(position, tensor, value)
        self.apart(returned[:split], returned[split:end], inputs)
        mutated = returned[split:end] if spec.mode == "functional" else [inputs[p] for p in spec.mutated]
        return Results(returned[:split], mutated, [t for _, t in received])

    def untouched(self, inputs: Sequence[torch.Tensor]) -> None:
        for position, (used, original) in enumerate(zip(inputs, self.inputs, strict=True)):
            if not _same_bits(used, original):
                self.problem(f"input {position} was written")

    def geometry(self, position: int, tensor: torch.Tensor, value: Value) -> None:
        """The runtime takes the memory and sees it through the recorded strides: those have to address the same."""
        got = (str(tensor.dtype)[6:], tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        same = (*got[:2], got[3]) == (value.dtype, value.sizes, 0) and same_strides(value.sizes, got[2], value.strides)
        if not same:
            self.problem(f"result {position} is {got}, expected {value.dtype} {value.sizes} {value.strides} at 0")

    def content(self, position: int, tensor: torch.Tensor, value: Value) -> None:
        """What is copied to where it belongs may lie in any layout."""
        got = (str(tensor.dtype)[6:], tuple(tensor.shape))
        if got != (value.dtype, value.sizes):
            self.problem(f"result {position} is {got}, expected {value.dtype} {value.sizes}")

    def apart(
        self, outputs: Sequence[torch.Tensor], contents: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Outputs have memory of their own. Contents may share memory, but not with inputs, which are written."""
        taken = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
        read = taken | {t.untyped_storage().data_ptr() for t in contents if t.numel()}
        for position, tensor in enumerate((*outputs, *contents)):
            address = tensor.untyped_storage().data_ptr()
            if tensor.numel() and address in (read if position < len(outputs) else taken):
                self.problem(f"result {position} shares memory with an input or another result")
            read.add(address)

    def compare(self, name: str, compiled: torch.Tensor, narrow: torch.Tensor, wide: torch.Tensor) -> None:
        """One tensor of the artifact against the float32 and the float64 run."""
        self.report.compared += 1
        if compiled.shape != narrow.shape or compiled.dtype != narrow.dtype:
            return self.problem(f"{name} is {compiled.dtype}{list(compiled.shape)}")
        if not (narrow.is_floating_point() or narrow.is_complex()):
            return self.compare_discrete(name, compiled, narrow)
        unlike = ~_alike_where_not_finite(compiled, narrow)
        if unlike.any():
            return self.problem(f"{name}: {int(unlike.sum())} elements are infinite or NaN only on one side")
        error, allowed = error_and_bound(compiled, narrow, wide)
        for count in NOISY_RUNS if error > allowed else ():
            allowed = max([allowed, *(error_and_bound(compiled, noisy, wide)[1] for noisy in self.noisy(name, count))])
            if error <= allowed:
                self.report.by_noise.append(name)
                break
        self.report.worst = max(self.report.worst, error / allowed if allowed else float(error > 0))
        if error > allowed:
            self.problem(f"{name} is {error:.3g} off the float64 run, allowed are {allowed:.3g}")

    def compare_discrete(self, name: str, compiled: torch.Tensor, narrow: torch.Tensor) -> None:
        wrong = compiled != narrow
        for count in NOISY_RUNS:
            if not wrong.any():
                return
            for noisy in self.noisy(name, count):
                wrong &= noisy == narrow  # an element that eager decides otherwise itself is undecided
        if wrong.any():
            return self.problem(f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ from eager's")
        self.report.by_noise.append(name)

    def noisy(self, name: str, count: int) -> list[torch.Tensor]:
        """The tensor `name` of `count` runs of eager in which every op rounds differently.

        There are fewer if they take long, and none of a segment that raises for such inputs: a probability above 1.
        """
        start = time.perf_counter()
        while len(self.noisy_runs) < count:
            torch.set_rng_state(self.state)
            try:
                self.noisy_runs.append(run_reference(self.spec, self.inputs, in_place=False, noise=self.noise))
            except RuntimeError:
                break
            if time.perf_counter() - start > NOISY_RUNS_S:
                break
        kind, _, position = name.partition(" ")
        return [getattr(results, kind)[int(position)] for results in self.noisy_runs]

    def problem(self, text: str) -> None:
        self.report.problems.append(text)

    def time(self) -> None:
        """Medians of both by turns; calls under 2 ms are timed in blocks."""
        mine, theirs = copy_memory(self.spec, self.inputs), copy_memory(self.spec, self.inputs)
        replay: Callable[[], Any] = lambda: run_reference(self.spec, theirs, in_place=True)  # noqa: E731
        compiled: Callable[[], Any] = lambda: self.run(list(mine))  # noqa: E731
        calls = [_calls_per_block(f) for f in (replay, compiled)]
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(TIMING_ROUNDS):
            for function, count, taken in zip((replay, compiled), calls, times, strict=True):
                taken.append(_block_s(function, count))
        publish.received.clear()
        self.report.replay_s, self.report.compiled_s = median(times[0]), median(times[1])


def error_and_bound(compiled: torch.Tensor, narrow: torch.Tensor, wide: torch.Tensor) -> tuple[float, float]:
    """Largest error of `compiled` against the float64 run, and the largest that is allowed; finite elements only."""
    if compiled.numel() == 0:
        return 0.0, 0.0
    finite = torch.isfinite(narrow) & torch.isfinite(wide)
    zero = torch.zeros((), dtype=wide.dtype)
    target = torch.where(finite, wide, zero)
    error = (torch.where(finite, compiled.to(wide.dtype), zero) - target).abs().max().item()
    eager = (torch.where(finite, narrow.to(wide.dtype), zero) - target).abs().max().item()
    eps = torch.finfo(compiled.dtype).eps
    return error, max(EAGER_FACTOR * eager, EPS_FACTOR * eps * target.abs().max().item())


def _alike_where_not_finite(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(a) & torch.isfinite(b)
    return finite | (a == b) | (torch.isnan(a) & torch.isnan(b))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _block_s(function: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count


def _calls_per_block(function: Callable[[], Any]) -> int:
    function()
    once = _block_s(function, 1)
    return 1 if once >= BLOCK_S else int(BLOCK_S / max(once, 1e-6)) + 1
