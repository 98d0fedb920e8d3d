"""What every program offers: one training step, endless batches, and what training changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Program:
    """One training program, built and seeded."""

    step: Callable[[Any], Any]  # takes a batch; returns the loss, as a number or a tensor of no dimensions
    batches: Iterator[Any]  # never ends; its random draws are its own
    models: dict[str, nn.Module]  # what the step calls
    optimizers: dict[str, torch.optim.Optimizer]
    extras: dict[str, Any] = field(default_factory=dict)  # what else training changes: logs, schedules, buffers

    def state(self) -> dict[str, Any]:
        """Returns everything that training changes, by name."""
        return {**self.models, **self.optimizers, **self.extras}


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
