"""What a random step program finds around it, and the Program that runs it."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import random
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

from tests.coexec.harness import Program
from tests.coexec.programs import batch
from tests.oracles.writer import Block, Writer, render

WATCHED = ("w", "c", "buf", "scratch", "held", "log", "text", "calls", "arr", "memo", "opt", "net", "bn")


class Scale(torch.autograd.Function):
    """x * factor; its backward keeps a Python number on `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = float(factor)
        ctx.save_for_backward(x)
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.factor + 0 * x.detach(), None


class Overwrite(torch.autograd.Function):
    """Doubles its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2


class Pair(NamedTuple):
    """Two values."""

    first: Any
    second: Any


def slow(x: torch.Tensor) -> torch.Tensor:
    """x, after much work for the graph: Python is far ahead of it for the rest of the step."""
    big = x.detach().mean() + torch.ones(96, 96)
    for _ in range(4):
        big = torch.tanh(big @ big)
    result: torch.Tensor = x + big[0, 0] * 0.001
    return result


def source_of(seed: int) -> Block:
    """Random program number `seed`."""
    return Writer(seed).program()


def maker(program: Block, seed: int) -> Callable[[], Program]:
    """Returns the `make` of a program. `seed` also chooses the optimizer and the sizes of the batches.

    Raises:
        SyntaxError: the shrinker took out too much.
    """
    source = render(program)
    code = compile(source, f"<program {seed}>", "exec")

    def make() -> Program:
        scope = _scope(seed, "opt.step(closure)" in source)
        return Program(_step(code, scope), _batches(seed), lambda: [scope[k] for k in WATCHED])

    return make


def _step(code: CodeType, scope: dict[str, Any]) -> Callable[..., Any]:
    exec(code, scope)
    step: Callable[..., Any] = scope["step"]
    return step


def _batches(seed: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Returns what gives call `i` its arguments x and y, each [rows, 4]; how they lie in memory goes by seed."""
    data = batch(seed, 64)  # rows are cut out of it
    buffer = np.zeros((12, 4), np.float32)  # refilled for each call

    def arguments(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = _rows(seed, i)
        kind = seed // 8 % 6
        if kind < 3:
            return batch(i, rows), batch(i + 50, rows)
        if kind == 3:  # moving slices of one tensor; they may overlap
            return data[i : i + rows], data[2 * i : 2 * i + rows]
        if kind == 4:  # memory that NumPy owns
            buffer[:] = batch(i, 12).numpy()
            return torch.from_numpy(buffer[:rows]), torch.from_numpy(buffer[6 : 6 + rows])
        x = batch(i, rows)
        return (x, x) if i % 2 else (x, batch(i + 50, rows).t().contiguous().t())

    return arguments


def _rows(seed: int, i: int) -> int:
    """Batches of one size, with a smaller last one, or of any size."""
    kind = seed % 8
    return 6 if kind < 4 else (3 if i % 5 == 4 else 6) if kind < 6 else random.Random(seed * 1000 + i).randint(1, 6)


def _scope(seed: int, closure: bool) -> dict[str, Any]:
    """The names that programs use besides their own."""
    w, c = nn.Parameter(torch.full((4,), 0.5)), nn.Parameter(torch.zeros(4))
    opt = _optimizer(seed, [w, c], closure)
    scope: dict[str, Any] = {m.__name__: m for m in (torch, contextlib, copy, functools, pickle, random)}
    scope |= {"np": np, "F": nn.functional, "Pair": Pair, "Scale": Scale, "Overwrite": Overwrite, "slow": slow}
    scope |= {"w": w, "c": c, "m": torch.eye(4) * 0.5, "opt": opt}
    scope["sched"] = torch.optim.lr_scheduler.StepLR(opt, 3, 0.9)
    scope["net"] = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4))
    scope["bn"] = nn.BatchNorm1d(4)
    scope["gen"] = torch.Generator().manual_seed(seed)
    scope |= {"buf": torch.zeros(4), "scratch": torch.zeros(6, 4), "arr": np.zeros(4, np.float32)}
    return scope | {"held": [torch.zeros(6, 4)], "log": [], "text": [], "calls": [0], "memo": {}, "handles": []}


def _optimizer(seed: int, weights: list[nn.Parameter], closure: bool) -> torch.optim.Optimizer:
    kinds: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.SGD(weights, lr=0.1, momentum=0.5),
        lambda: torch.optim.AdamW(weights, lr=0.01),
        lambda: torch.optim.Adam(weights, lr=0.01, foreach=True),
        lambda: torch.optim.RMSprop(weights, lr=0.01),
        lambda: torch.optim.NAdam(weights, lr=0.01),
        lambda: torch.optim.Adam(weights, lr=0.01, fused=True),
        lambda: torch.optim.Adagrad(weights, lr=0.05, foreach=False),
    ]
    if closure and seed % 2:
        return torch.optim.LBFGS(weights, lr=0.1, max_iter=3)
    return kinds[seed % len(kinds)]()
