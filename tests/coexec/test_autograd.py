"""Hooks, custom functions, checkpoints, derivatives of derivatives inside the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, labels, mlp, weighted


def test_tensor_hooks_edit_gradients_in_order() -> None:
    def make() -> Program:
        log: list[Any] = []

        def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            h = x @ w
            h.register_hook(lambda g: log.append(g.sum().item()) or g * 2)
            first = h.register_hook(lambda g: log.append("removed"))
            first.remove()
            y = h.tanh()
            y.register_hook(lambda g: g.clamp(-1, 1))
            y.retain_grad()
            y.sum().backward()
            return y.grad

        program = weighted(body)
        weights = program.watch
        program.watch = lambda: (weights(), log)
        return program

    check(make)


def test_module_hooks_of_every_kind() -> None:
    def make() -> Program:
        model, log = mlp(), []
        model[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))
        model[0].register_forward_hook(lambda m, a, out: log.append(out.mean().item()) or out + 1)
        model[2].register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,))
        model[2].register_full_backward_hook(lambda m, gi, go: log.append(tuple(go[0].shape)))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.norm().item()))
            p.register_hook(lambda g: g * 1.5)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, log))

    check(make)


def test_hooks_added_and_removed_between_steps() -> None:
    def make() -> Program:
        model, log, handles = mlp(), [], []

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        def args(i: int) -> tuple[Any, ...]:
            if i == 4:
                handles.append(model[0].register_forward_hook(lambda m, a, out: out * 2))
                handles.append(model[2].weight.register_hook(lambda g: log.append(g.sum().item())))
            if i == 9:
                [h.remove() for h in handles]
            return batch(i), labels(i)

        return Program(step, args, lambda: (model, log))

    check(make, n=14)


def test_optimizer_in_backward() -> None:
    def make() -> Program:
        model = mlp()
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def update(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, list(optimizers.values())))

    check(make)


class Scaled(torch.autograd.Function):
    """Saves tensors and Python objects."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        ctx.scale, ctx.note = scale, {"calls": [1]}
        total = x.sum()
        ctx.mark_non_differentiable(total)
        return (x @ w) * scale, total

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        assert ctx.note["calls"] == [1]
        needs = ctx.needs_input_grad
        return g @ w.t() * ctx.scale if needs[0] else None, x.t() @ g * ctx.scale if needs[1] else None, None


class Doubled(torch.autograd.Function):
    """Writes its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


def test_custom_functions() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        y, total = Scaled.apply(x, w, 0.5)
        z = Doubled.apply(y + 1)
        z.pow(2).sum().backward()
        return total.item(), z.detach(), total.requires_grad

    check(lambda: weighted(body))


def test_custom_function_with_setup_context_and_vmap() -> None:
    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 3 * x * x * g

    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        Cube.apply(x @ w).sum().backward()
        return torch.vmap(Cube.apply)(x)

    check(lambda: weighted(body))


def test_double_backward_and_gradient_penalty() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        x = x.clone().requires_grad_()
        score = torch.tanh(x @ w).sum()
        (g,) = torch.autograd.grad(score, x, create_graph=True)
        penalty = (g.norm(dim=1) - 1).pow(2).mean()
        (score + penalty).backward()
        return penalty.item(), g.detach()

    check(lambda: weighted(body))


def test_hessian_vector_products_and_third_order() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        loss = (x @ w).pow(4).mean()
        (g,) = torch.autograd.grad(loss, w, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), w, create_graph=True)
        h.sum().backward()
        return torch.autograd.functional.hvp(lambda v: (x @ v).exp().mean(), w.detach(), torch.ones(4, 4))

    check(lambda: weighted(body))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_with_dropout(reentrant: bool) -> None:
    def make() -> Program:
        block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4))

        def step(x: torch.Tensor) -> float:
            block.zero_grad()
            x = x.clone().requires_grad_()
            h = checkpoint(block, x, use_reentrant=reentrant)
            loss = checkpoint(block, h, use_reentrant=reentrant).pow(2).mean()
            loss.backward()
            return loss.item() + x.grad.sum().item()

        return Program(step, lambda i: (batch(i),), lambda: block)

    check(make)


def test_checkpoint_sequential_and_early_stop() -> None:
    def make() -> Program:
        block = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])

        def step(x: torch.Tensor) -> torch.Tensor:
            block.zero_grad()
            checkpoint_sequential(block, 2, x.requires_grad_(), use_reentrant=False).sum().backward()
            return x.grad

        return Program(step, lambda i: (batch(i),), lambda: block)

    check(make)


def test_retain_graph_and_two_backwards() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        y = torch.tanh(x @ w)
        a, b = y.sum(), y.pow(2).sum()
        a.backward(retain_graph=True)
        first = w.grad.clone()
        b.backward()
        return first, w.grad

    check(lambda: weighted(body))


def test_backward_twice_raises_as_eager() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        loss = (x @ w).exp().sum()
        loss.backward()
        loss.backward()

    check(lambda: weighted(body), raises=(RuntimeError,), phase=None, max_fallbacks=10, min_co_executed=0)


def test_gradients_of_inputs_and_with_given_gradient() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        x.requires_grad_()
        y = x @ w
        y.backward(torch.ones_like(y) * 0.5, inputs=[x])
        gs = torch.autograd.grad([y.sum()], [x, w], allow_unused=True) if False else None
        return x.grad, w.grad, gs

    check(lambda: weighted(body))


def test_unused_inputs_and_materialized_grads() -> None:
    def body(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        loss = (x @ w).sum()
        unused = torch.autograd.grad(loss, [w, v], allow_unused=True, retain_graph=True)
        zeros = torch.autograd.grad(loss, [w, v], materialize_grads=True)
        return unused, zeros

    check(lambda: weighted(body, 2))


def test_batched_gradients() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = (x @ w).sum(0)
        return torch.autograd.grad(y, w, torch.eye(4), is_grads_batched=True)

    check(lambda: weighted(body))
