"""Each step runs code that was written for it: a path of operations at lines that nobody has seen before.

The code is written and compiled by the batch's iterator, which is not timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from benchmarks.new_paths.layers import OPERATIONS, PEAK_LR, Batch, make_program, same

CHOICES = [
    "x.tanh()", "x.sigmoid()", "x.relu()", "x.sin()", "x.cos()", "x.abs()", "x * 0.9", "x + 0.1", "x - x.mean()",
    "x.clamp(-2.0, 2.0)", "x.flip(0)", "x.square() * 0.5",
]  # fmt: skip


def write(number: int, draw: random.Random) -> Callable[[Tensor], Tensor]:
    """Returns function `number`, of which there is no second one."""
    lines = [f"    x = {choice}" for choice in draw.choices(CHOICES, k=OPERATIONS)]
    names: dict[str, Any] = {}
    text = "\n".join([f"def middle_{number}(x):", *lines, "    return x"])
    exec(compile(text, f"<written for step {number}>", "exec"), names)
    function: Callable[[Tensor], Tensor] = names[f"middle_{number}"]
    return function


def build(
    seed: int = 0, *, decorate: Callable[[Any], Any] = same, lr: float | Tensor = PEAK_LR, steps: int = 0
) -> tuple[Callable[[Batch], float], Iterator[Batch], nn.Module]:
    """Returns the training step, the batches, and the model; `steps` is not used, the rate is constant."""
    draw, written = random.Random(seed), []
    step, batches, model = make_program(seed, lr, decorate, lambda x: written[-1](x))

    def with_code() -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            written[:] = [write(number, draw)]
            yield batch

    return step, with_code(), model
