"""One rank of a DistributedDataParallel training on this machine: eager's steps and co-executed ones, compared.

`python -m tests.coexec.distributed_child RANK RANKS RENDEZVOUS` runs every scenario and prints one line of JSON for
each: the first difference, if there is one, and what the co-executed step says about itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import coexec
from coexec.intercept.build import build
from tests.coexec.harness import difference, seed_all
from tests.coexec.snapshot import snapshot

STEPS = 14
HANG_S = 50.0
Step = Callable[[int], Any]


class Net(nn.Module):
    """Two heads, of which a step may use one; a buffer that ranks exchange; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int = 0, both: bool = False) -> torch.Tensor:
        h = self.body(x)
        return self.heads[0](h) + self.heads[1](h) if both else self.heads[head](h)


def batch(i: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank trains on in step `i`."""
    generator = torch.Generator().manual_seed(100 * i + rank)
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def plain(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> Step:
    """All parameters are used in every step."""

    def step(i: int) -> float:
        x, y = batch(i, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, both=True), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def accumulating(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> Step:
    """Three backward passes, of which the last one reduces."""

    def step(i: int) -> list[float]:
        losses = []
        for k in range(3):
            x, y = batch(3 * i + k, rank)
            with model.no_sync() if k < 2 else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(x, both=True), y) / 3
                loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def alternating(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> Step:
    """One head per step, not the same on all ranks: the other's parameters are unused."""

    def step(i: int) -> float:
        x, y = batch(i, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, head=(i // 3 + rank) % 2), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def collectives(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> Step:
    """No DistributedDataParallel: the step averages by itself, in several ways, one of them not waited for at once."""

    def step(i: int) -> Any:
        x, y = batch(i, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, both=True), y)
        loss.backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        metric = loss.detach() * 2
        dist.all_reduce(metric, op=dist.ReduceOp.MAX)
        gathered = [torch.zeros(3) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, model.heads[0].bias.grad * 0 + rank)
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, {"rank": rank, "loss": loss.item()})
        for p, work in zip(model.parameters(), works, strict=True):
            work.wait()
            p.grad /= dist.get_world_size()
        optimizer.step()
        dist.barrier()
        first = torch.full((2,), float(rank + i)) * 1
        dist.broadcast(first, 0)
        return metric, torch.stack(gathered).sum().item(), seen, first

    return step


def hooked(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> Step:
    """A hook that compresses gradients, and hooks of the user's on the parameters."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    norms: list[torch.Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))

    def step(i: int) -> Any:
        norms.clear()
        loss = plain_step(i)
        return loss, torch.stack(norms)

    plain_step = plain(model, optimizer, rank)
    return step


SCENARIOS: dict[str, tuple[Callable[..., Step], dict[str, Any] | None]] = {
    "plain": (plain, {}),
    "views": (plain, {"gradient_as_bucket_view": True}),
    "static": (plain, {"static_graph": True}),
    "small buckets": (plain, {"bucket_cap_mb": 0.0001}),
    "unused": (alternating, {"find_unused_parameters": True}),
    "no_sync": (accumulating, {}),
    "hooks": (hooked, {}),
    "collectives": (collectives, None),
}


def train(scenario: str, rank: int, wrap: Callable[[Any], Any] | None) -> tuple[list[Any], Any]:
    """Returns what was seen after every step, and the step."""
    make, options = SCENARIOS[scenario]
    seed_all(7)
    net = Net()
    model = net if options is None else DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = make(model, optimizer, rank)
    if wrap is not None:
        step = wrap(step)
    records = []
    for i in range(STEPS):
        result = step(i)
        records.append((snapshot(result), snapshot((net, optimizer)), hash(torch.get_rng_state().numpy().tobytes())))
    return records, step


def compare(scenario: str, rank: int) -> dict[str, Any]:
    """Trains both ways; what is not equal is named, not raised: the other ranks go on to the next scenario."""
    expected, _ = train(scenario, rank, None)
    got, step = train(scenario, rank, lambda f: coexec.compile(f, backend="replay", numerics="exact"))
    wrong = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
    stats = step.stats()
    return {
        "scenario": scenario,
        "difference": f"step {wrong[0]}: {difference(expected[wrong[0]], got[wrong[0]])}" if wrong else "",
        "phase": stats.phase,
        "co_executed": stats.co_executed,
        "fallbacks": sum(stats.fallbacks.values()),
        "explanation": step.explain(),
    }


def main(rank: int, ranks: int, rendezvous: str) -> None:
    """Runs all scenarios."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.set_num_threads(1)
    build(verbose=False)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        for scenario in SCENARIOS:
            print(json.dumps(compare(scenario, rank)), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
