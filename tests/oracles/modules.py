"""Every sample of PyTorch's module database (`module_db`) as a training and an evaluation step."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves

from tests.coexec.harness import Program, seed_all
from tests.oracles.ops import Sample, gradients, in_flight


def names() -> list[str]:
    """The entries of the database."""
    return [info.name for info in module_db]


def samples(name: str, first: int | None) -> Iterator[Sample]:
    """Yields (name, make) for the samples of an entry, `first` of each mode."""
    info = next(info for info in module_db if info.name == name)
    for training in (True, False):
        seed_all(0)
        found = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
        for k, sample in enumerate(itertools.islice(found, first)):
            yield f"{name} float32 {'train' if training else 'eval'} #{k}", _program(info, sample, training)


def _program(info: Any, sample: Any, training: bool) -> Callable[[], Program]:
    """A step of the module: forward, gradients of parameters and inputs, a small update."""
    given = sample.forward_input

    def make() -> Program:
        seed_all(0)
        constructor = sample.constructor_input
        module = info.module_cls(*copy.deepcopy(constructor.args), **copy.deepcopy(constructor.kwargs)).train(training)
        leaves = [t for t in tree_leaves((given.args, given.kwargs)) if isinstance(t, torch.Tensor)]

        def step() -> Any:
            args, kwargs = in_flight((given.args, given.kwargs))
            result = module(*args, **kwargs)
            weights = [p for p in module.parameters() if p.requires_grad]
            grads = gradients(result, [*leaves, *weights])
            with torch.no_grad():
                for p, g in zip(weights, (grads or ())[-len(weights) :] if weights else (), strict=False):
                    if g is not None:
                        p -= 0.01 * g
            return result, grads

        return Program(step, watch=lambda: (leaves, module))

    return make
