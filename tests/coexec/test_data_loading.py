"""torch.utils.data beside a co-executed step and inside it: workers of every start method, samplers, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from tests.coexec.harness import Program, check, exact
from tests.coexec.programs import batch, labels, mlp, training

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

SCRIPT = '''
"""A training script as people write them: its workers import it, and the step with it."""
import json, sys, threading
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import coexec
from coexec.intercept import native

torch.set_num_threads(1)

@coexec.compile(backend="replay", numerics="exact")
def augment(x):
    return x * 2 + torch.randn_like(x) * 0.1

class Noisy(Dataset):
    def __init__(self, use_step):
        self.use_step, self.step = use_step, augment

    def __len__(self):
        return 24

    def __getitem__(self, i):
        before = native._module is not None, sorted(t.name for t in threading.enumerate())
        assert self.step is augment  # what is pickled by name is the module's own
        y = (augment if self.use_step else augment.__wrapped__)(torch.full((4,), i / 24))
        return y, i % 3, str(before), augment.stats().co_executed if self.use_step else 0

@coexec.compile(backend="replay", numerics="exact")
def step(model, optimizer, x, y):
    x.mul_(0.5)  # memory that a worker has made
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()

def train(method, use_step, f):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Noisy(use_step), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True,
                        multiprocessing_context=method)
    losses, kept, seen, inside = [], [], set(), 0
    for epoch in range(2):
        for x, y, before, co_executed in loader:
            losses.append(f(model, optimizer, x, y))
            kept.append(x)
            seen.update(before)
            inside = max(inside, int(co_executed.max()))
    total = torch.stack(kept).sum().item()
    return [losses, total, [p.sum().item() for p in model.parameters()]], sorted(seen), inside

if __name__ == "__main__":
    coexec.intercept.build.build(verbose=False)
    method = sys.argv[1]
    eager, seen, _ = train(method, False, step.__wrapped__)
    inside, _, co_executed = train(method, True, step)
    print(json.dumps({"equal": eager == inside, "seen": seen, "co_executed_in_a_worker": co_executed,
                      "phase": step.stats().phase, "eager": eager, "inside": inside}))
'''


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_import_the_script_that_decorates_the_step(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), method], capture_output=True, text=True, check=False, timeout=55
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["equal"], told
    assert told["phase"] == "co-execution"
    assert told["co_executed_in_a_worker"] > 2
    if method == "spawn":  # a worker that only imports a step has neither the core nor a thread for it
        assert all(seen.startswith("(False") and "coexec" not in seen for seen in told["seen"]), told["seen"]


class Failing(Dataset[torch.Tensor]):
    """Its third batch cannot be had."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 9:
            raise KeyError("no such file")
        return torch.full((2,), float(i))


def test_an_error_of_the_data_inside_the_step() -> None:
    def make() -> Program:
        total = torch.zeros(2)

        def epoch() -> Any:
            try:
                for x in DataLoader(Failing(), batch_size=4):
                    total.add_(x.sum(0) * 2)
            except KeyError as error:
                return str(error)
            return None

        return Program(epoch, watch=lambda: total)

    check(make)


def test_an_error_of_a_worker_between_steps() -> None:
    @exact
    def step(x: torch.Tensor) -> float:
        return (x * 2).sum().item()

    def epoch() -> list[float]:
        return [step(x) for x in DataLoader(Failing(), batch_size=4, num_workers=1, sampler=order)]

    order = list(range(9))
    assert epoch() == [24.0, 88.0, 32.0]
    order.append(9)
    with pytest.raises(KeyError, match="no such file"):
        epoch()
    order.pop()
    assert epoch() == [24.0, 88.0, 32.0]
    assert step.stats().phase == "co-execution"


class Stream(IterableDataset[torch.Tensor]):
    """Endless in principle; each worker has its share."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for i in range(info.id if info else 0, 20, info.num_workers if info else 1):
            yield torch.full((3,), float(i)) + torch.rand(3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_whose_iterator_is_advanced_inside_the_step(workers: int) -> None:
    def make() -> Program:
        loader = DataLoader(Stream(), batch_size=2, num_workers=workers)
        box = [iter(loader)]
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

        def step() -> float:
            batch = next(box[0], None)
            if batch is None:
                box[0] = iter(loader)
                batch = next(box[0])
            optimizer.zero_grad()
            loss = nn.functional.dropout(layer(batch), 0.3).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, watch=lambda: layer)

    check(make, n=24, max_fallbacks=4 + workers)  # which worker's batch comes first is a path of the loader's own


def test_samplers_draw_from_the_stream_that_the_step_draws_from() -> None:
    def make() -> Program:
        data = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12))
        loaders: list[Any] = []

        def step(i: int) -> Any:
            first, second = random_split(data, [8, 4])
            weighted = WeightedRandomSampler(torch.rand(8) + 0.1, 4)
            loaders[:] = [
                DataLoader(first, batch_size=4, shuffle=True),
                DataLoader(second, batch_sampler=BatchSampler(torch.randperm(4).tolist(), 2, drop_last=i % 2 == 0)),
                DataLoader(Subset(first, [0, 2, 4, 5, 6, 7, 1, 3]), batch_size=2, sampler=weighted),
            ]
            out = [nn.functional.dropout(x) * y[:, None] for loader in loaders for x, y in loader]
            return torch.cat(out).sum(0), torch.rand(1)

        return Program(step, lambda i: (i,))

    check(make, n=10)


def padded(rows: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads rows of several lengths."""
    lengths = torch.tensor([len(x) for x, _ in rows])
    x = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
    return x, lengths, torch.tensor([y for _, y in rows])


def test_batches_of_a_collate_function_in_workers() -> None:
    rows = [(torch.linspace(0, 1, 3 + i % 4)[:, None], i % 3) for i in range(16)]

    def make() -> Program:
        model = nn.GRU(1, 3, batch_first=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = DataLoader(rows, batch_size=4, collate_fn=padded, num_workers=1)  # type: ignore[arg-type]

        def step(x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> float:
            h, _ = model(x)
            loss = nn.functional.cross_entropy(h[torch.arange(len(x)), lengths - 1], y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        batches = [batch for _ in range(3) for batch in loader]
        return Program(step, lambda i: batches[i], lambda: model)

    check(make, n=12)


def shared_training(model: nn.Module, ready: Any, go: Any) -> None:
    """A child that reads the parent's parameters and changes one of them."""
    ready.put(sum(p.sum().item() for p in model.parameters()))
    go.wait(20)
    with torch.no_grad():
        model[0].bias.fill_(0.25)  # type: ignore[index, operator, union-attr]
    ready.put(None)


def test_parameters_in_shared_memory_are_read_and_written_by_another_process() -> None:
    model = mlp().share_memory()
    step = exact(training(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    for i in range(6):
        step(batch(i), labels(i))
    context = torch.multiprocessing.get_context("fork")
    ready, go = context.Queue(), context.Event()
    child = context.Process(target=shared_training, args=(model, ready, go))
    child.start()
    assert ready.get(timeout=30) == sum(p.sum().item() for p in model.parameters())
    go.set()
    ready.get(timeout=30)
    child.join(20)
    reference = mlp()
    reference.load_state_dict(model.state_dict())
    assert reference[0].bias.tolist() == [0.25] * 8
    plain = training(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    assert [step(batch(i), labels(i)) for i in range(4)] == [plain(batch(i), labels(i)) for i in range(4)]
    assert step.stats().phase == "co-execution"
    assert os.getpid() != child.pid
