"""What changes between steps, and what was compiled elsewhere: modules, parameters, torch.compile, TorchScript."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check, exact
from tests.coexec.programs import batch, labels, mlp, training


def test_modules_replaced_between_steps() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def args(i: int) -> tuple[Any, ...]:
            if i == 5:
                model[1] = nn.GELU()
            if i == 8:
                model[0] = nn.Linear(4, 8)
            if i == 10:
                model.eval()
            return batch(i), labels(i)

        return Program(training(model, optimizer), args, lambda: (model, optimizer))

    check(make, n=16, max_fallbacks=4)


def test_load_state_dict_between_steps() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        saved: list[Any] = []

        def args(i: int) -> tuple[Any, ...]:
            if i == 4:
                saved[:] = [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())]
            if i in (7, 10):
                model.load_state_dict(saved[0], assign=i == 10)
                optimizer.load_state_dict(saved[1])
            return batch(i), labels(i)

        return Program(training(model, optimizer), args, lambda: (model, optimizer))

    check(make, n=16)


@pytest.mark.parametrize("how", ["data", "setattr", "tied", "storage", "copy"])
def test_a_parameter_is_replaced(how: str) -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) - x).pow(2).mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.1 * g
            return loss.detach()

        def args(i: int) -> tuple[Any, ...]:
            if i == 6 and how == "data":
                model[0].weight.data = torch.ones(4, 4) * 0.1
            elif i == 6 and how == "setattr":
                model[0].weight = nn.Parameter(torch.ones(4, 4) * 0.1)
            elif i == 6 and how == "tied":
                model[2].weight = model[0].weight
            elif i == 6 and how == "storage":
                model[2].weight.data = model[0].weight.data.view(4, 4)
            elif i == 6 and how == "copy":
                model[0].weight.data.copy_(torch.eye(4))
            return (batch(i),)

        return Program(step, args, lambda: model)

    check(make, n=12)


def test_a_buffer_is_reassigned_inside_the_step() -> None:
    def make() -> Program:
        layer = nn.Module()
        layer.register_buffer("cache", torch.zeros(4))

        def step(x: torch.Tensor) -> torch.Tensor:
            layer.cache = layer.cache * 0.9 + x.mean(0)
            layer.cache[0] = 1.0
            return layer.cache.sum()

        return Program(step, lambda i: (batch(i),), lambda: layer)

    check(make)


def test_a_parameter_that_moves_to_another_thread_count() -> None:
    def make() -> Program:
        def args(i: int) -> tuple[Any, ...]:
            torch.set_num_threads(2 if i >= 5 else 1)
            return (batch(i, 64, 64),)

        return Program(lambda x: (x @ x).sum(0), args)

    check(make)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_model_under_torch_compile_inside_the_step(backend: str) -> None:
    def make() -> Program:
        torch._dynamo.reset()
        model = mlp()
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Program(training(compiled, optimizer), lambda i: (batch(i), labels(i)), lambda: (model, optimizer))  # type: ignore[arg-type]

    check(make)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torch_compile_still_compiles_outside_of_steps() -> None:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.set_stance("default")  # whatever earlier tests left
    torch._dynamo.reset()
    counter = CompileCounter()
    outside = torch.compile(lambda x: torch.relu(x) + 1, backend=counter)
    step = exact(lambda x: x * 2)
    for i in range(5):
        step(batch(i))
        outside(batch(i))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_steps_on_several_threads_leave_torch_compile_switched_on() -> None:
    import torch._dynamo.eval_frame as frames

    def work() -> None:
        step = exact(lambda x: torch.tanh(x @ x).sum().item())
        for _ in range(100):
            step(torch.ones(8, 8))

    threads = [threading.Thread(target=work) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    stance, frames._stance = frames._stance.stance, frames.DynamoStance()
    assert stance == "default"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torch_compile_called_for_the_first_time_inside_a_step() -> None:
    def make() -> Program:
        model, box, calls = mlp(), [], [0]

        def step(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 6:
                box.append(torch.compile(model, backend="aot_eager"))
            h = x * 2
            return (box[0] if box else model)(h).sum()

        return Program(step, lambda i: (batch(i),))

    check(make, n=14)


def test_scripted_and_traced_modules() -> None:
    def make() -> Program:
        model = torch.jit.trace(mlp(), batch(0))

        def step(x: torch.Tensor) -> Any:
            return model(x).sum().item(), model(x * 2)

        return Program(step, lambda i: (batch(i),))

    check(make, phase=None, max_fallbacks=10, min_co_executed=0)


def test_fx_and_export_inside_a_step() -> None:
    def make() -> Program:
        graph = torch.fx.symbolic_trace(mlp())
        return Program(lambda x: graph(x).sum(0), lambda i: (batch(i),), lambda: graph)

    check(make)


def test_profiler_annotations_are_present() -> None:
    model = mlp()
    step = exact(training(_annotated(model), torch.optim.SGD(model.parameters(), lr=0.1)))
    for i in range(4):
        step(batch(i), labels(i))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for i in range(3):
            step(batch(i), labels(i))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["my forward"] == 3


def _annotated(model: nn.Module) -> Any:
    def forward(x: torch.Tensor) -> Any:
        with torch.profiler.record_function("my forward"):
            return model(x)

    return forward


CAPTURED_EARLY = """
import torch
array_of_before = torch.arange(3.0)
import coexec
from torch import tensor, tensor_split, manual_seed
tolist, new_tensor, data_ptr, numpy = (getattr(torch.Tensor, n) for n in ("tolist", "new_tensor", "data_ptr", "numpy"))
view = array_of_before.numpy()  # the core is not loaded: this memory is NumPy's all the same
from coexec.intercept.native import native_if_ready
from coexec.intercept import native
assert native._module is None
READS = {
    "tensor": lambda x: tensor([v.sum() for v in x]),
    "tensor_split": lambda x: tensor_split(x, torch.tensor([1, 2]) * 1)[0],
    "manual_seed": lambda x: (torch.rand(2), manual_seed(4), torch.rand(2))[2],
    "tolist": lambda x: torch.tensor(tolist(x)),
    "new_tensor": lambda x: new_tensor(x, [1.0]),
    "numpy": lambda x: torch.from_numpy(numpy(x).copy()),
    "data_ptr": lambda x: torch.tensor(data_ptr(x) != 0),
}

def after_work(read):
    def step(x):
        z = torch.ones(64, 64)
        for _ in range(20):
            z = torch.tanh(z @ z)
        return read(x * 2 + z[0, 0] * 0)
    return step

for name, read in READS.items():
    step = after_work(read)
    compiled = coexec.compile(step, backend="replay", numerics="exact")
    for i in range(8):
        torch.manual_seed(i); want = step(torch.ones(3, 2) * i)
        torch.manual_seed(i); assert torch.equal(compiled(torch.ones(3, 2) * i), want), name
    assert compiled.stats().phase == "co-execution", (name, compiled.explain())

@coexec.compile(backend="replay", numerics="exact")
def refilled(x):
    z = torch.ones(64, 64)
    for _ in range(20):
        z = torch.tanh(z @ z)
    y = x + z[0, 0] * 0
    view[:] = -1
    return y

for i in range(6):
    view[:] = i
    assert refilled(array_of_before).tolist() == [i, i, i], i
print("all right")
"""


def test_functions_captured_before_the_core_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", CAPTURED_EARLY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all right\n"


CAPTURED_BEFORE_THE_IMPORT = """
import torch
tolist = torch.Tensor.tolist
import coexec
step = coexec.compile(lambda x: tolist(torch.tanh(x) * 2), backend="replay", numerics="exact")
failed = []
for i in range(8):
    try:
        step(torch.ones(3, 2) * i)
    except RuntimeError as error:
        failed.append(error)
assert len(failed) == 1, failed
assert "coexec.materialize" in failed[0].__notes__[0]
assert step.stats().phase == "eager"
"""


def test_a_read_captured_before_coexec_raises_once_with_advice() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CAPTURED_BEFORE_THE_IMPORT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torch_compile_traces_through_the_wrapped_functions() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool1d(x[None], 2)[0]
        return pooled + torch.tensor([1.0, 2.0]) + torch.as_tensor(2.0)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch(0)), function(batch(0)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torchscript_knows_the_wrapped_functions() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        pooled = torch.max_pool1d(x[None], 2)[0]
        return pooled + torch.tensor([1.0, 2.0]) + torch.as_tensor(2.0) + torch.tensor_split(x, 2, dim=1)[0].sum()

    assert torch.equal(torch.jit.script(function)(batch(0)), function(batch(0)))
