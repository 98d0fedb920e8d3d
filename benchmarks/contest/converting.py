"""Does a program convert at all? fullgraph=True, torch.export and TorchScript, each tried in a process of its own.

    python -m benchmarks.contest.converting PROGRAM WAY

A conversion that succeeds is trained for a few steps and compared with eager, logs included: what is silently wrong is
no conversion (the paper's Table 1). Sizes are tiny; graphs are captured, but run by `aot_eager`: the question is what
can be captured, and a compiler would only add minutes and rounding.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from benchmarks.programs import catalog
from benchmarks.programs.program import Program
from examples.demo.child import serve

STEPS = 12
TOLERANCE = 1e-3  # relative, of losses and logs: decompositions round differently
EXPLANATION, PROGRAMS, LONGEST_REASON = "Explanation:", "benchmarks/programs", 240

Step = Callable[[Any], Any]


def fullgraph_models(program: Program) -> Step:
    """torch.compile(model, fullgraph=True)."""
    for model in program.models.values():
        model.compile(fullgraph=True, backend="aot_eager")
    return program.step


def fullgraph_step(program: Program) -> Step:
    """torch.compile(step, fullgraph=True), calls of autograd traced."""
    torch._dynamo.config.trace_autograd_ops = True
    step: Step = torch.compile(program.step, fullgraph=True, backend="aot_eager")
    return step


def exported(program: Program) -> Step:
    """torch.export of each model with what the first step gives it, every size free that can be."""

    def convert(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        free = tree_map(free_sizes, kwargs or args)
        module = torch.export.export(model, args, kwargs, dynamic_shapes=free, strict=False).module()
        own = {id(parameter) for parameter in model.parameters()}
        if not {id(parameter) for parameter in module.parameters()} <= own:
            share_parameters(module, model)
        return module

    return on_first_call(program, convert)


def scripted(program: Program) -> Step:
    """torch.jit.script of each model."""
    return on_first_call(program, lambda model, args, kwargs: torch.jit.script(model))


def traced(program: Program) -> Step:
    """torch.jit.trace of each model, with what the first step gives it."""

    def convert(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs:
            return torch.jit.trace(model, example_kwarg_inputs=kwargs, check_trace=False)
        return torch.jit.trace(model, args, check_trace=False)

    return on_first_call(program, convert)


WAYS: dict[str, Callable[[Program], Step]] = {
    "fullgraph model": fullgraph_models,
    "fullgraph step": fullgraph_step,
    "export model": exported,
    "jit.script model": scripted,
    "jit.trace model": traced,
}


def free_sizes(value: Any) -> dict[int, Any] | None:
    """Returns what torch.export is told of one argument: all sizes of a tensor may change."""
    if not isinstance(value, Tensor):
        return None
    return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)


def on_first_call(program: Program, convert: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> Step:
    """Replaces each model's forward by what `convert` makes of it when it is first called.

    Conversions that run the model draw random numbers, which is undone.
    """
    for model in program.models.values():
        _convert_when_called(model, convert)
    return program.step


def _convert_when_called(model: nn.Module, convert: Callable[..., Any]) -> None:
    def first(*args: Any, **kwargs: Any) -> Any:
        del model.__dict__["forward"]
        state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
        converted = convert(model, args, kwargs)
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        model.__dict__["forward"] = lambda *args, **kwargs: converted(*args, **kwargs)
        return model.forward(*args, **kwargs)

    model.__dict__["forward"] = first


def share_parameters(module: nn.Module, model: nn.Module) -> None:
    """Makes the converted module train the model's own parameters and buffers."""
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        parent = module.get_submodule(owner)
        if hasattr(parent, leaf):
            setattr(parent, leaf, tensor)


def verdict(name: str, way: str) -> dict[str, str]:
    """Returns {"verdict": "yes", "wrong" or "no", "why": ...}."""
    expected = train(catalog.make(name, tiny=True), lambda program: program.step)
    torch.compiler.reset()
    try:
        found = train(catalog.make(name, tiny=True), WAYS[way])
    except Exception as error:
        return {"verdict": "no", "why": reason(error)}
    for number, (a, b) in enumerate(zip(expected, found, strict=True), start=1):
        if where := difference(a, b, "loss"):
            return {"verdict": "wrong", "why": f"step {number}: {where}"}
    return {"verdict": "yes", "why": ""}


def train(program: Program, convert: Callable[[Program], Step]) -> list[Any]:
    """Returns what each of a few steps returned and logged, as plain data."""
    step = convert(program)
    seen: list[Any] = []
    for _ in range(STEPS):
        loss = float(step(next(program.batches)))
        seen.append([loss, {name: frozen(log) for name, log in program.extras.items()}])
    return seen


def frozen(value: Any) -> Any:
    """A copy of a log that later steps do not change; what is no log is left out."""
    if isinstance(value, dict):
        return {str(key): frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().tolist()
    return value if isinstance(value, int | float | str | None) else None


def difference(a: Any, b: Any, path: str) -> str:
    """Returns where two logs differ by more than rounding, "" if nowhere."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next(filter(None, (difference(a[key], b[key], key) for key in a)), "")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(filter(None, (difference(x, y, path) for x, y in zip(a, b, strict=True))), "")
    if isinstance(a, float) and isinstance(b, float):
        same = math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (a != a and b != b)
        return "" if same else f"{path} is {b:.6g}, eager's is {a:.6g}"
    return "" if a == b else f"{path} is {str(b)[:60]}, eager's is {str(a)[:60]}"


def reason(error: BaseException) -> str:
    """Returns what a failed conversion complains about, and the program's line that it names, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if not line.startswith(("from user code", "File "))), "")
    explained = next((line for line in lines if line.startswith(EXPLANATION)), "").removeprefix(EXPLANATION)
    places = re.findall(rf'File ".*?{PROGRAMS}/(\w+\.py)", line (\d+)', str(error))
    at = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    words = re.sub(r"/\S*/site-packages/", "", explained.strip() or told)  # where it is installed tells nobody anything
    return f"{type(error).__name__}: {words[:LONGEST_REASON]}{at}"


class Worker:
    """What the child can be asked to do."""

    def __init__(self, name: str, way: str) -> None:
        self.name, self.way = name, way

    def do_ready(self) -> dict[str, Any]:
        """Answers at once."""
        return {}

    def do_verdict(self) -> dict[str, Any]:
        """Converts, trains, compares."""
        warnings.simplefilter("ignore")  # TorchScript's deprecation, its tracer's warnings
        return verdict(self.name, self.way)


if __name__ == "__main__":
    serve(Worker)
