"""Does `torch.compile` pay for this module? Found out on its own calls, so that serving is never slower than eager.

Dynamo's guards and wrappers take 10 to 100 us a call, whatever runs behind them: more than a small model computes, and
no tuner sees it, because it times graphs. So a `Gate` stands in front of the compiled module. First calls go through to
Dynamo. Once nothing is compiled or chosen any more, some go to the plain module instead, by turns, and all are timed.
Where plain eager was faster it serves from then on, for inputs of these sizes, and Dynamo is not asked any more. Where
nothing else than eager was chosen there is nothing to compare, and plain eager serves without a trial.

Plain eager is always right, so a verdict that is out of date costs only speed. There is a gate in front of modules, and
for calls with gradients off: of a training step the forward alone would be timed. Of a function under `torch.compile`
the user holds Dynamo's wrapper itself, in front of which nothing can be put.
"""

from __future__ import annotations

import functools
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch._dynamo import eval_frame, trace_rules

from coexec import choose
from coexec.config import settings

Signature = tuple[Any, ...]
ORIGINAL = "_torchdynamo_orig_callable"
"""Dynamo's name, on a wrapper, for what it wraps."""

GATE = "_coexec_gate"
"""Where a gate is found: on its function."""

SETTLED_CALLS = 8  # through Dynamo without any choosing, before the trial; libraries time their own first calls
LEAD_IN_S = 0.015
"""Uncounted at the begin of a turn, one call at least: the other side's threads may still spin. GNU OpenMP's do for 8
to 10 ms after their last work (seen on 2 cores), and take a core from OpenVINO's or ONNX Runtime's."""
COUNTED_S = 0.004
COUNTED_CALLS = 2  # at least, and COUNTED_S
ROUNDS = 9
FIRST_LOOK = 3  # rounds after which the trial ends if all of them say the same, by more than CLEAR
CLEAR = 1.15
TIE = 1.01  # what is compiled must be faster than this, as for the tuner
MAX_SIGNATURES = 64  # of one module: inputs of ever new sizes are not worth a trial each


@dataclass(slots=True)
class Trial:
    """The calls of one module with inputs of the same sizes: says who makes the next call, and finds the verdict."""

    settled: int = 0
    plain: bool = False  # whose turn it is
    led_s: float = -1.0  # of this turn, uncounted; negative: no call yet
    counted: list[float] = field(default_factory=list)  # seconds of this turn's calls
    compiled_s: list[float] = field(default_factory=list)  # per turn, the median call
    plain_s: list[float] = field(default_factory=list)

    def unsettled(self) -> None:
        """Something was compiled or chosen: what was measured before no longer counts."""
        self.settled, self.plain = 0, False
        for seconds in (self.compiled_s, self.plain_s):
            seconds.clear()
        self._next_turn()

    def ended(self, seconds: float) -> bool | None:
        """A call ended normally. Returns whether plain eager is to serve, None as long as that is unknown."""
        if self.settled < SETTLED_CALLS:
            self.settled += 1
            return None
        if self.led_s < LEAD_IN_S:
            self.led_s = max(self.led_s, 0.0) + seconds
            return None
        self.counted.append(seconds)
        if len(self.counted) < COUNTED_CALLS or sum(self.counted) < COUNTED_S:
            return None
        (self.plain_s if self.plain else self.compiled_s).append(statistics.median(self.counted))
        self.plain = not self.plain
        self._next_turn()
        return None if self.plain else self._verdict()

    def _next_turn(self) -> None:
        self.led_s = -1.0
        self.counted.clear()

    def _verdict(self) -> bool | None:
        """After a whole round; ratios above 1 say that what is compiled is faster."""
        ratios = [plain / compiled for plain, compiled in zip(self.plain_s, self.compiled_s, strict=True)]
        if len(ratios) >= ROUNDS:
            return statistics.median(ratios) < TIE
        if len(ratios) >= FIRST_LOOK and (min(ratios) > CLEAR or max(ratios) < 1.0 / CLEAR):
            return min(ratios) < 1.0
        return None

    def __str__(self) -> str:
        compiled_s, plain_s = statistics.median(self.compiled_s), statistics.median(self.plain_s)
        return f"plain eager took {plain_s * 1e3:.4f} ms, through torch.compile {compiled_s * 1e3:.4f} ms, by turns"


class Served(Protocol):
    """What was compiled of a module: one region."""

    @property
    def faster(self) -> bool:
        """Something else than eager runs in it."""


class Gate:
    """In front of one module that is under `torch.compile`."""

    def __init__(self, compiled: Callable[..., Any], note: str) -> None:
        self.compiled, self.note = compiled, note
        self.plain: Callable[..., Any] = getattr(compiled, ORIGINAL)
        self.serves_plain: dict[Signature, bool] = {}  # the verdicts
        self.trials: dict[Signature, Trial] = {}
        self.timing = threading.Lock()
        self.watched: list[weakref.ref[Served]] = []

    def function(self) -> Callable[..., Any]:
        """What is called in the place of `compiled`; Dynamo finds in its attributes what it looks for in those."""
        verdict_of, compiled, plain, timed = self.serves_plain.get, self.compiled, self.plain, self._timed

        @functools.wraps(compiled)
        def gate(*args: Any, **kwargs: Any) -> Any:
            signature = None if torch.is_grad_enabled() else signature_of(args, kwargs)
            if signature is None:
                return compiled(*args, **kwargs)
            serves_plain = verdict_of(signature)
            if serves_plain:
                return plain(*args, **kwargs)
            return compiled(*args, **kwargs) if serves_plain is False else timed(signature, args, kwargs)

        marked: Any = gate
        setattr(marked, GATE, self)
        if hasattr(gate, "_torchdynamo_wrapper_id"):  # by it Dynamo knows a wrapper from what only took its attributes
            marked._torchdynamo_wrapper_id = id(gate)
        return gate

    def watch(self, region: Served) -> None:
        """Verdicts end with what was compiled: after `torch._dynamo.reset()` another choice may be made."""
        # By a weak reference: the module behind this gate would otherwise live until a collection of cycles.
        self.watched.append(weakref.ref(region, functools.partial(_forget, weakref.ref(self))))

    def forget(self, region: weakref.ref[Served]) -> None:
        """What a region made is gone, and with it all verdicts."""
        self.watched.remove(region)
        self.serves_plain.clear()
        self.trials.clear()

    def _only_eager(self) -> bool:
        """None of what was compiled here runs on anything else than eager."""
        regions = [region for reference in self.watched if (region := reference()) is not None]
        return not any(region.faster for region in regions)

    def _timed(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call whose time counts, unless another one is being timed (by another thread, or around this one)."""
        too_many = len(self.trials) >= MAX_SIGNATURES and signature not in self.trials
        if too_many or not _is_default_stance() or not self.timing.acquire(blocking=False):
            return self.compiled(*args, **kwargs)
        try:
            trial = self.trials.setdefault(signature, Trial())
            run, before = self.plain if trial.plain else self.compiled, changes
            start_s = time.perf_counter()
            returned = run(*args, **kwargs)
            seconds = time.perf_counter() - start_s
            self._ended(signature, trial, seconds, changed=before != changes)
            return returned
        finally:
            self.timing.release()

    def _ended(self, signature: Signature, trial: Trial, seconds: float, changed: bool) -> None:
        if changed:
            trial.unsettled()
            return
        serves_plain = trial.ended(seconds)
        if trial.settled == SETTLED_CALLS and self._only_eager():
            self.serves_plain[signature] = True
            choose.count("eager.nothing compiled", f"{self.note}: no graph of it has another backend than eager")
            return
        if serves_plain is None:
            return
        self.serves_plain[signature] = serves_plain
        choose.count("eager.faster than compiled" if serves_plain else "compiled is faster", f"{self.note}: {trial}")


def _forget(gate: weakref.ref[Gate], region: weakref.ref[Served]) -> None:
    if (there := gate()) is not None:
        there.forget(region)


# Where the gate goes --------------------------------------------------------------------------------------------------


def put_gate(note: str, region: Served) -> None:
    """Put a gate in front of the module whose call is being compiled now; nothing happens where there is none.

    Args:
        note: what the module is, for people.
        region: what was compiled; verdicts end with it.
    """
    if settings().keep:
        return
    found = _compiled_module()
    if found is None:
        return
    _stay_out_of_dynamo()
    holder, name = found
    function = holder.__dict__[name]
    gate: Gate | None = getattr(function, GATE, None)
    if gate is None:
        gate = Gate(function, note)
        holder.__dict__[name] = gate.function()
        if isinstance(holder, eval_frame.OptimizedModule):
            _shorten_calls()
    gate.watch(region)


@functools.cache
def _stay_out_of_dynamo() -> None:
    """Compiled code may call a module with a gate, and Dynamo must not compile the gate then."""
    trace_rules.add("coexec.serving")


@functools.cache
def _shorten_calls() -> None:
    """An OptimizedModule for which plain eager serves calls the module at once: its own call takes 2 us more."""
    original = eval_frame.OptimizedModule.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        gate = getattr(self.__dict__.get("forward"), GATE, None)  # None also where the user has put another one there
        if gate is None or self._forward_hooks or self._forward_pre_hooks or torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        if gate.serves_plain.get(signature_of(args, kwargs)):
            return gate.plain(*args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(eval_frame.OptimizedModule, "__call__", call)  # noqa: B010 - mypy takes no assignment to a method


def _compiled_module() -> tuple[torch.nn.Module, str] | None:
    """The module, and its attribute with Dynamo's wrapper, that the innermost compiled call on the stack is of.

    `torch.compile(module)` keeps the wrapper in `forward` of an OptimizedModule, `module.compile()` in an attribute of
    the module itself. The wrapper of a function is nowhere but in the user's hands: None.
    """
    wrapper = _outwards(sys._getframe(1), lambda f: isinstance(f.f_locals.get("self"), eval_frame.OptimizeContext))
    caller = wrapper and _outwards(wrapper.f_back, lambda frame: frame.f_code.co_filename != __file__)
    if wrapper is None or caller is None:
        return None
    module = caller.f_locals.get("self")
    if not isinstance(module, torch.nn.Module):
        return None
    for name in ("forward", "_compiled_call_impl"):
        original = getattr(module.__dict__.get(name), ORIGINAL, None)
        if original is not None and original is wrapper.f_locals.get("fn"):
            return module, name
    return None


def _outwards(frame: FrameType | None, wanted: Callable[[FrameType], bool]) -> FrameType | None:
    """The first frame that is wanted, from `frame` to its callers."""
    while frame is not None and not wanted(frame):
        frame = frame.f_back
    return frame


# What a verdict holds for ---------------------------------------------------------------------------------------------


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature | None:
    """Sizes and types of a call's inputs, on which speed depends; None if there is something else among them."""
    try:
        if kwargs:
            return *map(_part, args), *kwargs, *map(_part, kwargs.values())
        return tuple(map(_part, args))
    except _NotGatedError:
        return None


class _NotGatedError(Exception):
    """An input of a kind that no verdict is found for."""


def _part(value: Any) -> Any:
    kind = type(value)
    if kind is torch.Tensor and value.is_cpu:  # elsewhere a call returns before it has run: no time to be taken
        return value.shape, value.dtype
    if kind in (int, float):
        return kind  # its value seldom decides who is faster, and may change at each call
    if value is None or kind in (bool, str):
        return value
    if kind in (list, tuple):
        return tuple(map(_part, value))
    raise _NotGatedError


changes = 0
"""How often something was compiled or chosen in this process; a call in which that happens tells nothing of speed."""


def changed() -> None:
    """Something was compiled or chosen just now."""
    global changes
    changes += 1


def _is_default_stance() -> bool:
    """Under another one (`torch.compiler.set_stance`; also in a co-executed step) the wrapper may run plain Python."""
    stance = getattr(eval_frame, "_stance", None)
    return stance is None or (stance.stance == "default" and stance.backend is None)


__all__ = ["Gate", "Trial", "changed", "put_gate", "signature_of"]
