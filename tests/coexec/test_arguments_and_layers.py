"""Arguments of every type, long and growing programs, layers with habits of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, function_program, labels, mlp, training


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
