"""Autograd in all its forms inside the step, and backward passes outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, function_program, labels, mlp


def weighted(body: Any, n_weights: int = 1) -> Program:
    """A program whose step is `body(x, *weights)` with weights that require grad."""
    weights = [torch.full((4, 4), 0.1 * (k + 1), requires_grad=True) for k in range(n_weights)]

    def step(x: torch.Tensor) -> Any:
        result = body(x, *weights)
        with torch.no_grad():
            for w in weights:
                if w.grad is not None:
                    w.sub_(0.05 * w.grad)
        return result

    return Program(step, lambda i: (batch(i),), lambda: weights)


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


@pytest.mark.xfail(strict=True, reason="versions of arguments are bumped that eager does not bump")
def test_ops_that_write_an_argument_which_is_saved() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        w.grad = None
        y = nn.functional.rrelu(x @ w, training=True)
        z = torch._native_batch_norm_legit(y, None, None, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5)[0]
        z.sin().sum().backward()
        return y.detach()

    check(lambda: weighted(body))


_KERNEL = pytest.mark.xfail(strict=True, reason="an op with a kernel of its own is decomposed")
ACTIVATIONS = (
    pytest.param("mish", marks=_KERNEL),
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
