"""Is a model's answer right? It is compared with eager's and with a float64 run of the same model.

The bound is the tuner's (`coexec.tuning.verify`): `max(2 x eager's distance, 16 eps x magnitude)` from float64. One
run of eager may lie nearer to float64 than its roundings promise, so where that bound fails, eager's distance is the
largest of a few runs of eager in which the result of every op moves by a unit in its last place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from coexec.tuning.oracle import disturbed
from coexec.tuning.verify import NOISY_RUNS, error_and_bound


class Rounding(TorchDispatchMode):
    """Within the block every op that makes new memory gives its values another last place."""

    def __init__(self, noise: torch.Generator) -> None:
        super().__init__()
        self.noise = noise

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One op; views and writes stay what they are."""
        result = func(*args, **(kwargs or {}))
        aliases = any(value.alias_info is not None for value in (*func._schema.arguments, *func._schema.returns))
        return result if aliases else tree_map(lambda value: disturbed(value, self.noise), result)


def noisy_runs(run: Callable[[], list[Tensor]], count: int = NOISY_RUNS[-1]) -> list[list[Tensor]]:
    """Answers of eager with other roundings; the noise itself is not rounded."""
    noise = torch.Generator().manual_seed(0)
    answers = []
    for _ in range(count):
        with Rounding(noise):
            answers.append(run())
    return answers


def excess_of(
    given: list[Tensor], eager: list[Tensor], exact: list[Tensor], noisy: Sequence[list[Tensor]] = ()
) -> float:
    """How far `given` is from float64, in units of what is allowed; `noisy`: further answers of eager.

    Infinite for other shapes, dtypes, numbers of outputs, or values that are not finite where eager's are.
    """
    if [(x.shape, x.dtype) for x in given] != [(x.shape, x.dtype) for x in eager]:
        return float("inf")
    answers = zip(given, zip(eager, *noisy, strict=True), exact, strict=True)
    return max((_excess(*triple) for triple in answers), default=0.0)


def _excess(given: Tensor, eager: Sequence[Tensor], exact: Tensor) -> float:
    if not given.is_floating_point():
        return 0.0 if torch.equal(given, eager[0]) else float("inf")
    if given.numel() == 0:
        return 0.0
    if not bool((given.isfinite() == eager[0].isfinite()).all()):
        return float("inf")
    bounds = [error_and_bound(given, one, exact) for one in eager]
    distance, allowed = bounds[0][0], max(bound for _, bound in bounds)
    if allowed == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / allowed
