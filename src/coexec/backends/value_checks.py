"""Checks of values that eager's kernels make, and the compiler's decompositions leave out (seen: torch 2.13).

Each becomes one number that nobody uses, behind an integer division by "all is right": a kernel raises behind its loops
where it divided by zero. The segment is then replayed, and the op raises eager's error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from coexec.backends.ops import Overload, resolve
from coexec.backends.spec import Op, SegmentSpec

Named = dict[str, Any]


def note_unless_right(overload: Overload, named: Named) -> torch.Tensor | None:
    """A number whose computation raises if the op would; None for an op that is not looked at here."""
    check = CHECKS.get(overload.base.removesuffix("_"))
    if check is None:
        return None
    right = check(named).to(torch.int64)
    return torch.div(torch.ones_like(right), right, rounding_mode="floor")


def op_not_to_be_undone(spec: SegmentSpec) -> Op | None:
    """The first op of a segment that may not raise where the segment writes in place.

    A loss may: what is written because of it comes later, so that a step with a loss like that is worth compiling. (Its
    error has the compiler's words then, and statistics that a layer before it has updated may be those from before.)
    """
    return next((op for op in spec.ops if resolve(op.op).base.removesuffix("_") in CHECKS.keys() - LOSSES), None)


def _probabilities(named: Named) -> torch.Tensor:
    """All of them are; NaN is none."""
    x: torch.Tensor = named["self"]
    target: torch.Tensor = named["target"]
    return ((x >= 0) & (x <= 1) & (target >= 0) & (target <= 1)).all()


def _enough(named: Named) -> torch.Tensor:
    """The source has as many elements as the mask has set."""
    mask: torch.Tensor = named["mask"]
    source: torch.Tensor = named["source"]
    return mask.expand_as(named["self"]).sum() <= source.numel()


CHECKS: dict[str, Callable[[Named], torch.Tensor]] = {
    "binary_cross_entropy": _probabilities,
    "masked_scatter": _enough,
}
"""By the op's name without the underscore of what works in place: is all right? bool[]"""

LOSSES = frozenset({"binary_cross_entropy"})
