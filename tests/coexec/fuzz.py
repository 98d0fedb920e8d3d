"""Random step programs as Python source: views, in-place writes, branches, loops, reads, backward passes, updates."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.coexec.harness import Program
from tests.coexec.programs import batch

PURE = (
    "{a} + {b}",
    "{a} * {b}",
    "{a} - {b} * 0.5",
    "torch.tanh({a})",
    "{a}.sigmoid()",
    "{a} @ {a}.t() @ {b}",
    "{a}.clone()",
    "{a}.relu() + 0.1",
    "{a} / ({b}.abs() + 1)",
    "{a}.softmax(1)",
    "{a}.cumsum(0) * 0.2",
    "torch.where({a} > 0, {a}, {b})",
    "{a} - {a}.mean(0, keepdim=True)",
    "torch.cat([{a}[:3], {b}[3:]])",
    "torch.stack([{a}, {b}]).mean(0)",
    "F.dropout({a}, 0.3)",
    "{a} + torch.rand(6, 4)",
    "{a} * w + c",
    "F.linear({a}, m, c)",
    "F.layer_norm({a}, (4,))",
    "{a}.view(4, 6).t().contiguous().view(6, 4)",
    "{a}.flip(0)",
    "{a}.detach()",
    "{a}.t().contiguous().t()",
    "{a}.masked_fill({b} > 0.5, 0.25)",
    "{a}[torch.randperm(6)]",
    "{a} * {s}",
    "torch.full_like({a}, {s})",
    "{a}.double().exp().clamp(max=3).float()",
    "{a}.index_select(0, torch.tensor([5, 4, 3, 2, 1, 0]))",
    "{a} + buf",
    "held[-1] * 0.5 + {a}",
    "torch.outer({a}[:, 0], {b}[0])",
    "{a}.expand(2, 6, 4).sum(0) * 0.5",
)
"""Expressions of shape [6, 4]; `a`, `b` are such tensors, `s` is a Python number."""

IN_PLACE = (
    "{d}.add_({s})",
    "{d}.mul_(0.5)",
    "{d}[1:].copy_({a}[:-1].detach().clone())",
    "{d}[:, 0] = {a}[:, 1].detach()",
    "{d}.t().add_(0.1)",
    "{d}.view(-1)[3:9].zero_()",
    "{d}.clamp_(-2, 2)",
    "{d}[{d} > 1] = 0.5",
    "torch._foreach_mul_([{d}, scratch], 0.9)",
    "{d}.detach().add_(0.25)",
    "{d}.data.mul_(0.9)",
    "buf.mul_(0.9).add_({a}.detach().mean(0), alpha=0.1)",
    "buf[1:3] += {s}",
    "scratch.copy_({a}.detach())",
    "held.append({a}.detach()); del held[:-3]",
    "held[-1].add_(0.01)",
    "scratch.uniform_(-1, 1)",
    "log.append({a}.detach()[0]); del log[:-4]",
)
"""Statements that write: `d` is a tensor without grad made in this call."""

READS = (
    "n = round({a}.sum().item(), 3)",
    "n = float({a}.detach().abs().max())",
    "n = {a}.detach().numpy()[0].sum().item()",
    "n = len({a}.detach().tolist())",
    "n = int(({a} > 0).sum())",
    "text.append(f'{{{a}.mean():.4f}}'); del text[:-5]",
    "n = buf.sum().item()",
    "n = bool(({a} > 2).any())",
    "n = random.random()",
    "n = torch.rand(()).item()",
    "n = {a}.detach()[({a}[:, 0] > 0).nonzero()[:, 0]].shape[0]",
    "arr[:] = {a}.detach().numpy()[0]",
    "n = float(arr.sum())",
)

CONDITIONS = (
    "random.random() < 0.5",
    "{a}.sum() > 0.3137",  # not near what softmax, layer_norm or a - a.mean() give: rounding must not decide
    "calls[0] % 4 == 1",
    "calls[0] % 7 == 5",
    "{a}.mean().item() > 0.1",
    "isinstance(n, float)",
    "x[0, 0] > 0.3",
)


class Writer:
    """Writes one random program; `source` is the result."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lines: list[str] = []
        self._made = 0

    def source(self) -> str:
        """The text of `def step(x, y)`."""
        self._lines = [
            "def step(x, y):",
            "    calls[0] += 1",
            "    n = 1.0",
            "    x = slow(x)",
            "    d = torch.zeros(6, 4)",
        ]
        values = self._block(["x", "y"], 1, self._random.randint(6, 16))
        if self._random.random() < 0.7:
            self._lines += [f"    loss = ({values[-1]} * w + c).pow(2).mean()", *self._backward()]
        keep = [v for v in values[2:] if self._random.random() < 0.3]
        self._lines.append(f"    return [{', '.join(keep[:4])}], n")
        return "\n".join(self._lines) + "\n"

    def _backward(self) -> list[str]:
        return self._random.choice(
            [
                ["    loss.backward()", "    opt.step()", "    opt.zero_grad()"],
                ["    opt.zero_grad()", "    loss.backward()", "    n = loss.item()", "    opt.step()"],
                ["    g = torch.autograd.grad(loss, [w, c])", "    with torch.no_grad():", "        w -= 0.05 * g[0]"],
                ["    loss.backward()", "    if calls[0] % 2 == 0:", "        opt.step()", "        opt.zero_grad()"],
            ]
        ).copy()

    def _block(self, values: list[str], depth: int, length: int) -> list[str]:
        """Appends `length` statements; returns the names that exist after it on every path."""
        pad = "    " * depth
        values = list(values)
        for _ in range(length):
            kind = self._random.random()
            if kind < 0.5:
                name = f"t{self._made}"
                self._made += 1
                self._say(pad, f"{name} = {self._fill(self._random.choice(PURE), values)}")
                values.append(name)
            elif kind < 0.68:
                self._say(pad, self._fill(self._random.choice(IN_PLACE), values))
            elif kind < 0.8:
                self._say(pad, self._fill(self._random.choice(READS), values))
            elif kind < 0.84:
                self._say(pad, f"d = {self._pick(values)}.detach().clone()")
            elif depth < 3:
                self._compound(values, depth)
        return values

    def _compound(self, values: list[str], depth: int) -> None:
        pad, inner = "    " * depth, self._random.randint(1, 4)
        kind = self._random.random()
        if kind < 0.5:
            self._say(pad, f"if {self._fill(self._random.choice(CONDITIONS), values)}:")
            self._rebind(self._block(values, depth + 1, inner), values, depth + 1)
            if self._random.random() < 0.5:
                self._say(pad, "else:")
                self._rebind(self._block(values, depth + 1, inner), values, depth + 1)
        elif kind < 0.75:
            trips = self._random.choice(["2", "3", "calls[0] % 3", "int(abs(n)) % 3"])
            self._say(pad, f"for k in range({trips}):")
            self._rebind(self._block(values, depth + 1, inner), values, depth + 1)
        elif kind < 0.88:
            self._say(pad, "with torch.no_grad():")
            self._rebind(self._block(values, depth + 1, inner), values, depth + 1)
        else:
            self._say(pad, "try:")
            self._block(values, depth + 1, inner)
            self._say(pad, f"    if {self._random.choice(CONDITIONS[:1] + CONDITIONS[2:4])}: raise KeyError(calls[0])")
            self._say(pad, "except KeyError as error:")
            self._say(pad, "    n = len(str(error))")
            self._block(values, depth + 1, 1)

    def _rebind(self, inner: list[str], outer: list[str], depth: int) -> None:
        """What a branch made lives on under a name that exists on every path."""
        if len(inner) > len(outer) > 2:
            self._say("    " * depth, f"{outer[-1]} = {inner[-1]}")
        else:
            self._say("    " * depth, "pass")

    def _say(self, pad: str, text: str) -> None:
        self._lines.append(pad + text)

    def _pick(self, values: list[str]) -> str:
        return self._random.choice(values[-4:])

    def _fill(self, text: str, values: list[str]) -> str:
        number = self._random.choice(["0.3", "n * 0.01", "calls[0] * 0.1", "0.5"])
        return text.format(
            a=self._pick(values), b=self._pick(values), d=self._random.choice(["d", "scratch"]), s=number
        )


def slow(x: torch.Tensor) -> torch.Tensor:
    """x, after much work for the graph: Python is far ahead of it for the rest of the step."""
    big = x.detach().mean() + torch.ones(96, 96)
    for _ in range(8):
        big = torch.tanh(big @ big)
    return x + big[0, 0] * 0.001


def program(seed: int) -> tuple[str, Callable[[], Program]]:
    """Returns the source of random program `seed` and its `make`."""
    source = Writer(seed).source()
    code = compile(source, f"<program {seed}>", "exec")

    def make() -> Program:
        w, c = nn.Parameter(torch.full((4,), 0.5)), nn.Parameter(torch.zeros(4))
        scope: dict[str, Any] = {
            "torch": torch,
            "slow": slow,
            "F": nn.functional,
            "random": random,
            "w": w,
            "c": c,
            "m": torch.eye(4) * 0.5,
            "buf": torch.zeros(4),
            "scratch": torch.zeros(6, 4),
            "held": [torch.zeros(6, 4)],
            "log": [],
            "text": [],
            "calls": [0],
            "arr": np.zeros(4, np.float32),
            "opt": torch.optim.AdamW([w, c], lr=0.01) if seed % 2 else torch.optim.SGD([w, c], lr=0.1, momentum=0.5),
        }
        exec(code, scope)
        watched = [scope[k] for k in ("w", "c", "buf", "scratch", "held", "log", "text", "calls", "arr", "opt")]
        return Program(scope["step"], lambda i: (batch(i), batch(i + 50)), lambda: watched)

    return source, make
