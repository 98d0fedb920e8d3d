"""The interpreter around a step: tracers, garbage collection, coroutines, warnings, introspection while it runs."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import sys
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import coexec
from tests.coexec.harness import Program, check, exact, seed_all
from tests.coexec.programs import batch, function_program, labels, mlp, training


def trained_twice(around: Any) -> None:
    """Trains eagerly and under coexec with `around()` entered for each call; losses and phase must be right."""
    losses: list[list[float]] = []
    for wrap in (lambda f: f, exact):
        seed_all(0)
        model = mlp()
        step = wrap(training(model, torch.optim.AdamW(model.parameters(), lr=0.01)))
        losses.append([around(lambda i=i, step=step: step(batch(i), labels(i))) for i in range(10)])
    assert losses[0] == losses[1]
    assert step.stats().phase == "co-execution"


def test_under_a_python_tracer() -> None:
    events = [0]

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        events[0] += 1
        return tracer

    def traced(call: Any) -> Any:
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            return call()
        finally:
            sys.settrace(before)

    trained_twice(traced)
    assert events[0] > 100


def test_under_a_python_profiler() -> None:
    def profiled(call: Any) -> Any:
        sys.setprofile(lambda *_: None)
        try:
            return call()
        finally:
            sys.setprofile(None)

    trained_twice(profiled)


def test_with_the_garbage_collector_at_work() -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        trained_twice(lambda call: call())
    finally:
        gc.set_threshold(*threshold)


def test_gc_weakrefs_and_finalizers_inside_the_step() -> None:
    def make() -> Program:
        log: list[str] = []

        def step(x: torch.Tensor) -> Any:
            h = x * 2
            ref = weakref.ref(h, lambda _: log.append("gone"))
            cycle: list[Any] = [h + 1]
            cycle.append(cycle)
            alive = ref() is h
            count = sys.getrefcount(h)
            h = h + 1
            gc.collect()
            objects = sum(type(o) is torch.Tensor for o in gc.get_objects()) > 0
            return alive, count, ref() is None, objects, h, cycle[0]

        return Program(step, lambda i: (batch(i),), lambda: log)

    check(make)


def test_a_finalizer_that_computes() -> None:
    def make() -> Program:
        seen: list[float] = []

        class Holder:
            def __init__(self, t: torch.Tensor) -> None:
                self.t = t

            def __del__(self) -> None:
                seen.append((self.t * 2).sum().item())

        def step(x: torch.Tensor) -> torch.Tensor:
            holder = Holder(x + 1)
            y = holder.t.tanh()
            del holder
            return y

        return Program(step, lambda i: (batch(i),), lambda: seen)

    check(make)


def test_inside_a_coroutine() -> None:
    async def train(wrap: Any) -> list[float]:
        seed_all(0)
        model = mlp()
        step = wrap(training(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        losses = []
        for i in range(8):
            losses.append(step(batch(i), labels(i)))
            await asyncio.sleep(0)
        return losses

    async def both() -> Any:
        return await asyncio.gather(train(lambda f: f), train(exact))

    # seeds interleave, so each run is compared with itself alone
    assert asyncio.run(train(lambda f: f)) == asyncio.run(train(exact))
    assert len(asyncio.run(both())) == 2


def test_a_coroutine_that_awaits_inside_a_block_lets_others_compute() -> None:
    async def inside() -> list[float]:
        out = []
        for i in range(8):
            with coexec.step("awaiting", backend="replay", numerics="exact"):
                h = batch(i) * 2
                await asyncio.sleep(0)
                out.append(h.sum().item())
        return out

    async def beside() -> list[float]:
        out = []
        for i in range(8):
            out.append((batch(i) * 3).sum().item())
            await asyncio.sleep(0)
        return out

    async def both() -> Any:
        return await asyncio.gather(inside(), beside())

    first, second = asyncio.run(both())
    assert first == [(batch(i) * 2).sum().item() for i in range(8)]
    assert second == [(batch(i) * 3).sum().item() for i in range(8)]


@pytest.mark.xfail(strict=True, reason="warnings of the graph thread go to stderr")
def test_a_warning_of_a_kernel_comes_to_python() -> None:
    def make() -> Program:
        caught: list[str] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                y = x[:1, :1].var()
                y.item()
            caught.extend(str(w.message)[:40] for w in seen)
            return y.isnan()

        return Program(step, lambda i: (batch(i),), lambda: caught)

    check(make)


def test_recursion_error_is_the_users_to_catch() -> None:
    def step(x: torch.Tensor) -> Any:
        def down(t: torch.Tensor) -> torch.Tensor:
            return down(t + 1)

        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(len_of_stack() + 60)
        try:
            down(x)
        except RecursionError:
            return x * 2
        finally:
            sys.setrecursionlimit(limit)
        raise AssertionError("no end of the stack")

    check(lambda: function_program(step), phase=None, max_fallbacks=10, min_co_executed=0)


def len_of_stack() -> int:
    """How deep Python is now."""
    frame, n = sys._getframe(), 0
    while frame is not None:
        frame, n = frame.f_back, n + 1  # type: ignore[assignment]
    return n


def test_asking_while_the_step_runs() -> None:
    box: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        box[0].stats(), box[0].explain(), str(box[0].trace_graph), repr(box[0])
        return h + 1

    box.append(exact(step))
    for i in range(8):
        assert torch.equal(box[0](batch(i)), batch(i) * 2 + 1)
    assert box[0].stats().phase == "co-execution"


def test_asking_from_another_thread() -> None:
    step = exact(lambda x: (x * 2).tanh().sum().item())
    stop, errors = threading.Event(), []

    def ask() -> None:
        try:
            while not stop.is_set():
                step.stats(), step.explain(), str(step.trace_graph), step.wait_compiled(0.0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for i in range(100):
        step(batch(i % 5, 6 - i % 3))
    stop.set()
    thread.join()
    assert not errors


def test_reset_while_the_step_runs() -> None:
    def step(x: torch.Tensor, reset: bool) -> torch.Tensor:
        h = x * 2
        if reset:
            coexec.reset()
        return h + 1

    compiled = exact(step)
    for i in range(12):
        assert torch.equal(compiled(batch(i), i == 6), batch(i) * 2 + 1)
    assert compiled.stats().phase == "co-execution"


def test_the_step_object_deleted_while_it_runs() -> None:
    box: list[Any] = []

    def step(x: torch.Tensor, last: bool) -> torch.Tensor:
        h = x * 2
        if last:
            box.clear()
            gc.collect()
        return h + 1

    box.append(exact(step))
    for i in range(6):
        result = box[0](batch(i), i == 5)
    assert torch.equal(result, batch(5) * 2 + 1)
    assert not box


def test_steps_on_short_lived_threads() -> None:
    total = torch.zeros(3)

    @exact
    def step(x: torch.Tensor) -> None:
        total.add_(x * 2)

    for _ in range(12):
        thread = threading.Thread(target=step, args=(torch.ones(3),))
        thread.start()
        thread.join()
    assert total.tolist() == [24.0] * 3
    assert step.stats().phase == "co-execution"


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def in_child(step: Any, queue: Any) -> None:
    queue.put([step(torch.full((2,), float(i))).tolist() for i in range(5)])


def test_a_pickled_step_in_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=in_child, args=(exact(doubled), queue))
    process.start()
    values = queue.get(timeout=50)
    process.join(20)
    assert process.exitcode == 0
    assert values == [[2.0 * i] * 2 for i in range(5)]


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "vjp"])
def test_a_step_called_from_a_function_transform(transform: str) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x.tanh() * 2).sum()

    def apply(f: Any, x: torch.Tensor) -> Any:
        if transform == "vmap":
            return torch.vmap(f)(x)
        if transform == "grad":
            return torch.func.grad(f)(x)
        if transform == "jvp":
            return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
        return torch.func.vjp(f, x)[1](torch.ones(()))[0]

    step = exact(body)
    for i in range(8):
        assert torch.equal(apply(step, batch(i)), apply(body, batch(i)))


def test_a_step_recomputed_by_a_checkpoint() -> None:
    def run_with(f: Any) -> Any:
        w = torch.ones(4, requires_grad=True)
        out = []
        for i in range(8):
            h = torch.utils.checkpoint.checkpoint(lambda x: f(x * w).sum(), batch(i), use_reentrant=False)
            (g,) = torch.autograd.grad(h, w)
            out.append(g)
        return torch.stack(out)

    body = lambda x: (x.tanh() * 2).exp()  # noqa: E731
    assert torch.equal(run_with(body), run_with(exact(body)))


@pytest.mark.xfail(strict=True, reason="special tensors have no external number")
def test_a_step_under_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    step = exact(lambda x: (x * 2).sum(0))
    for i in range(5):
        step(batch(i))
    with FakeTensorMode() as mode:
        assert step(mode.from_tensor(batch(0))).shape == (4,)
    assert torch.equal(step(batch(1)), (batch(1) * 2).sum(0))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_step_called_by_compiled_code() -> None:
    torch._dynamo.reset()
    step = exact(lambda x: x.tanh() * 2)
    outer = torch.compile(lambda x: step(x + 1) + 1, backend="aot_eager")
    for i in range(6):
        assert torch.equal(outer(batch(i)), (batch(i) + 1).tanh() * 2 + 1)


def test_two_steps_that_share_a_model() -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train = training(model, optimizer)

        @torch.no_grad()
        def evaluate(x: torch.Tensor, y: torch.Tensor) -> float:
            model.eval()
            accuracy = model(x).argmax(1).eq(y).float().mean().item()
            model.train()
            return accuracy

        steps = {"train": train, "evaluate": evaluate}
        return Program(
            lambda x, y: (steps["train"](x, y), steps["evaluate"](x, y)),
            lambda i: (batch(i), labels(i)),
            lambda: (model, optimizer),
        )

    check(make)
    seed_all(0)
    eager = make()
    expected = [eager.step(batch(i), labels(i)) for i in range(8)]
    seed_all(0)
    apart = make()
    steps = apart.step.__closure__[0].cell_contents  # type: ignore[attr-defined]
    train, evaluate = exact(steps["train"]), exact(steps["evaluate"])
    assert [(train(batch(i), labels(i)), evaluate(batch(i), labels(i))) for i in range(8)] == expected
    assert train.stats().phase == evaluate.stats().phase == "co-execution"


def test_numpy_numbers_as_arguments() -> None:
    def step(x: torch.Tensor, i: int) -> Any:
        return (
            x * np.float64(0.1 * i),
            x + np.int64(i),
            x.sum(int(np.int32(1))),
            x.clamp(max=np.float32(i)),
            np.float32(i) * x,
        )

    check(lambda: Program(step, lambda i: (batch(i), i)))


def test_large_integers_booleans_and_complex_numbers() -> None:
    def step(x: torch.Tensor, i: int) -> Any:
        n = x.long()
        return n + (2**53 + i), n * True, (x > 0) * i, x * (1 + 1j * i), n - 2**62, x.bool() | bool(i % 2)

    check(lambda: Program(step, lambda i: (batch(i), i)), n=14)


def test_strings_types_and_flags_select_paths() -> None:
    kinds = [torch.float32, torch.float64, torch.bfloat16]

    def step(x: torch.Tensor, i: int) -> Any:
        y = x.to(kinds[i % 3]).sum(0, keepdim=i % 2 == 0)
        image = nn.functional.interpolate(x.view(1, 1, 6, 4), size=(3, 2), mode=["nearest", "bilinear"][i % 2])
        return y, image, x.sort(descending=i % 2 == 1).values, x.mean(None if i % 2 else 0)

    check(lambda: Program(step, lambda i: (batch(i), i)), n=20, max_fallbacks=6)


def test_lists_of_tensors_that_grow() -> None:
    def make() -> Program:
        history: list[torch.Tensor] = []

        def step(x: torch.Tensor) -> Any:
            history.append(x.mean(0))
            del history[:-5]
            return torch.stack(history).mean(0), torch.cat(history), torch._foreach_norm(history)

        return Program(step, lambda i: (batch(i),), lambda: history)

    check(make, n=16, max_fallbacks=5)


def test_a_very_long_step() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for k in range(6000):
            x = x + k
        return x

    check(lambda: function_program(step), n=5, min_co_executed=2)


def test_empty_memory_is_filled_under_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        check(lambda: function_program(lambda x: (torch.empty(5), x.new_empty(3), torch.empty_like(x) * 0 + x)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_overloads_called_by_name() -> None:
    def step(x: torch.Tensor) -> Any:
        a = torch.ops.aten.add.Tensor(x, x, alpha=2)
        b = torch.ops.aten.mul(x, 2)
        c = torch._C._VariableFunctions.tanh(x)
        d = torch.ops.aten.relu_(x + 0)
        return a, b, c, d, torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)

    check(lambda: function_program(step))


@pytest.mark.parametrize("call", [0, 1, 2, 3])
def test_an_error_in_an_early_call(call: int) -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        plain = training(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor, bad: bool) -> float:
            loss = plain(x, y)
            if bad:
                raise ValueError(loss)
            return loss

        return Program(step, lambda i: (batch(i), labels(i), i == call), lambda: (model, optimizer))

    check(make, raises=(ValueError,))


LAYERS: dict[str, Any] = {
    "lazy": lambda: nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyBatchNorm1d(), nn.Linear(5, 3)),
    "max_norm": lambda: nn.Sequential(Rows(), nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 3)),
    "pruned": lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(4, 6), "weight", 0.5), nn.Linear(6, 3)),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(4, 3)
    ),
    "momentum none": lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)),
    "bilinear": lambda: Both(nn.Bilinear(4, 4, 3)),
    "prelu": lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Hardswish(), nn.Linear(6, 3)),
    "rnn": lambda: First(nn.RNN(4, 3, 2, nonlinearity="relu", batch_first=True)),
}


class Rows(nn.Module):
    """Two small integers per row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :2].abs() * 3).long().clamp(max=8)


class Both(nn.Module):
    """Calls a layer with its input twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)  # type: ignore[no-any-return]


class First(nn.Module):
    """The first result of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(6, 1, 4))[0][:, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_with_habits(name: str) -> None:
    def make() -> Program:
        model = LAYERS[name]()
        held: list[Any] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = nn.functional.cross_entropy(model(x), y)
            if not held:
                held.append(torch.optim.SGD(model.parameters(), lr=0.1))
            held[0].zero_grad()
            loss.backward()
            held[0].step()
            return loss.item()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, held) if held else None)

    check(make, n=12)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_inference_fast_paths_and_quantized_layers() -> None:
    def make() -> Program:
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        ).eval()
        mask = torch.zeros(2, 3, dtype=torch.bool)
        mask[0, 2] = True

        @torch.no_grad()
        def step(x: torch.Tensor) -> Any:
            tokens = x.view(2, 3, 4)
            return encoder(tokens), encoder(tokens, src_key_padding_mask=mask), encoder.layers[0](tokens)

        return Program(step, lambda i: (batch(i),), lambda: encoder)

    check(make)


def test_optimizer_hooks_and_param_group_edits_inside() -> None:
    def make() -> Program:
        model, log = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda o, a, k: log.append(o.param_groups[0]["lr"]))
        optimizer.register_step_post_hook(lambda o, a, k: log.append(model[0].weight.sum().item()))

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, loss.item())
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, log[-4:]))

    check(make)


def test_distributed_data_parallel_of_one() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:

        def make() -> Program:
            model = nn.parallel.DistributedDataParallel(
                nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x: torch.Tensor, y: torch.Tensor) -> float:
                optimizer.zero_grad()
                with model.no_sync():
                    nn.functional.cross_entropy(model(x[:3]), y[:3]).backward()
                loss = nn.functional.cross_entropy(model(x[3:]), y[3:])
                loss.backward()
                total = loss.detach().clone()
                dist.all_reduce(total)
                optimizer.step()
                return total.item()

            return Program(step, lambda i: (batch(i), labels(i)), lambda: (model.module, optimizer))

        check(make, phase=None, max_fallbacks=10, min_co_executed=0)
    finally:
        dist.destroy_process_group()
