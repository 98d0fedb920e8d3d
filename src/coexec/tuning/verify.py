"""May this candidate stand for eager? Its answers are compared with eager's and with a float64 run of the same graph.

Numbers: `|candidate - f64| <= max(2 |eager - f64|, 16 eps max|tensor|)`, each as the largest element of the tensor.
Where that fails, eager's distance is taken from a few more runs of eager in which every op rounds differently. Integers
and booleans are equal, except where such a run decides otherwise too. Besides: dtype, sizes and strides as eager's,
results in memory of their own and left alone by later calls, inputs untouched, the generator as eager leaves it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from coexec.backends.candidates.candidate import Runner
from coexec.backends.candidates.program import Program
from coexec.tuning.oracle import NoWideRunError, Outputs, run_narrow, run_pair

EAGER_FACTOR = 2.0
EPS_FACTOR = 16.0
QUICK_EPS_FACTOR = 4.0
NOISY_RUNS = (4, 24)
"""Runs of eager with other roundings: the first number, and the second if those do not justify a difference."""

NOISY_RUNS_S = 30.0
"""No more noisy runs are started after this time."""

CALLS = 3
"""Calls per set of inputs: some runtimes compile or specialize on the second one, some reuse their result's memory."""


@dataclass(slots=True)
class Report:
    """What the check found. `problems` is empty if the candidate may serve."""

    problems: list[str] = field(default_factory=list)
    worst: float = 0.0  # largest error in units of what is allowed
    compared: int = 0  # tensors
    by_noise: int = 0  # tensors that only the noisy runs of eager justify
    wide: bool = True  # a float64 run was possible

    @property
    def accepted(self) -> bool:
        """No problem was found."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """For the child's answer."""
        return {**asdict(self), "accepted": self.accepted}


def verify(program: Program, run: Runner, input_sets: Sequence[Sequence[Any]]) -> Report:
    """Check `run` on every set of inputs, several calls each. This process's generator is left as it was."""
    report = Report()
    with _generator_kept():
        earlier: list[tuple[Outputs, Outputs]] = []  # (returned, copies): later calls must leave results alone
        for inputs in input_sets:
            check = _Check(program, inputs, report)
            for number in range(CALLS):
                if report.accepted:
                    returned = check.call(run, compare=number in (0, CALLS - 1))
                    check.new(returned, earlier)
                    earlier.append((returned, _copies(returned)))
        if report.accepted and not all(_same(now, then) for now, then in earlier):
            report.problems.append("a later call changed what an earlier one had returned")
    return report


def verify_quickly(program: Program, run: Runner, inputs: Sequence[Any]) -> Report:
    """One call on live inputs, as when an artifact is installed: float64 is asked only where eager is not close."""
    report = Report()
    with _generator_kept():
        _Check(program, inputs, report, quick=True).call(run)
    return report


class _Check:
    """One set of inputs. The runs of eager are made once and kept."""

    def __init__(self, program: Program, inputs: Sequence[Any], report: Report, quick: bool = False) -> None:
        self.program, self.inputs, self.report, self.quick = program, list(inputs), report, quick
        self.state = torch.get_rng_state()
        self.eager = run_narrow(program, self.inputs)
        self.state_after = torch.get_rng_state()
        self.pair: tuple[Outputs, Outputs] | None = None
        self.noisy_runs: list[Outputs] = []
        self.noise = torch.Generator().manual_seed(0)

    def call(self, run: Runner, compare: bool = True) -> Outputs:
        """Call the candidate once on copies of the inputs and compare everything."""
        static = set(self.program.static_inputs)  # bound when it was loaded: the very tensors go in
        given = [v if i in static else _copy(v) for i, v in enumerate(self.inputs)]
        versions = [_version(v) for v in given]
        torch.set_rng_state(self.state)
        with torch.no_grad():
            returned: object = run(*given)  # whatever a backend's code gives
        if not torch.equal(torch.get_rng_state(), self.state_after):
            self.problem("the random number generator is left in another state than by eager")
        if not isinstance(returned, tuple) or len(returned) != len(self.eager):
            self.problem(f"it returned {_described(returned)}, {len(self.eager)} outputs are expected")
            return ()
        self.untouched(given, versions)
        self.apart(returned, given)
        for position, (mine, theirs) in enumerate(zip(returned, self.eager, strict=True)):
            if self.geometry(position, mine, theirs) and compare:
                self.compare(position, mine, theirs)
        return returned

    def untouched(self, given: Sequence[Any], versions: Sequence[int]) -> None:
        """No input was written: by its version, and (written behind torch's back) by its content."""
        for position, (used, original, version) in enumerate(zip(given, self.inputs, versions, strict=True)):
            written = _version(used) != version or (used is not original and not _equal(used, original))
            if written:
                self.problem(f"input {position} was written")

    def apart(self, returned: Outputs, given: Sequence[Any]) -> None:
        """Results share memory with inputs only where eager's do: the caller may write into them."""
        taken = {_address(v) for v in given}
        eager_taken = {_address(v) for v in self.inputs}
        for position, (mine, theirs) in enumerate(zip(returned, self.eager, strict=True)):
            if _address(mine) in taken - {0} and _address(theirs) not in eager_taken:
                self.problem(f"output {position} shares memory with an input")

    def new(self, returned: Outputs, earlier: Sequence[tuple[Outputs, Outputs]]) -> None:
        """No result is one of an earlier call, which its caller may have written into."""
        handed_out = {_address(value) for values, _ in earlier for value in values}
        known = {_address(value) for value in (*self.inputs, *self.eager)}  # eager returns constants as they are, too
        for position, mine in enumerate(returned):
            if _address(mine) in handed_out - known - {0}:
                self.problem(f"output {position} is in the memory of what an earlier call had returned")

    def geometry(self, position: int, mine: Any, theirs: Any) -> bool:
        """Whether an output has eager's form; a difference is a problem."""
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            got, expected = _form(mine), _form(theirs)
        else:
            got, expected = (type(mine).__name__, str(mine)), (type(theirs).__name__, str(theirs))
        if got != expected:
            self.problem(f"output {position} is {got}, eager's is {expected}")
        return got == expected and isinstance(mine, torch.Tensor)

    def compare(self, position: int, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """One tensor of the candidate against eager's and the float64 run's."""
        self.report.compared += 1
        if not (theirs.is_floating_point() or theirs.is_complex()):
            return self.compare_discrete(position, mine, theirs)
        unlike = int((~_alike_where_not_finite(mine, theirs)).sum())
        if unlike:
            return self.problem(f"output {position}: {unlike} elements are infinite or NaN only on one side")
        if self.quick and _close(mine, theirs):
            return None
        wide = self.wide()[1][position]
        error, allowed = error_and_bound(mine, theirs, wide)
        for count in NOISY_RUNS if error > allowed else ():
            bounds = (error_and_bound(mine, noisy[position], wide)[1] for noisy in self.noisy(count))
            allowed = max([allowed, *bounds])
            if error <= allowed:
                self.report.by_noise += 1
                break
        self.report.worst = max(self.report.worst, error / allowed if allowed else float(error > 0))
        if error > allowed:
            self.problem(f"output {position} is {error:.3g} off the float64 run, allowed are {allowed:.3g}")

    def compare_discrete(self, position: int, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        wrong = mine != theirs
        for count in NOISY_RUNS:
            if not wrong.any():
                return
            for noisy in self.noisy(count):
                wrong &= noisy[position] == theirs  # an element that eager decides otherwise itself is undecided
        if wrong.any():
            return self.problem(f"output {position}: {int(wrong.sum())} of {wrong.numel()} elements differ")
        self.report.by_noise += 1

    def wide(self) -> tuple[Outputs, Outputs]:
        """The float32 run and the float64 run (or the float32 run twice)."""
        if self.pair is None:
            torch.set_rng_state(self.state)
            try:
                self.pair = run_pair(self.program, self.inputs)
            except NoWideRunError:
                self.report.wide = False
                self.pair = self.eager, self.eager
        return self.pair

    def noisy(self, count: int) -> list[Outputs]:
        """`count` runs of eager in which every op rounds differently."""
        start_s = time.perf_counter()
        while len(self.noisy_runs) < count:
            torch.set_rng_state(self.state)
            self.noisy_runs.append(run_narrow(self.program, self.inputs, noise=self.noise))
            if time.perf_counter() - start_s > NOISY_RUNS_S:
                break
        return self.noisy_runs

    def problem(self, text: str) -> None:
        self.report.problems.append(text)


def error_and_bound(mine: torch.Tensor, eager: torch.Tensor, wide: torch.Tensor) -> tuple[float, float]:
    """Largest error of `mine` against the float64 run, and the largest that is allowed; finite elements only."""
    if mine.numel() == 0:
        return 0.0, 0.0
    kind = torch.complex128 if wide.is_complex() else torch.float64
    finite = torch.isfinite(eager) & torch.isfinite(wide)
    zero = torch.zeros((), dtype=kind)
    target = torch.where(finite, wide.to(kind), zero)
    error = (torch.where(finite, mine.to(kind), zero) - target).abs().max().item()
    eager_error = (torch.where(finite, eager.to(kind), zero) - target).abs().max().item()
    eps = torch.finfo(mine.dtype).eps
    return error, max(EAGER_FACTOR * eager_error, EPS_FACTOR * eps * target.abs().max().item())


def _close(mine: torch.Tensor, eager: torch.Tensor) -> bool:
    """Within a few roundings of the tensor's largest element: no float64 run could find fault with it."""
    if mine.numel() == 0:
        return True
    finite = torch.isfinite(eager)
    zero = torch.zeros((), dtype=eager.dtype)
    difference = (torch.where(finite, mine - eager, zero)).abs().max().item()
    largest = torch.where(finite, eager, zero).abs().max().item()
    return bool(difference <= QUICK_EPS_FACTOR * torch.finfo(mine.dtype).eps * largest)


def _alike_where_not_finite(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(a) & torch.isfinite(b)
    return finite | (a == b) | (torch.isnan(a) & torch.isnan(b))


def _form(tensor: torch.Tensor) -> tuple[str, ...]:
    """dtype, sizes, strides as far as they mean something (a dimension of size 1 may have any stride), and whether
    autograd takes it."""
    strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1] if tensor.numel() else []
    kind = ("inference tensor",) if tensor.is_inference() else ()
    return str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape)), f"strides {strides}", *kind


def _same(now: Outputs, then: Outputs) -> bool:
    return all(_equal(a, b) for a, b in zip(now, then, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def _copies(values: Sequence[Any]) -> Outputs:
    return tuple(_copy(value) for value in values)


def _copy(value: Any) -> Any:
    """A copy with the same strides, overlapping ones included."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or not value.numel():
        return value.detach().clone()
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    flat = torch.as_strided(value.detach(), (span,), (1,)).clone()
    return flat.as_strided(value.shape, value.stride())


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _address(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) and value.numel() else 0


def _described(returned: object) -> str:
    size = f" of {len(returned)}" if isinstance(returned, list | tuple) else ""
    return f"a {type(returned).__name__}{size}"


class _generator_kept:  # noqa: N801  (reads as a statement)
    """The default generator is afterwards what it was before."""

    def __enter__(self) -> None:
        self._state = torch.get_rng_state()

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._state)
