"""The ways a program is run: what is done to a program, from the outside, before its first step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.programs.program import Program

Step = Callable[[Any], Any]

EAGER, EAGER_AGAIN, DISTURBED = "eager", "eager again", "eager disturbed"
COEXEC, COEXEC_KEPT = "coexec", "coexec kept"
COEXEC_LAZY, COEXEC_REPLAY = "coexec lazy", "coexec replay"
KEPT = (COEXEC_KEPT, COEXEC_LAZY, COEXEC_REPLAY)
DISTURBANCE = 1e-7
"""Relative size of what is added to the parameters of DISTURBED: about float32's rounding."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of running a program."""

    name: str
    what: str  # in words, for the page
    apply: Callable[[Program], Step]  # changes the program's objects if it must; returns the step to call


def plain(program: Program) -> Step:
    """Eager, as it is."""
    return program.step


def disturbed(program: Program) -> Step:
    """Eager from parameters that differ by rounding: how far two right runs drift apart."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model in program.models.values():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1.0 + DISTURBANCE * noise.to(parameter.dtype))
    return program.step


def compiled_models(program: Program, **options: Any) -> Step:
    """torch.compile of each model's forward pass, with the backward passes that come with it."""
    for model in program.models.values():
        model.compile(**options)
    return program.step


def nested_breaks(program: Program) -> Step:
    """As `compiled_models`; a graph break inside of a call does not break its callers' graphs."""
    torch._dynamo.config.nested_graph_breaks = True
    return compiled_models(program)


def models_and_optimizers(program: Program) -> Step:
    """As `compiled_models`, and each optimizer's step."""
    warnings.filterwarnings("ignore", message=".*Profiler record function.*")
    for optimizer in program.optimizers.values():
        for group in optimizer.param_groups:  # a number would be compiled in, and compiled anew at each change
            group["lr"] = torch.tensor(group["lr"])
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return compiled_models(program)


def whole_step_compiled_autograd(program: Program) -> Step:
    """torch.compile of the whole step; the backward pass is captured by compiled autograd."""
    torch._dynamo.config.compiled_autograd = True
    step: Step = torch.compile(program.step)
    return step


def whole_step_autograd_ops(program: Program) -> Step:
    """torch.compile of the whole step; Dynamo traces the calls of autograd."""
    torch._dynamo.config.trace_autograd_ops = True
    step: Step = torch.compile(program.step)
    return step


def co_executed(program: Program, **options: Any) -> Step:
    """coexec's decorator on the step; a step for which plain eager is faster is left to it."""
    import coexec
    from coexec.intercept.build import build

    build(verbose=False)  # its duration has a benchmark of its own (bench_warmup)
    step: Step = coexec.compile(program.step, **options)
    return step


def kept(program: Program, **options: Any) -> Step:
    """As `co_executed`, but the step stays in co-execution whether that pays or not: to see what it costs."""
    os.environ["COEXEC_KEEP"] = "1"
    return co_executed(program, **options)


TORCH_COMPILE = (
    Contender("compile", "torch.compile of the models", compiled_models),
    Contender("compile dynamic", "the same, dynamic=True", lambda program: compiled_models(program, dynamic=True)),
    Contender("compile nested", "the same, with nested graph breaks", nested_breaks),
    Contender("compile optimizer", "torch.compile of models and optimizers", models_and_optimizers),
    Contender("compile step ca", "torch.compile of the whole step, compiled autograd", whole_step_compiled_autograd),
    Contender("compile step ops", "torch.compile of the whole step, trace_autograd_ops", whole_step_autograd_ops),
)
OURS = (
    Contender(COEXEC, "coexec.compile(step)", co_executed),
    Contender(COEXEC_KEPT, "the same, kept in co-execution even where plain eager is faster", kept),
    Contender(COEXEC_LAZY, 'kept, mode="lazy"', lambda program: kept(program, mode="lazy")),
    Contender(
        COEXEC_REPLAY,
        'kept, without the compiler: backend="replay", numerics="exact"',
        lambda program: kept(program, backend="replay", numerics="exact"),
    ),
)
EAGERS = (
    Contender(EAGER, "PyTorch as it is", plain),
    Contender(EAGER_AGAIN, "a second process of it: what two equals differ by", plain),
    Contender(DISTURBED, f"from parameters that differ by {DISTURBANCE:g}: how far right runs drift apart", disturbed),
)
CONTENDERS = {contender.name: contender for contender in (*EAGERS, *TORCH_COMPILE, *OURS)}

FIRST = (EAGER_AGAIN, COEXEC, "compile", "compile optimizer", COEXEC_KEPT, COEXEC_LAZY, COEXEC_REPLAY)
"""Those that matter most, in this order: with a budget, the others may find no time left."""
