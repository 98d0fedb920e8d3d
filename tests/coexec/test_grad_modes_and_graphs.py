"""Function transforms, forward mode, grad modes, graphs that outlive a call, backward passes outside the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, function_program, labels, mlp, weighted


def test_functional_transforms() -> None:
    def make() -> Program:
        model = mlp()
        params = {k: v.detach() for k, v in model.named_parameters()}

        def loss_of(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(torch.func.functional_call(model, p, (x[None],)), y[None])

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
            value, jv = torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))
            jac = torch.func.jacrev(lambda t: t.pow(2).sum(0))(x)
            hess = torch.func.hessian(lambda t: t.pow(3).sum())(x[0])
            fwd = torch.func.jacfwd(torch.sin)(x[0])
            _, pull = torch.func.vjp(torch.exp, x)
            return per_sample, value, jv, jac, hess, fwd, pull(torch.ones_like(x))

        return Program(step, lambda i: (batch(i), labels(i)), lambda: model)

    check(make)


def test_vmap_with_randomness() -> None:
    def step(x: torch.Tensor) -> Any:
        different = torch.vmap(lambda r: nn.functional.dropout(r, 0.5), randomness="different")(x)
        same = torch.vmap(lambda r: r + torch.randn(4), randomness="same")(x)
        return different, same

    check(lambda: function_program(step))


def test_forward_mode_dual_numbers() -> None:
    def step(x: torch.Tensor) -> Any:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            out = torch.autograd.forward_ad.unpack_dual((dual * dual).sin())
            return out.primal + 0, out.tangent + 0

    check(lambda: function_program(step))


def test_a_tangent_of_a_moving_slice_keeps_the_slices_offset() -> None:
    """Forward mode makes tangents in the layout of their value, offset included."""

    def make() -> Program:
        data = batch(0, rows=64)

        def step(x: torch.Tensor) -> torch.Tensor:
            return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]

        return Program(step, lambda i: (data[i : i + 6],))

    check(make)


def test_grad_modes_nested_and_mixed() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        with torch.no_grad():
            a = x @ w
            with torch.enable_grad():
                b = x @ w
            torch.set_grad_enabled(True)
            c = x @ w
            torch.set_grad_enabled(False)
        with torch.inference_mode():
            d = x @ w.detach()
            e = d.is_inference()
        (b + c + x @ w).sum().backward()
        return a, b.requires_grad, c.requires_grad, e, d.clone(), a.requires_grad

    check(lambda: weighted(body))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad", "in turn"])
def test_called_under_a_grad_mode(mode: str) -> None:
    def make() -> Program:
        model, calls = mlp(), [0]

        def around(x: torch.Tensor) -> Any:
            calls[0] += 1
            names = ["no_grad", "inference_mode", "enable_grad"]
            name = names[calls[0] % 3] if mode == "in turn" else mode
            held[0] = getattr(torch, name)()
            held[0].__enter__()
            return (x,)

        held: list[Any] = [None]

        def step(x: torch.Tensor) -> Any:
            y = model(x).reshape(-1)
            z = nn.functional.linear(y[:4], torch.ones(2, 4))
            return y.requires_grad, z.is_inference(), z.detach().clone() if not z.is_inference() else z * 1

        def after(i: int, result: Any) -> None:
            held[0].__exit__(None, None, None)

        return Program(step, lambda i: around(batch(i)), lambda: None, after)

    check(make, n=15, max_fallbacks=4)


def test_inference_mode_inside_the_step() -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()

        def step(x: torch.Tensor) -> Any:
            with torch.inference_mode():
                y = model(x).softmax(-1)
                y[:, 0] += 1
                z = y.view(-1)[3:9].reshape(2, 3).t()
                return y.sum().item(), z + 1, y.argmax(1).tolist()

        return Program(step, lambda i: (batch(i),), lambda: model)

    check(make)


def test_backward_outside_of_a_loss_that_the_step_returns() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(model(x), y)

        def after(i: int, loss: Any) -> None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer), after)

    check(make)


def test_backward_inside_of_a_loss_made_outside() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(loss: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(
            step, lambda i: (nn.functional.cross_entropy(model(batch(i)), labels(i)),), lambda: (model, optimizer)
        )

    check(make)


def test_a_graph_kept_over_two_calls() -> None:
    def make() -> Program:
        w, held = torch.ones(4, requires_grad=True), [torch.zeros(6, 4)]

        def step(x: torch.Tensor) -> float:
            h = torch.tanh(held[0] + x * w)
            loss = h.pow(2).mean()
            (g,) = torch.autograd.grad(loss, w, retain_graph=True)
            with torch.no_grad():
                w.data = w.data - 0.1 * g
            held[0] = h if x[0, 0] > 0 else h.detach()
            return loss.item()

        return Program(step, lambda i: (batch(i),), lambda: w.detach())

    check(make, n=14, max_fallbacks=4)


def test_truncated_backpropagation_through_time() -> None:
    def make() -> Program:
        cell = nn.LSTMCell(4, 5)
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
        state: list[Any] = [torch.zeros(6, 5), torch.zeros(6, 5)]

        def step(x: torch.Tensor) -> float:
            h, c = (s.detach() for s in state)
            for t in range(3):
                h, c = cell(x + t, (h, c))
            state[:] = [h, c]
            loss = h.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i),), lambda: (cell, [s.detach() for s in state]))

    check(make)


def test_saved_tensor_hooks_and_graph_inspection() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        packed: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or (t * 1), lambda t: t):
            y = (x @ w).exp()
        names, node = [], y.grad_fn
        while node is not None and node.next_functions:
            names.append(node.name())
            node = node.next_functions[0][0]
        y.sum().backward()
        return packed, names

    check(lambda: weighted(body))


def test_save_on_cpu_and_allow_mutation() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        with torch.autograd.graph.save_on_cpu():
            y = (x @ w).exp().sum()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            z = (x @ w).sin()
            s = z.exp()
            z.mul_(2)
            (y + s.sum()).backward()
        return z

    check(lambda: weighted(body))


def test_grad_assigned_zeroed_and_aliased_by_hand() -> None:
    def body(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        w.grad = torch.ones(4, 4) * 0.1
        (x @ w).sum().backward()
        v.grad = w.grad
        (x @ v).mean().backward()
        flat = torch.cat([p.grad.view(-1) for p in (w, v)])
        w.grad = w.grad * 0.5
        return flat, w.grad is v.grad

    check(lambda: weighted(body, 2))


def test_detached_and_stop_gradient_branches() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        y = x @ w
        straight = y + (y.round() - y).detach()
        straight.pow(2).sum().backward()
        return straight.detach(), y.detach()

    check(lambda: weighted(body))


def test_gradcheck_inside_a_step() -> None:
    def step(x: torch.Tensor) -> bool:
        return torch.autograd.gradcheck(torch.tanh, x[:1].double().requires_grad_())

    check(lambda: function_program(step), phase=None, max_fallbacks=10, min_co_executed=0)


def test_ops_that_write_an_argument_which_is_saved() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        y = nn.functional.rrelu(x @ w, training=True)
        z = torch._native_batch_norm_legit(y, None, None, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5)[0]
        z.sin().sum().backward()
        return y.detach()

    check(lambda: weighted(body))


ACTIVATIONS = (
    "mish",
    "silu",
    "gelu",
    "softplus",
    "hardswish",
    "elu",
    "selu",
    "glu",
    "logsigmoid",
    "tanhshrink",
    "celu",
)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_backward_of_activations_runs_eagers_kernels(name: str) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        y = getattr(nn.functional, name)((x @ w).repeat(3, 5) * 7)
        y.sum().backward()
        return y.detach()

    check(lambda: weighted(body))


def test_modules_with_parametrizations() -> None:
    def make() -> Program:
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        other = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        optimizer = torch.optim.SGD([*layer.parameters(), *other.parameters()], lr=0.1)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = other(layer(x)).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i),), lambda: (layer, other))

    check(make)
