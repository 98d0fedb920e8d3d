"""The ways a program is run: plain eager, torch.compile of model and update, and coexec; the program is the same."""

from __future__ import annotations

import importlib
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

PROGRAMS = {"gpt": "examples.demo.gpt", "digits": "examples.demo.digits"}
EAGER, TORCH_COMPILE, TORCH_COMPILE_MODEL, COEXEC = "eager", "torch.compile", "torch.compile (model)", "coexec"
SEED = 7


class Unavailable(Exception):  # noqa: N818 - a state of the machine that the table shows, not a failure of the program
    """The variant cannot run here; the text says why."""


@runtime_checkable
class CoexecStep(Protocol):
    """What a step decorated with coexec offers beside being called."""

    def stats(self) -> Any: ...
    def explain(self) -> str: ...
    def wait_compiled(self, timeout_s: float) -> bool: ...


@dataclass
class Runner:
    """One program in one variant, with random states of its own, so that several can take turns in one process."""

    variant: str
    step: Callable[[Any], float]
    batches: Iterator[Any]
    model: nn.Module
    initial: list[Tensor]  # the parameters before the first step
    rng: RngState

    def run_step(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Runs one step on the next batch; returns its loss and its duration in units of `clock`."""
        batch = next(self.batches)
        self.rng.enter()
        start = clock()
        loss = self.step(batch)
        duration = clock() - start
        self.rng.leave()
        return loss, duration

    def run_steps(self, steps: int) -> Iterator[tuple[float, float]]:
        """Runs `steps` steps; yields each one's loss and seconds."""
        for _ in range(steps):
            yield self.run_step(time.perf_counter)

    def stats(self) -> Any:
        """Returns what coexec counts about its step; None for the other variants."""
        return self.step.stats() if isinstance(self.step, CoexecStep) else None

    def explain(self) -> str:
        """Returns what coexec says about its step; "" for the other variants."""
        return self.step.explain() if isinstance(self.step, CoexecStep) else ""

    def wait_native(self, timeout_s: float) -> None:
        """Waits while coexec's native core is being built (the first run on a machine)."""
        deadline_s = time.monotonic() + timeout_s
        while isinstance(self.step, CoexecStep) and self.step.stats().phase == "building":
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.2)

    def wait_compiled(self, timeout_s: float) -> bool:
        """Waits until coexec's background compilation has finished; False if it has not after `timeout_s`."""
        return not isinstance(self.step, CoexecStep) or bool(self.step.wait_compiled(timeout_s))

    def parameters(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all parameters before the first step and now, each flattened to float64[n]."""
        now = [parameter.detach() for parameter in self.model.parameters()]
        flat = [torch.cat([p.flatten().double() for p in tensors]).numpy() for tensors in (self.initial, now)]
        return flat[0], flat[1]

    def close(self) -> None:
        """Nothing to end: the program lives in this process."""


class RngState:
    """The process's random generators as one runner sees them: `enter` before its code runs, `leave` after it."""

    def __init__(self) -> None:
        self.leave()

    def enter(self) -> None:
        """Makes this runner's state the process's state."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def leave(self) -> None:
        """Keeps the process's state as this runner's state."""
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()


def make_runner(program: str, variant: str, steps: int, seed: int = SEED) -> Runner:
    """Builds a program in one variant.

    Args:
        program: "gpt", "digits", or the name of any module with such a `build`.
        steps: length of the learning-rate schedule.

    Raises:
        Unavailable: coexec cannot be imported.
    """
    module = importlib.import_module(PROGRAMS.get(program, program))
    step, batches, model = module.build(seed, steps=steps, **_decorations(module, variant))
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    return Runner(variant, step, batches, model, initial, RngState())


def _decorations(module: ModuleType, variant: str) -> dict[str, Any]:
    if variant == EAGER:
        return {}
    if variant == TORCH_COMPILE_MODEL:
        return {"compile_model": torch.compile}
    if variant == TORCH_COMPILE:
        # A learning rate that is a float would make torch.compile compile the update once more.
        warnings.filterwarnings("ignore", message=".*Profiler record function.*")
        return {
            "compile_model": torch.compile,
            "compile_update": torch.compile,
            "lr": torch.tensor(module.PEAK_LR),
        }
    if variant == COEXEC:
        return {"decorate": _coexec_compile()}
    raise ValueError(f"unknown variant {variant!r}")


def _coexec_compile() -> Callable[[Any], Any]:
    try:
        import coexec
    except ImportError as error:
        raise Unavailable(str(error)) from error
    if not hasattr(coexec, "compile"):
        raise Unavailable("coexec has no compile()")
    compile_step: Callable[[Any], Any] = coexec.compile
    return compile_step
