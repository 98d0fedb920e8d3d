"""Steps with Inductor's artifacts: never a wrong number, whatever changes after they were adopted.

Both runs go on from the same state in every iteration (the compiled run's state is overwritten in place with eager's),
so the tolerance is that of a single step and rounding cannot hide an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import coexec
from tests.coexec.harness import Program, seed_all
from tests.coexec.programs import batch, labels, mlp, training

pytestmark = pytest.mark.compile

Make = Callable[[], Program]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a program's watched state, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for state in value.state.values():
            yield from tensors(list(state.values()))
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def assert_close(got: Any, expected: Any, where: str) -> None:
    """Equal up to a rounding or two of float32; structure, types and integers exactly."""
    assert type(got) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert got.stride() == expected.stride(), where
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6, msg=lambda text: f"{where}: {text}")
        if expected.is_leaf and expected.grad is not None:
            assert_close(got.grad, expected.grad, f"{where}.grad")
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-4, abs=2e-6), where
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for k, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_close(a, b, f"{where}[{k}]")
    else:
        assert got == expected, where


class Pair:
    """A program twice, in lockstep: eager, and under coexec as a user gets it."""

    def __init__(self, make: Make, **options: Any) -> None:
        seed_all(0)
        self.eager = make()
        self._ours = self._streams()
        seed_all(0)
        self.got = make()
        self.step = coexec.compile(self.got.step, **options)
        self._theirs = self._streams()
        self.iteration = 0
        self.inductor = 0  # most compiled segments seen at once

    def run(self, n: int) -> None:
        """`n` iterations of both, compared after each."""
        for _ in range(n):
            self._once(self.iteration)
            self.iteration += 1

    def settle(self, rounds: int = 8) -> None:
        """Runs until all segments that are to be compiled were compiled and adopted."""
        for _ in range(rounds):
            self.run(6)
            assert self.step.wait_compiled(300)
            self.run(2)
            if self.inductor and not self.step._runner.segments._active:
                return
        assert self.inductor, self.why()

    def why(self) -> str:
        """What each segment is at, for a failing test."""
        segments = self.step._runner.segments.segments
        return "\n".join(f"{len(s.nodes)} ops, {s.planned.kind}: {s.state.value}: {s.reason}" for s in segments)

    def compiled_runs(self) -> int:
        """How often a compiled segment ran so far."""
        return int(self.step._runner._native.stats()["compiled_runs"])

    def discards(self) -> int:
        """How often the results of a compiled segment were nobody's."""
        segments = self.step._runner.segments.segments
        return sum(version.native.discards for segment in segments for version in segment.versions)

    def to_compiled_turn(self) -> None:
        """Compiled code and replay take turns at first: runs until the compiled code is next."""
        before = self.compiled_runs()
        self.run(2)
        assert self.compiled_runs() > before, self.why()
        for _ in range(2):
            before = self.compiled_runs()
            self.run(1)
            if self.compiled_runs() == before:
                return

    def _once(self, i: int) -> None:
        self._resume(self._ours)
        expected = self._call(self.eager.step, self.eager, i)
        self._ours = self._streams()
        self._resume(self._theirs)
        actual = self._call(self.step, self.got, i)
        self._theirs = self._streams()
        assert torch.equal(self._ours[0], self._theirs[0]), f"iteration {i}: random streams differ"
        assert_close(actual, expected, f"iteration {i}: result")
        ours, theirs = list(tensors(self.eager.watch())), list(tensors(self.got.watch()))
        assert_close(theirs, ours, f"iteration {i}: state")
        with torch.no_grad():
            for a, b in zip(theirs, ours, strict=True):
                a.copy_(b)
                if a.is_leaf and a.grad is not None:
                    a.grad.copy_(b.grad)
        self.inductor = max(self.inductor, self.step.stats().segments.get("inductor", 0))

    def _call(self, step: Any, program: Program, i: int) -> Any:
        args = program.args(i)
        result = step(*args)
        program.after(i, result)
        return result

    def _streams(self) -> Any:
        return torch.get_rng_state(), random.getstate(), np.random.get_state()

    def _resume(self, streams: Any) -> None:
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        np.random.set_state(streams[2])


def wide(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch large enough that a compiled segment is worth it."""
    return batch(i, 32, 16), labels(i, 32)


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def test_mlp_with_adamw_and_a_schedule() -> None:
    def make() -> Program:
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=400)
        plain = training(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = plain(x, y)
            schedule.step()
            return loss

        return Program(step, wide, lambda: (model, optimizer))

    pair = Pair(make)
    pair.settle()
    before = pair.compiled_runs()
    pair.run(40)
    assert pair.step.stats().phase == "co-execution"
    assert pair.compiled_runs() > before


def test_convolutions_with_batch_norm() -> None:
    def make() -> Program:
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return Program(
            training(model, optimizer),
            lambda i: (batch(i, 16, 64).view(16, 1, 8, 8), labels(i, 16)),
            lambda: (model, optimizer),
        )

    pair = Pair(make)
    pair.settle()
    pair.run(20)


def test_transformer_with_dropout_draws_eagers_masks() -> None:
    def make() -> Program:
        model = nn.Sequential(
            nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True), nn.Linear(16, 3)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-3)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).mean(1), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i, 8, 48).view(8, 6, 8), labels(i, 8)), lambda: (model, optimizer))

    pair = Pair(make)
    pair.settle()
    pair.run(20)


def test_a_branch_on_a_value_and_one_at_random() -> None:
    def make() -> Program:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            h = model[:3](x)
            if random.random() < 0.5:
                h = h * 0.9 + 0.1 * h.tanh() + h.sigmoid()
            logits = model[3:](h)
            loss = nn.functional.cross_entropy(logits, y)
            if loss.item() > 1.2:
                loss = loss * 0.5 + logits.pow(2).mean() + logits.abs().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, wide, lambda: (model, optimizer))

    pair = Pair(make)
    pair.run(12)
    pair.settle()
    pair.run(40)


def test_an_activation_that_someone_keeps_from_iteration_forty_on() -> None:
    def make() -> Program:
        model, calls = classifier(), [0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        kept: list[Any] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            calls[0] += 1
            optimizer.zero_grad()
            h = model[:3](x)
            if calls[0] > 40:
                kept.append(h)
            loss = nn.functional.cross_entropy(model[3:](h), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, wide, lambda: (model, [t.detach() for t in kept[-3:]]))

    pair = Pair(make)
    pair.settle(rounds=4)
    pair.run(60 - pair.iteration if pair.iteration < 60 else 20)
    assert pair.step.stats().phase == "co-execution"


def test_gradients_looked_at_by_the_caller_only_later() -> None:
    def make() -> Program:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        norms: list[float] = []

        def after(i: int, result: Any) -> None:
            if i > 45:
                norms.append(sum(p.grad.norm().item() for p in model.parameters()))

        return Program(training(model, optimizer), wide, lambda: (model, [torch.tensor(n) for n in norms[-2:]]), after)

    pair = Pair(make)
    pair.settle(rounds=4)
    pair.run(max(60 - pair.iteration, 10))


def test_inputs_that_start_to_alias() -> None:
    def make() -> Program:
        held: list[torch.Tensor] = []

        def step(a: torch.Tensor, b: torch.Tensor) -> Any:
            a.mul_(0.9).add_(0.1)
            c = (b + 1).tanh().exp().sigmoid() * 2
            b.add_(a.mean())
            d = (a * b).sin().cos().tanh()
            return c, d, (c + d).sum()

        def args(i: int) -> tuple[Any, ...]:
            base = batch(i, 1, 4096).view(-1)
            apart = (base[:2048].clone(), base[2048:].clone())
            overlapping = (base[:2048], base[1024:3072])
            held[:] = apart if i < 40 or i % 3 == 0 else overlapping if i % 3 == 1 else (apart[0], apart[0])
            return tuple(held)

        return Program(step, args, lambda: held)

    pair = Pair(make)
    pair.settle(rounds=4)
    pair.run(max(64 - pair.iteration, 24))


def test_a_batch_refilled_in_place() -> None:
    def make() -> Program:
        model, x = classifier(), torch.zeros(32, 16)
        array = np.zeros((32, 16), np.float32)
        second = torch.from_numpy(array)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(y: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x) + model(second), y)
            loss.backward()
            x.fill_(7.0)
            array[:] = -7.0
            optimizer.step()
            return loss.item()

        def args(i: int) -> tuple[Any, ...]:
            x.copy_(batch(i, 32, 16))
            array[:] = batch(i + 1, 32, 16).numpy()
            return (labels(i, 32),)

        return Program(step, args, lambda: (model, x))

    pair = Pair(make)
    pair.settle()
    pair.run(20)


@pytest.mark.parametrize("how", ["setattr", "data", "tied", "load_state_dict", "requires_grad"])
def test_a_parameter_is_replaced_after_adoption(how: str) -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

        def step(x: torch.Tensor) -> Any:
            loss = model(x).pow(2).mean()
            parameters = [p for p in model.parameters() if p.requires_grad]
            grads = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, g in zip(parameters, grads, strict=True):
                    p -= 0.1 * g
            return loss.detach()

        def args(i: int) -> tuple[Any, ...]:
            if i == 50 and how == "setattr":
                model[2].weight = nn.Parameter(torch.eye(64) * 0.3)
            elif i == 50 and how == "data":
                model[2].weight.data = torch.eye(64) * 0.3
            elif i == 50 and how == "tied":
                model[4].weight = model[2].weight
            elif i == 50 and how == "load_state_dict":
                model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}, assign=True)
                model.requires_grad_(True)
            elif i == 50 and how == "requires_grad":
                model[2].requires_grad_(False)
            return (batch(i, 32, 16),)

        return Program(step, args, lambda: model)

    pair = Pair(make)
    pair.settle(rounds=5)
    pair.run(max(62 - pair.iteration, 12))


def test_another_batch_size_and_dtype_after_adoption() -> None:
    def make() -> Program:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def args(i: int) -> tuple[Any, ...]:
            rows = 32 if i < 40 else [32, 20, 1][i % 3]
            return batch(i, rows, 16), labels(i, rows)

        return Program(training(model, optimizer), args, lambda: (model, optimizer))

    pair = Pair(make)
    pair.settle(rounds=4)
    pair.run(max(64 - pair.iteration, 24))


def test_an_exception_between_compiled_segments() -> None:
    def make() -> Program:
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def inner(x: torch.Tensor, y: torch.Tensor, bad: bool) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if bad:
                raise ValueError("before the update")
            optimizer.step()
            return loss.item()

        def step(x: torch.Tensor, y: torch.Tensor, bad: bool) -> Any:
            return inner(x, y, bad)

        def guarded(i: int) -> tuple[Any, ...]:
            return (*wide(i), i > 40 and i % 5 == 0)

        return Program(step, guarded, lambda: (model, optimizer))

    class Guarded(Pair):
        def _call(self, step: Any, program: Program, i: int) -> Any:
            try:
                return super()._call(step, program, i)
            except ValueError as error:
                return str(error)

    pair = Guarded(make)
    pair.settle(rounds=4)
    pair.run(max(64 - pair.iteration, 24))


def test_index_errors_inside_a_compiled_segment() -> None:
    def make() -> Program:
        table = nn.Embedding(50, 32)
        head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))

        def step(ids: torch.Tensor) -> Any:
            h = table(ids).tanh() * 2
            return head(h.mean(1)).softmax(-1).sum(0)

        def args(i: int) -> tuple[Any, ...]:
            ids = labels(i, 24, 50).view(4, 6)
            return (ids + 50 if i > 40 and i % 4 == 0 else ids,)

        return Program(step, args, lambda: (table, head))

    class Guarded(Pair):
        def _call(self, step: Any, program: Program, i: int) -> Any:
            try:
                return super()._call(step, program, i)
            except IndexError as error:
                return str(error)

    pair = Guarded(make)
    pair.settle(rounds=4)
    pair.run(max(60 - pair.iteration, 20))


def test_inference_reads_and_a_loop() -> None:
    def make() -> Program:
        cell = nn.GRUCell(16, 32)

        @torch.no_grad()
        def step(x: torch.Tensor, n: int) -> Any:
            h = torch.zeros(32, 32)
            seen = []
            for t in range(n):
                h = cell(x * (1 + t), h)
                if t % 2:
                    seen.append(h.abs().max().item())
            return h, seen

        return Program(step, lambda i: (batch(i, 32, 16), 4 + (i % 3 if i > 30 else 0)), lambda: cell)

    pair = Pair(make)
    pair.settle(rounds=4)
    pair.run(max(50 - pair.iteration, 12))


def test_two_optimizers_of_a_gan_and_an_average() -> None:
    def make() -> Program:
        maker, judge = mlp(16, 64, 16), mlp(16, 64, 1)
        average = torch.optim.swa_utils.AveragedModel(maker)
        first = torch.optim.Adam(maker.parameters(), lr=0.005)
        second = torch.optim.RMSprop(judge.parameters(), lr=0.002)

        def step(x: torch.Tensor) -> Any:
            fake = maker(x)
            second.zero_grad()
            bad = judge(fake.detach()).mean() - judge(x).mean()
            bad.backward()
            second.step()
            first.zero_grad()
            good = -judge(fake).mean()
            good.backward()
            first.step()
            average.update_parameters(maker)
            return good.item()

        return Program(step, lambda i: (batch(i, 32, 16),), lambda: (maker, average, first))

    pair = Pair(make)
    pair.settle()
    pair.run(20)


def test_writes_through_views_of_outside_memory_and_a_draw_for_nobody() -> None:
    def make() -> Program:
        head, history, grid, scratch = nn.Linear(16, 16), torch.zeros(40, 16), torch.zeros(32, 4), torch.zeros(4, 8)

        @torch.no_grad()
        def step(x: torch.Tensor, first: int) -> Any:
            h = head(x).tanh()
            nn.functional.dropout(h, 0.3)
            history[first : first + 32].copy_(h)
            grid[:, 0] = h.sum(1)
            scratch.view(-1)[3:9].zero_()
            scratch.add_(h[:4, :8])
            return (h + torch.rand(16)).exp()

        return Program(step, lambda i: (batch(i, 32, 16), 1 + i % 7), lambda: (history, grid, scratch))

    pair = Pair(make)
    pair.settle()
    assert all(s.state.value == "inductor" for s in pair.step._runner.segments.segments), pair.why()
    before = pair.compiled_runs()
    pair.run(40)
    assert pair.compiled_runs() > before, pair.why()


def test_a_second_process_starts_with_what_the_first_compiled() -> None:
    def make() -> Program:
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Program(training(model, optimizer), wide, lambda: (model, optimizer))

    first = Pair(make)
    first.settle()
    second = Pair(make)  # as another process would: nothing but the cache folder is shared
    second.run(10)
    assert second.inductor >= 1
    assert not second.step._runner.segments.compiling()


def test_an_rnn_with_random_lengths_around_compiled_segments() -> None:
    """What is before and behind the loops is compiled; it reads values that their last and earlier passes made."""

    def make() -> Program:
        cell, head = nn.RNNCell(4, 16), classifier()
        optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            h, states = torch.zeros(x.shape[0], 16), []
            for t in range(x.shape[1]):
                h = cell(x[:, t], h)
                states.append(h)
            loss = nn.functional.cross_entropy(head(h + states[0] * states[-2]), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        def args(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            length = random.Random(i).randint(3, 9)
            return batch(i, 8, 4 * length).view(8, length, 4), labels(i, 8)

        return Program(step, args, lambda: (cell, head, optimizer))

    pair = Pair(make)
    pair.settle()
    fallbacks, before = dict(pair.step.stats().fallbacks), pair.compiled_runs()
    pair.run(40)
    stats = pair.step.stats()
    assert (stats.phase, stats.fallbacks) == ("co-execution", fallbacks)
    assert stats.loops >= 2
    assert pair.compiled_runs() > before


@pytest.mark.parametrize("kind", ["attribute", "wrapped", "size of a view"])
def test_a_number_that_changes_after_the_artifact_was_adopted(kind: str) -> None:
    """It was a constant for as long as anybody had seen; the artifact of that time counts no more."""
    late: list[bool] = []

    def make() -> Program:
        weight, rows = nn.Parameter(torch.full((4,), 0.5)), [0]

        def step(x: torch.Tensor) -> Any:
            h = torch.tanh(x * weight).exp().sigmoid()
            if kind == "attribute":
                h = nn.functional.layer_norm(h, (4,), eps=0.5 if late else 1e-5)
            elif kind == "wrapped":
                h = h * (3.0 if late else 2.0)
            else:
                h = h[: rows[0]]
            return (h + 1).cos().mean(0)

        def args(i: int) -> tuple[Any, ...]:
            rows[0] = 4 if i % 3 else 5
            return (batch(i),)

        return Program(step, args, lambda: weight)

    pair = Pair(make)
    pair.settle()
    late.append(True)
    pair.run(16)


@pytest.mark.parametrize(
    "step",
    [
        lambda a, b, i: torch._foreach_mul([a + 1, b * 2], [i, i + 1]),
        lambda a, b, i: [torch.where(torch.eq(a > 0, bool(i % 2)), a, b), b.sin()],
    ],
    ids=["list of integers", "bool"],
)
def test_a_varying_number_that_is_no_input_is_checked_at_each_run(step: Any) -> None:
    """Artifacts have it as a constant: another value must discard the run, not give the old value's result."""

    def make() -> Program:
        def whole(a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
            x, y = step(a, b, i)
            z = (x.sin() + y.cos()) * 0.5 + x
            return (z.tanh() + y).exp().sigmoid()

        return Program(whole, lambda i: (batch(i), batch(i + 50), 1 + min(i, 12) if i < 24 else i), lambda: None)

    pair = Pair(make)
    pair.run(16)
    assert pair.step.wait_compiled(300)
    pair.run(24)
    native = pair.step._runner._native.stats()
    assert native["compiled_runs"] + native["discarded_runs"] > 0
