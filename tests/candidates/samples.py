"""Programs of the kinds that candidates meet, captured as `torch.compile` captures them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from coexec.backends.candidates.program import Program

Model = tuple[Callable[..., Any], tuple[Any, ...]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Linear(8, 5)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.relu(self.second(y) + y).mean((2, 3)))


class Anchors(nn.Module):
    """Two of its outputs are the same in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("anchors", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.layer(x).tanh(), self.anchors + 1, torch.zeros(3)


class GruLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.ModuleDict({name: nn.Linear(24, 16) for name in ("z", "r", "n")})

    def forward(self, xs: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outs = []
        for x in xs.unbind(1):
            joined = torch.cat([x, h], 1)
            update, reset = torch.sigmoid(self.cell["z"](joined)), torch.sigmoid(self.cell["r"](joined))
            h = (1 - update) * torch.tanh(self.cell["n"](torch.cat([x, reset * h], 1))) + update * h
            outs.append(h)
        return torch.stack(outs, 1), h


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + nn.functional.gelu(self.out(y.transpose(1, 2).flatten(2)))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1))


def decisions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Integer, bool and scalar outputs."""
    return x.argmax(1), x > 0.5, x.sum(), (x > 0).sum(1)


def aliases(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs of several kinds: an input, a view of one, the same result twice, another order of dimensions."""
    z = torch.sin(x @ y)
    return z, (z * 2).t(), y


class Everything(nn.Module):
    """All of the above in one graph, for backends that compile for seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.conv, self.gru = Mlp(), ConvNet(), GruLoop()
        self.attention, self.embedded = Attention(), Embedded()

    def forward(
        self, x: torch.Tensor, image: torch.Tensor, xs: torch.Tensor, h: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        image = image.contiguous(memory_format=torch.channels_last)
        sequence, last = self.gru(xs, h)
        attended = self.attention(sequence.repeat(1, 1, 2))
        found = self.embedded(ids), self.mlp(x), self.conv(image), sequence, attended.transpose(1, 2)
        return (*found, *decisions(attended.flatten(1)), *aliases(last, x.t()[:, :3].clone()), x.t())


def kinds() -> dict[str, Callable[[], Model]]:
    """name -> a function that makes the model and its inputs."""
    return {
        "mlp": lambda: (Mlp().eval(), (torch.randn(4, 16),)),
        "conv": lambda: (ConvNet().eval(), (torch.randn(2, 3, 16, 16),)),
        "channels_last": lambda: (
            ConvNet().eval().to(memory_format=torch.channels_last),
            (torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last),),
        ),
        "gru": lambda: (GruLoop().eval(), (torch.randn(2, 5, 8), torch.zeros(2, 16))),
        "attention": lambda: (Attention().eval(), (torch.randn(2, 6, 32),)),
        "embedding": lambda: (Embedded().eval(), (torch.randint(0, 50, (3, 7)),)),
        "decisions": lambda: (decisions, (torch.randn(5, 6),)),
        "aliases": lambda: (aliases, (torch.randn(3, 4), torch.randn(4, 5))),
    }


def everything() -> Model:
    inputs = torch.randn(4, 16), torch.randn(2, 3, 16, 16), torch.randn(2, 5, 8), torch.zeros(2, 16)
    return Everything().eval(), (*inputs, torch.randint(0, 50, (3, 7)))


@functools.cache
def program(kind: str) -> Program:
    """The inference program of one kind; weights are its static inputs."""
    torch.manual_seed(0)
    model, inputs = everything() if kind == "everything" else kinds()[kind]()
    return inference(model, inputs)


def inference(model: Callable[..., Any], inputs: tuple[Any, ...], *, dynamic: bool = False) -> Program:
    """`model` on `inputs` as one inference program."""
    with torch.no_grad():
        (found,) = captured(model, inputs, dynamic=dynamic)
    return found


def handmade(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Program:
    """Traced without AOTAutograd, which keeps outputs that are inputs to itself; training graphs do have them."""
    return Program(make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs), inputs)


def training(model: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Program, Program]:
    """Forward and backward programs."""
    forward, backward = captured(model, inputs, backward=True)
    return forward, backward


def captured(
    model: Callable[..., Any], inputs: tuple[Any, ...], *, dynamic: bool = False, backward: bool = False
) -> list[Program]:
    """Every graph that AOTAutograd hands out, with the live inputs it then runs on."""
    found: list[Program] = []
    weights = {t.data_ptr() for t in _weights(model)} if not backward else set()

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        seen: list[None] = []

        def run(*live: Any) -> Any:
            if not seen:
                seen.append(None)
                static = tuple(i for i, v in enumerate(live) if isinstance(v, torch.Tensor) and v.data_ptr() in weights)
                values = tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in live)
                found.append(Program(module, values, static, training=backward, dynamic=dynamic))
            return module.forward(*live)

        return make_boxed_func(run)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler), dynamic=dynamic)
    results = compiled(*inputs)
    if backward:
        torch.as_tensor(results).sum().backward()
    torch._dynamo.reset()
    return found


def _weights(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
