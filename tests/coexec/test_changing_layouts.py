"""Sizes and memory layouts that change together: kernels choose strides by both, meta kernels not always alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch

ROWS = (6, 6, 6, 3, 6, 3, 6, 5, 3, 1, 6, 4, 1, 2)


def transposed_in_some_calls(i: int) -> tuple[torch.Tensor]:
    x = batch(i, ROWS[i])
    return (x.t().contiguous().t() if i > 3 and i % 2 else x,)


def test_batch_norm_of_batches_of_another_size_and_layout() -> None:
    def make() -> Program:
        bn = nn.BatchNorm1d(4)
        return Program(lambda x: bn(x) if x.shape[0] > 1 else x, transposed_in_some_calls, lambda: bn)

    check(make, n=len(ROWS), phase=None, max_fallbacks=9)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: torch.empty_like(x.repeat(1, 2)[:, :4]).fill_(1),
        lambda x: nn.functional.dropout(x.unfold(1, 2, 1).sum(-1).repeat(1, 2)[:, :4], 0.3),
        lambda x: (x.t() + x.t().clone(), x.t().relu(), torch.cat([x.t(), x.t()])),
    ],
)
def test_sizes_that_make_a_slice_dense(body: Callable[[torch.Tensor], Any]) -> None:
    """[rows, 4] of strides (6, 1) is dense for one row only."""
    check(lambda: Program(body, lambda i: (batch(i, ROWS[i]),)), n=len(ROWS), phase=None, max_fallbacks=9)


def test_an_expanded_view_of_memory_that_numpy_owns() -> None:
    """What NumPy may change is copied when it is fed, although no kernel may write an expanded tensor."""
    array = np.zeros((6, 4), np.float32)

    def args(i: int) -> tuple[torch.Tensor]:
        array[:] = batch(i).numpy()
        return (torch.from_numpy(array),)

    def step(x: torch.Tensor) -> Any:
        return x.expand(2, 6, 4).sum(0) * 0.5, x[:, :1].expand(6, 3) + 1, x[1:2, 1:2].expand(2, 2).exp()

    check(lambda: Program(step, args))
