"""Code that is another one than in the step before: monkeypatched, reloaded, rewritten, hooked."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, labels, mlp, training

THIS = sys.modules[__name__]
SWITCH, BACK = 6, 12  # calls before which the code changes, and changes back


def activation(x: torch.Tensor) -> torch.Tensor:
    """What tests replace."""
    return torch.tanh(x)


def other_activation(x: torch.Tensor) -> torch.Tensor:
    """By this, for instance."""
    return torch.sigmoid(x) * 2


class Block(nn.Module):
    """What tests patch the methods of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(activation(self.linear(x)))

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class OtherBlock(Block):
    """The same parameters, another program."""

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() - 1


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Every patch of a test ends with it."""
    kept = activation, Block.forward, Block.shift, torch.tanh
    code, defaults = activation.__code__, activation.__defaults__
    yield
    THIS.activation, Block.forward, Block.shift, torch.tanh = kept  # type: ignore[attr-defined, method-assign]
    activation.__code__, activation.__defaults__ = code, defaults


def block_program(change: Any, back: Any) -> Program:
    """Trains a block; `change(block)` before call SWITCH, `back(block)` before call BACK."""
    block = Block()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = block(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def args(i: int) -> tuple[Any, ...]:
        if i in (SWITCH, BACK):
            (change if i == SWITCH else back)(block)
        return (batch(i),)

    return Program(step, args, lambda: block)


def set_function(replacement: Any) -> Any:
    """Returns what puts `replacement` in the place of the module's `activation`."""
    return lambda block: setattr(THIS, "activation", replacement)


ORIGINAL, SHIFT, FORWARD, TANH = activation, Block.shift, Block.forward, torch.tanh
CHANGES: dict[str, tuple[Any, Any]] = {
    "function": (set_function(other_activation), set_function(ORIGINAL)),
    "function by a builtin": (set_function(torch.relu), set_function(ORIGINAL)),
    "function by one with the same name": (
        set_function(types.FunctionType(other_activation.__code__, globals(), "activation")),
        set_function(ORIGINAL),
    ),
    "code": (
        lambda block: setattr(ORIGINAL, "__code__", other_activation.__code__),
        lambda block: setattr(ORIGINAL, "__code__", Block.forward.__globals__["CODE"]),
    ),
    "method of the class": (
        lambda block: setattr(Block, "shift", lambda self, x: x * 3),
        lambda block: setattr(Block, "shift", SHIFT),
    ),
    "forward of the class": (
        lambda block: setattr(Block, "forward", lambda self, x: self.linear(x).cos()),
        lambda block: setattr(Block, "forward", FORWARD),
    ),
    "forward of the object": (
        lambda block: setattr(block, "forward", lambda x: FORWARD(block, x * 0.5).sin()),
        lambda block: delattr(block, "forward"),
    ),
    "class of the object": (
        lambda block: setattr(block, "__class__", OtherBlock),
        lambda block: setattr(block, "__class__", Block),
    ),
    "function of torch": (
        lambda block: setattr(torch, "tanh", lambda x: TANH(x) * 0.5 + x * 0.1),
        lambda block: setattr(torch, "tanh", TANH),
    ),
    "submodule": (
        lambda block: setattr(block, "linear", nn.Sequential(block.linear, nn.LayerNorm(4))),
        lambda block: setattr(block, "linear", block.linear[0]),
    ),
}
CODE = activation.__code__


@pytest.mark.parametrize("what", CHANGES)
def test_the_new_code_runs_from_the_next_step_on(what: str) -> None:
    check(lambda: block_program(*CHANGES[what]), n=20, max_fallbacks=4)


def test_a_patch_for_every_other_call() -> None:
    def make() -> Program:
        block = Block()

        def step(x: torch.Tensor, patched: bool) -> Any:
            if not patched:
                return block(x).sum()
            with mock.patch.object(THIS, "activation", other_activation), mock.patch.object(Block, "shift", SHIFT):
                return block(x).sum()

        return Program(step, lambda i: (batch(i), i % 2 == 1))

    check(make, n=14)


def test_a_number_in_a_closure_a_default_and_a_global() -> None:
    def make() -> Program:
        scale = 1.0

        def scaled(x: torch.Tensor, shift: float = 0.5) -> torch.Tensor:
            return x * scale + shift

        def args(i: int) -> tuple[Any, ...]:
            nonlocal scale
            scale = 1.0 if i < SWITCH else 0.5 * i
            if i >= BACK:
                scaled.__defaults__ = (0.25 * i,)
            return (batch(i),)

        return Program(lambda x: scaled(x.tanh()).sum(), args)

    check(make, n=20, max_fallbacks=3)


MODULE = """
import torch

SCALE = {scale}

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return {body}
"""


@pytest.mark.parametrize(
    ("scale", "body"),
    [
        ("2.0", "x * self.weight * SCALE"),
        ("3.0", "x * self.weight * SCALE"),
        ("2.0", "(x - self.weight).cos() * SCALE"),
    ],
    ids=["unchanged", "another number", "another program"],
)
def test_a_reloaded_module(scale: str, body: str, tmp_path: Path) -> None:
    path = tmp_path / "reloaded_layer.py"

    def write(scale: str, body: str) -> None:
        path.write_text(MODULE.format(scale=scale, body=body))
        importlib.invalidate_caches()

    def make() -> Program:
        write("2.0", "x * self.weight * SCALE")
        spec = importlib.util.spec_from_file_location("reloaded_layer", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["reloaded_layer"] = module
        spec.loader.exec_module(module)
        box = [module.Layer()]
        optimizer = torch.optim.SGD(box[0].parameters(), lr=0.1)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = box[0](x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        def args(i: int) -> tuple[Any, ...]:
            if i == SWITCH:
                write(scale, body)
                again = importlib.util.spec_from_file_location("reloaded_layer", path)
                assert again is not None
                source = path.read_text()
                exec(compile(source, str(path), "exec"), module.__dict__)  # as reload does, without its file cache
                old, box[0] = box[0], module.Layer()
                box[0].weight = old.weight
            return (batch(i),)

        return Program(step, args, lambda: box[0])

    try:
        check(make, n=16, max_fallbacks=3)
    finally:
        sys.modules.pop("reloaded_layer", None)


def test_importlib_reload_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "reloaded_loss.py"

    def write(power: int) -> None:
        path.write_text(f"def loss(y):\n    return (y.abs() ** {power}).mean()\n")

    def make() -> Program:
        write(2)
        sys.modules.pop("reloaded_loss", None)
        importlib.invalidate_caches()
        module = importlib.import_module("reloaded_loss")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = module.loss(model(x))
            loss.backward()
            optimizer.step()
            return loss.item()

        def args(i: int) -> tuple[Any, ...]:
            if i % 7 == 6:
                write(2 + i // 7)
                importlib.reload(module)
            return (batch(i),)

        return Program(step, args, lambda: model)

    try:
        check(make, n=26, max_fallbacks=6)
    finally:
        sys.modules.pop("reloaded_loss", None)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks_that_come_and_go() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handles: list[Any] = []
        seen: list[Any] = []

        def args(i: int) -> tuple[Any, ...]:
            if i == 5:
                handles.append(model[0].register_forward_hook(lambda m, a, out: out * 0.5))
                handles.append(model[2].register_forward_pre_hook(lambda m, a: (a[0] + 0.1,)))
                handles.append(model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01)))
            if i == 9:
                handles.append(model.register_full_backward_hook(lambda m, g, out: seen.append(out[0].sum().item())))
                handles.append(optimizer.register_step_post_hook(lambda o, a, k: seen.append("updated")))
            if i == 13:
                [handle.remove() for handle in handles]
            return batch(i), labels(i)

        return Program(training(model, optimizer), args, lambda: (model, seen))

    check(make, n=22, max_fallbacks=6)


def test_a_scheduler_that_wraps_the_optimizers_step_in_the_middle() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedulers: list[Any] = []
        train = training(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = train(x, y)
            [scheduler.step() for scheduler in schedulers]
            return loss, optimizer.param_groups[0]["lr"]

        def args(i: int) -> tuple[Any, ...]:
            if i == SWITCH:
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8))
            if i == BACK:
                schedulers[:] = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]
            return batch(i), labels(i)

        return Program(step, args, lambda: (model, optimizer))

    check(make, n=20, max_fallbacks=4)
