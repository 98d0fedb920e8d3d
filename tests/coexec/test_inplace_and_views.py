"""Memory: in-place writes, views of every kind, aliases among inputs, outputs and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, function_program

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda t: t.view(3, 8),
    "reshape": lambda t: t.reshape(2, 12),
    "transpose": lambda t: t.t(),
    "permute": lambda t: t.view(2, 3, 4).permute(2, 0, 1),
    "select": lambda t: t[1],
    "slice": lambda t: t[1:5:2],
    "narrow": lambda t: t.narrow(0, 1, 3),
    "expand": lambda t: t[:1].expand(6, 4),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(0, 2, 2),
    "as_strided": lambda t: t.as_strided((3, 2), (4, 1), 5),
    "squeeze": lambda t: t.unsqueeze(0).squeeze(0),
    "flatten": lambda t: t.flatten(),
    "split": lambda t: t.split(2)[1],
    "chunk": lambda t: t.chunk(3)[2],
    "unbind": lambda t: t.unbind()[3],
    "movedim": lambda t: t.movedim(0, 1),
    "view dtype": lambda t: t.view(torch.int32).view(torch.float32),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "view_as": lambda t: t.view_as(torch.empty(4, 6)),
    "ellipsis": lambda t: t[..., 1:3],
    "T of a slice": lambda t: t[::2].mT,
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "hsplit": lambda t: t.hsplit(2)[1],
    "view of a view": lambda t: t[1:].t()[1:].t(),
    "real of complex": lambda t: torch.view_as_complex(t.view(6, 2, 2)).real,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_reaches_the_base(name: str) -> None:
    view = VIEWS[name]

    def step(x: torch.Tensor) -> Any:
        base = x * 2
        part = view(base)
        if name != "expand":
            part.mul_(3)
        base.add_(1)
        return part, base, part.sum(), base.sum(0)

    check(lambda: function_program(step))


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_the_callers_own_tensor_is_an_alias_of_it(name: str) -> None:
    view = VIEWS[name]

    def make() -> Program:
        x = torch.arange(24.0).view(6, 4)

        def step() -> Any:
            part = view(x)
            if name != "expand":
                part.add_(1)
            return part, part.sum(), x.sum()

        return Program(step, watch=lambda: x)

    check(make)


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "mul_ tensor": lambda t: t.mul_(t),
    "copy_": lambda t: t.copy_(torch.ones(4)),
    "fill_ by tensor": lambda t: t.fill_(t.mean()),
    "zero_": lambda t: t.zero_(),
    "setitem": lambda t: t.__setitem__((slice(1, 3), 0), 5.0),
    "setitem mask": lambda t: t.__setitem__(t > 0, 0.0),
    "setitem index": lambda t: t.__setitem__(torch.tensor([0, 2]), t[1] + 0),
    "masked_fill_": lambda t: t.masked_fill_(t > 0.5, -1),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0, 0, 1]), torch.ones(3, 4)),
    "scatter_": lambda t: t.scatter_(1, torch.zeros(6, 1, dtype=torch.long), 2.0),
    "clamp_": lambda t: t.clamp_(-1, 1),
    "iadd": lambda t: t.__iadd__(t.sum()),
    "shift rows": lambda t: t[1:].copy_(t[:-1].clone()),
    "relu_": lambda t: torch.relu_(t),
    "exponential": lambda t: t.uniform_(0, 1),
    "t_": lambda t: t.t_(),
    "squeeze_": lambda t: t.unsqueeze_(0).squeeze_(0),
    "transpose_ twice": lambda t: t.transpose_(0, 1).transpose_(0, 1),
    "swapdims_": lambda t: t.swapdims_(0, 1).mul_(2),
    "as_strided_": lambda t: t.as_strided_((2, 3), (4, 1)),
    "resize_ smaller": lambda t: t.resize_(2, 3),
    "resize_ larger": lambda t: t.resize_(7, 4).fill_(1.0),
    "set_ to another": lambda t: t.set_(torch.ones(3, 2)),
    "data assignment": lambda t: setattr(t, "data", t.data * 2),
    "data of another shape": lambda t: setattr(t, "data", torch.ones(2)),
    "detach add": lambda t: t.detach().add_(1),
    "data mul": lambda t: t.data.mul_(2),
    "foreach": lambda t: torch._foreach_mul_([t, t[0]], 2.0),
    "foreach list": lambda t: torch._foreach_add_([t[0], t[1]], [t[2], t[3]]),
    "out argument": lambda t: torch.add(t, 1, out=t),
    "out resized": lambda t: torch.mm(torch.ones(2, 6), torch.ones(6, 3), out=t[:0]) if False else t,
    "put_": lambda t: t.put_(torch.tensor([1, 5]), torch.tensor([9.0, 8.0])),
    "swap tensors": lambda t: torch.utils.swap_tensors(t, torch.ones(3, 3)),
    "addmm_": lambda t: t.addmm_(torch.ones(6, 2), torch.ones(2, 4)),
    "random_": lambda t: t.random_(0, 5),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
    "cumsum_": lambda t: t.cumsum_(0),
    "sort out": lambda t: t.copy_(t.sort(0).values),
    "flip copy": lambda t: t.copy_(t.flip(0)),
    "roll": lambda t: t.copy_(t.roll(1, 0)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_a_value_in_flight(name: str) -> None:
    change = IN_PLACE[name]

    def step(x: torch.Tensor) -> Any:
        h = x + 1
        keep = h.clone()
        change(h)
        return h, h.shape, h.stride(), h.sum(), keep.sum(), h * 2

    check(lambda: function_program(step))


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_the_callers_tensor(name: str) -> None:
    change = IN_PLACE[name]

    def make() -> Program:
        def step(x: torch.Tensor) -> Any:
            before = x.sum()
            change(x)
            return x, x.shape, before, x.sum()

        inputs: list[torch.Tensor] = []

        def args(i: int) -> tuple[Any, ...]:
            inputs[:] = [batch(i)]
            return (inputs[0],)

        return Program(step, args, lambda: inputs)

    check(make)


def test_inputs_that_start_to_alias() -> None:
    def make() -> Program:
        held: list[torch.Tensor] = []

        def step(a: torch.Tensor, b: torch.Tensor) -> Any:
            a.mul_(2)
            c = b + 1
            b.add_(a.sum())
            return a + b, c

        def args(i: int) -> tuple[Any, ...]:
            base = torch.arange(10.0) * (i + 1)
            pairs = [
                (base[:4].clone(), base[4:8].clone()),
                (base[:4], base[2:6]),
                (base[:4], base[:4]),
                (base[:4], base[4:8]),
            ]
            held[:] = pairs[0 if i < 6 else i % 4]
            return tuple(held)

        return Program(step, args, lambda: held)

    check(make, n=16)


def test_the_same_tensor_twice() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return x * y, x is y

    def make() -> Program:
        def args(i: int) -> tuple[Any, ...]:
            x = batch(i)
            return (x, x) if i % 2 else (x, x.clone())

        return Program(step, args)

    check(make, n=12)


@pytest.mark.parametrize("kind", ["itself", "view", "parameter", "detached parameter", "buffer", "twice", "constant"])
def test_what_the_step_returns_is_what_eager_returns(kind: str) -> None:
    def make() -> Program:
        w = nn.Parameter(torch.ones(6, 4))
        buffer, constant = torch.zeros(4), torch.arange(3.0)

        def step(x: torch.Tensor) -> Any:
            y = x * w
            buffer.add_(y.detach().sum(0))
            returned = {
                "itself": x,
                "view": x[1:],
                "parameter": w,
                "detached parameter": w.detach(),
                "buffer": buffer,
                "twice": (y, y),
                "constant": constant,
            }[kind]
            return returned, y.detach()

        return Program(step, lambda i: (batch(i),), lambda: (w, buffer))

    check(make)


def test_the_caller_edits_what_was_returned() -> None:
    def make() -> Program:
        state = torch.ones(6, 4)

        def step(x: torch.Tensor) -> Any:
            state.mul_(0.9).add_(x)
            return state * 1, state[0], state.sum()

        def after(i: int, result: Any) -> None:
            private, alias, total = result
            private.zero_()
            alias.add_(1)  # really the state
            total.fill_(-1)

        return Program(step, lambda i: (batch(i),), lambda: state, after)

    check(make)


def test_a_result_is_the_next_calls_input() -> None:
    def make() -> Program:
        held = [torch.zeros(6, 4)]

        def step(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(h * 0.5 + x)

        def after(i: int, result: Any) -> None:
            held[0] = result

        return Program(step, lambda i: (held[0], batch(i)), lambda: held, after)

    check(make)


def test_a_hidden_state_kept_across_calls_and_edited_in_place() -> None:
    def make() -> Program:
        held = {"h": torch.zeros(6, 4), "log": []}

        def step(x: torch.Tensor) -> torch.Tensor:
            held["h"] = torch.tanh(held["h"] + x)
            held["h"][0] += 1
            held["log"] = [held["h"].clone(), *held["log"]][:3]
            return held["h"].sum()

        return Program(step, lambda i: (batch(i),), lambda: held)

    check(make)


def test_a_key_value_cache_grows_in_place() -> None:
    def make() -> Program:
        cache, position = torch.zeros(16, 4), [0]

        def step(x: torch.Tensor) -> torch.Tensor:
            n = position[0]
            cache[n] = x[0]
            position[0] += 1
            scores = (cache[: n + 1] @ x[1]).softmax(0)
            return scores @ cache[: n + 1]

        return Program(step, lambda i: (batch(i),), lambda: (cache, position))

    check(make, n=14, max_fallbacks=14, phase=None, min_co_executed=0)


def test_a_ring_buffer_written_at_a_changing_place() -> None:
    def make() -> Program:
        ring, at = torch.zeros(5, 4), [0]

        def step(x: torch.Tensor) -> torch.Tensor:
            ring[at[0] % 5].copy_(x[0])
            at[0] += 1
            return ring.mean(0)

        return Program(step, lambda i: (batch(i),), lambda: ring)

    check(make, n=16, max_fallbacks=5)


def test_expanded_and_overlapping_memory() -> None:
    def make() -> Program:
        base = torch.arange(8.0)

        def step(x: torch.Tensor) -> Any:
            windows = base.as_strided((5, 4), (1, 1))
            wide = x[:1].expand(5, 4)
            base.add_(0.5)
            return windows + wide, windows, wide

        return Program(step, lambda i: (batch(i),), lambda: base)

    check(make)


def test_channels_last_and_odd_strides_survive() -> None:
    def step(x: torch.Tensor) -> Any:
        image = x.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
        conv = nn.functional.conv2d(image, torch.ones(3, 2, 2, 2))
        return image, conv, conv.relu(), image.contiguous(), torch.empty_like(image).zero_(), x.t() + 1, x.t().clone()

    check(lambda: function_program(step))


def test_zero_sized_and_scalar_tensors() -> None:
    def step(x: torch.Tensor) -> Any:
        nothing = x[:0]
        return nothing * 2, nothing.sum(), torch.cat([nothing, x]), x.sum().view(1, 1), x.mean()[None], nothing.t()

    check(lambda: function_program(step))


def test_a_write_to_a_leaf_under_no_grad_counts_its_version() -> None:
    def make() -> Program:
        w = torch.ones(4, requires_grad=True)

        def step(x: torch.Tensor) -> int:
            with torch.no_grad():
                w.mul_(0.9)
                w[0] = 1.0
            return (x * w).sum()._version + w._version

        return Program(step, lambda i: (batch(i),), lambda: w)

    check(make)


def test_saved_tensor_modified_in_place_raises_as_eager() -> None:
    def make() -> Program:
        w = torch.ones(4, requires_grad=True)

        def step(x: torch.Tensor) -> None:
            y = (x * w).exp()
            y.add_(1)
            y.sum().backward()

        return Program(step, lambda i: (batch(i),), lambda: w)

    check(make, max_fallbacks=10, phase=None, min_co_executed=0, raises=(RuntimeError,))


def test_in_place_on_a_leaf_that_requires_grad_raises_as_eager() -> None:
    def make() -> Program:
        w = torch.ones(4, requires_grad=True)

        def step(x: torch.Tensor) -> None:
            y = x * w
            w.add_(1)
            y.sum()

        return Program(step, lambda i: (batch(i),), lambda: w)

    check(make, max_fallbacks=10, phase=None, min_co_executed=0, raises=(RuntimeError,))


def test_in_place_rebinding_through_autograd_views() -> None:
    def make() -> Program:
        w = torch.ones(6, 4, requires_grad=True)

        def step(x: torch.Tensor) -> Any:
            y = x * w
            y[:, 0] = y[:, 1] * 2
            y.view(-1)[5:7].mul_(x.view(-1)[:2])
            y.t()[2].zero_()
            (g,) = torch.autograd.grad(y.pow(2).sum(), w)
            return g, y

        return Program(step, lambda i: (batch(i),), lambda: w)

    check(make)


def test_data_swapped_in_and_out_inside_the_step() -> None:
    def make() -> Program:
        w, shadow = nn.Parameter(torch.ones(4)), torch.full((4,), 0.5)

        def step(x: torch.Tensor) -> Any:
            live = w.data
            w.data = shadow
            a = (x * w).sum().detach()
            w.data = live
            shadow.mul_(0.9).add_(w.data, alpha=0.1)
            b = (x * w).sum()
            b.backward()
            with torch.no_grad():
                w.sub_(0.01 * w.grad)
            w.grad = None
            return a, b.detach()

        return Program(step, lambda i: (batch(i),), lambda: (w, shadow))

    check(make)


def test_param_data_set_to_a_value_in_flight() -> None:
    def make() -> Program:
        w = nn.Parameter(torch.ones(4))

        def step(x: torch.Tensor) -> Any:
            w.data = w.data * 0.9 + x[0] * 0.1
            y = (x * w).sum()
            y.backward()
            w.data -= 0.1 * w.grad
            w.grad = None
            return y.detach()

        return Program(step, lambda i: (batch(i),), lambda: w)

    check(make)


def test_a_saved_tensor_changed_by_a_foreach_op_raises_as_eager() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, backward: bool) -> Any:
            w = x.clone().requires_grad_()
            y = w.exp()
            with torch.no_grad():
                torch._foreach_add_([y.detach()], [torch.ones(4)])
            if backward:
                y.sum().backward()
            return w.grad

        return Program(step, lambda i: (batch(i), i in (5, 8)))

    check(make, raises=(RuntimeError,))


def test_versions_are_counted_as_eager() -> None:
    def make() -> Program:
        a, b, c = torch.zeros(3), torch.zeros(4), torch.zeros(5, requires_grad=True)

        def step(x: torch.Tensor) -> Any:
            h = x + 1
            h.add_(1)
            h[0].mul_(2)
            a.add_(1)
            torch._foreach_add_([a, b], [torch.ones(3), torch.ones(4)])
            with torch.no_grad():
                c.add_(1)
                torch._foreach_mul_([c], 0.5)
            return h._version, a._version, b._version, c._version

        return Program(step, lambda i: (batch(i),))

    check(make)


@pytest.mark.parametrize("write", [lambda y: y[0].add_(0.5), lambda y: y.add_(0.5)], ids=["row", "all"])
@pytest.mark.parametrize(
    "view", [lambda y: y.detach()[0], lambda y: y.data[0], lambda y: y.data, lambda y: y.t().split(2)[1]]
)
def test_views_of_an_argument_that_was_written_are_ordinary_after_the_step(
    view: Callable[[torch.Tensor], torch.Tensor], write: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A snapshot fails if one still carries the interceptor's key: `y` has it while its write is to come."""

    def make() -> Program:
        kept: list[torch.Tensor] = []

        def step(y: torch.Tensor) -> None:
            write(y)
            kept[:] = [view(y)]

        return Program(step, lambda i: (batch(i),), lambda: kept)

    check(make)


def test_an_in_place_op_that_makes_its_tensor_larger() -> None:
    """`addbmm_` is one: eager resizes what could be broadcast."""

    def step(x: torch.Tensor) -> torch.Tensor:
        total = x[0, :1].clone()
        return total.addbmm_(x.view(2, 3, 4), x.view(2, 4, 3))

    check(lambda: function_program(step))


def test_statistics_that_numpy_sees() -> None:
    """The schema of the op does not say that it writes them."""

    def make() -> Program:
        norm = torch.nn.BatchNorm1d(4)
        seen = norm.running_mean.numpy(), norm.running_var.numpy()
        return Program(lambda x: norm(x).sum(), lambda i: (batch(i),), lambda: (norm, [array.copy() for array in seen]))

    check(make)


def test_a_copy_for_the_graph_of_what_the_graph_has_yet_to_write() -> None:
    """On other paths Python writes the counter itself, which is why readers get a copy."""

    def make() -> Program:
        count, heavy = torch.zeros(()), torch.ones(400, 400)

        def step(x: torch.Tensor, by_python: bool) -> torch.Tensor:
            if by_python:
                count.add_(1)
                count.item()
            else:
                count.copy_((heavy @ heavy).sum())
            return x * count

        return Program(step, lambda i: (batch(i), i < 8 or i % 2 == 0), lambda: count)

    check(make, n=40)
