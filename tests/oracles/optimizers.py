"""Every configuration of PyTorch's optimizer database (`optim_db`), each implementation of it, as a training step."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

from tests.coexec.harness import Program, seed_all
from tests.coexec.programs import batch
from tests.oracles.ops import Sample

OPTIMIZERS: list[Any] = optim_db


def names() -> list[str]:
    """The entries of the database."""
    return [info.optim_cls.__name__ for info in OPTIMIZERS]


def samples(name: str, first: int | None) -> Iterator[Sample]:
    """Yields (name, make): each configuration with each implementation, then each learning rate schedule."""
    info = next(info for info in OPTIMIZERS if info.optim_cls.__name__ == name)
    configurations = list(itertools.islice(info.optim_inputs_func(device=torch.device("cpu")), first))
    for implementation in _implementations(info):
        for k, given in enumerate(configurations):
            options = {**given.kwargs, **implementation}
            label = next(iter(implementation), "default")
            yield f"{name} float32 {label} #{k} {given.desc}", _program(info, options, None)
    for k, schedules in enumerate(itertools.islice(info.scheduler_inputs, first)):
        yield f"{name} float32 schedule #{k}", _program(info, {}, schedules)


def _implementations(info: Any) -> list[dict[str, bool]]:
    fused = ["fused"] if "cpu" in info.supports_fused_on else []
    return [{}, *({word: True} for word in ("foreach", *fused) if word in (*info.supported_impls, *fused))]


def _program(info: Any, options: dict[str, Any], schedules: Any) -> Callable[[], Program]:
    """Forward, backward and update of two layers, or of an embedding for what wants sparse gradients."""

    def make() -> Program:
        seed_all(0)
        model = _model(info)
        optimizer = info.optim_cls(model.parameters(), **_with_rate(info, copy.deepcopy(options)))
        schedulers = [schedule(optimizer) for schedule in schedules or ()]
        x = _input(info)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        def step() -> Any:
            loss = optimizer.step(closure)
            for scheduler in schedulers:
                wants_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(loss) if wants_loss else scheduler.step()
            return loss

        return Program(step, watch=lambda: (model, optimizer))

    return make


def _model(info: Any) -> nn.Module:
    if info.only_supports_sparse_grads:
        return nn.Embedding(5, 4, sparse=True)
    if info.optim_cls.__name__ == "Muon":  # matrices only
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def _input(info: Any) -> torch.Tensor:
    x: torch.Tensor = torch.tensor([0, 3, 3, 1]) if info.only_supports_sparse_grads else batch(0)
    return x


def _with_rate(info: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Adds the learning rate that some schedules want to find."""
    return {**({"lr": 0.01} if info.optim_cls.__name__ == "SGD" and "lr" not in options else {}), **options}
