"""A backend's call on the core, wrapped so that it takes and returns what the program does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from coexec.backends.candidates.candidate import CandidateError, Runner
from coexec.backends.candidates.core import Call, Core, Tensors
from coexec.backends.candidates.tensor_file import restride


def framed(name: str, core: Core, call: Call, *, contiguous: bool = False) -> Runner:
    """The program's callable around `call`.

    `contiguous`: inputs are made row-major (after the core's permutation; a copy only where they are not dense).
    Results get eager's strides, by a copy where the backend chose others.
    """
    gather = _gather(core, contiguous)
    check = _number_check(name, core)
    settle = _settle(core)
    finish = core.finish

    def compute(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        results = settle(call(gather(inputs)))
        return tuple(results) if finish is None else finish.forward(*inputs, *results)

    def run(*inputs: Any) -> tuple[Any, ...]:
        check(inputs)
        if not torch.is_grad_enabled():  # where one serves; entering the context costs 2 us
            return compute(inputs)
        with torch.no_grad():
            return compute(inputs)

    return run


def _gather(core: Core, contiguous: bool) -> Callable[[tuple[Any, ...]], list[torch.Tensor]]:
    """Picks the live inputs of the core out of the program's inputs."""
    positions = [core.sources[i] for i in core.live]
    orders = [core.orders[i] for i in core.live]
    plain = all(order is None or list(order) == sorted(order) for order in orders)
    if plain and not contiguous:
        return lambda inputs: [inputs[p] for p in positions]
    if plain:
        return lambda inputs: [inputs[p].contiguous() for p in positions]
    pairs = list(zip(positions, orders, strict=True))
    return lambda inputs: [(inputs[p] if o is None else inputs[p].permute(o)).contiguous() for p, o in pairs]


def _number_check(name: str, core: Core) -> Callable[[tuple[Any, ...]], None]:
    """Numbers are part of a static artifact: another value must not be served by it."""
    if not core.numbers:
        return lambda inputs: None
    positions = [position for position, _ in core.numbers]
    pick, expected = operator.itemgetter(*positions), [value for _, value in core.numbers]
    wanted: Any = expected[0] if len(expected) == 1 else tuple(expected)

    def check(inputs: tuple[Any, ...]) -> None:
        if pick(inputs) != wanted:
            raise CandidateError(name, f"built for the numbers {wanted}, called with {pick(inputs)}")

    return check


def _settle(core: Core) -> Callable[[Tensors], Tensors]:
    """Gives results the strides that eager gives them; nearly always they have them already."""
    expected = [layout.strides for layout in core.outputs]

    def settle(results: Tensors) -> Tensors:
        if all(s is None or r.stride() == s for r, s in zip(results, expected, strict=True)):
            return results
        return [r if s is None else with_strides(r, s) for r, s in zip(results, expected, strict=True)]

    return settle


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """`tensor` with `strides`: itself, a view if only dimensions of one element differ, or a copy."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(size == 1 or actual == wanted for size, actual, wanted in pairs):
        return tensor.as_strided(tensor.shape, strides)
    return restride(tensor, strides)
