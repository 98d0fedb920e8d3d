"""Values that leave the graph: reads, prints, NumPy, copies and pickles inside the step."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, function_program, labels, mlp, training

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.sum() > 0),
    "int": lambda t: int(t.sum() * 10),
    "float": lambda t: float(t.sum()),
    "complex": lambda t: complex(t.sum()),
    "index": lambda t: list(range(24))[t.abs().argmax()],
    "tolist": lambda t: t.tolist(),
    "tolist of a scalar": lambda t: t.sum().tolist(),
    "numpy": lambda t: t.numpy().copy(),
    "numpy force": lambda t: t.numpy(force=True).sum(),
    "asarray": lambda t: np.asarray(t).mean(),
    "array of dtype": lambda t: np.array(t, dtype=np.float64),
    "numpy function": lambda t: np.exp(t).sum(),
    "repr": lambda t: repr(t),
    "str": lambda t: str(t),
    "format": lambda t: f"{t.sum():.3f} {t[0]}",
    "percent": lambda t: "%s %.2f" % (t[0], t.sum()),  # noqa: UP031
    "iteration": lambda t: [float(x.sum()) for x in t],
    "unpacking": lambda t: [a.item() for a, *_ in (t[:2],)] if t.dim() == 1 else len([*t]),
    "len": lambda t: len(t),
    "contains": lambda t: 1e9 in t,
    "equal": lambda t: torch.equal(t, t * 1),
    "allclose": lambda t: torch.allclose(t, t + 1e-9),
    "is_nonzero": lambda t: torch.is_nonzero(t.sum()),
    "max of python": lambda t: float(max(t[0])),
    "sorted": lambda t: [float(x) for x in sorted(t[0])],
    "sum of python": lambda t: float(sum(t[0])),
    "data_ptr": lambda t: t.data_ptr() == t.view(-1).data_ptr(),
    "storage": lambda t: t.untyped_storage().nbytes(),
    "typed storage": lambda t: list(t.contiguous().storage())[:2],
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
    "copy": lambda t: copy.copy(t),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": lambda t: torch.load(_saved(t)),
    "dlpack": lambda t: torch.from_dlpack(t) * 2,
    "numpy dlpack": lambda t: np.from_dlpack(t).sum(),
    "as_tensor": lambda t: torch.as_tensor(t) + 1,
    "tensor of items": lambda t: torch.tensor([t.sum().item(), 2.0]),
    "stack of items": lambda t: torch.tensor([x.sum() for x in t]),
    "memory format": lambda t: (t.is_contiguous(), t.stride(), t.storage_offset(), t.element_size(), t.nbytes),
    "hash in a set": lambda t: len({t, t, t + 1}),
    "isfinite all": lambda t: bool(torch.isfinite(t).all()),
    "any of python": lambda t: any(t[0] > 5),
    "slicing by tensor": lambda t: t[: t.abs().argmax() % 3 + 1],
    "round": lambda t: round(t.sum().item(), 3),
    "divmod": lambda t: divmod(t.sum().item(), 0.5),
    "share_memory": lambda t: t.clone().share_memory_().is_shared(),
    "apply_": lambda t: t.clone().apply_(lambda v: v * 2),
    "map_": lambda t: t.clone().map_(t, lambda a, b: a + b),
}


def _saved(t: torch.Tensor) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(t, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_read_of_a_value_in_flight(name: str) -> None:
    read = READS[name]

    def step(x: torch.Tensor) -> Any:
        h = (x * 2 + 1).tanh()
        seen = read(h)
        return seen, h + 1

    check(lambda: function_program(step), n=14, max_fallbacks=5)


REQUIRING_GRAD = ("item", "tolist", "numpy force", "repr", "str", "format", "iteration", "bool", "pickle")


@pytest.mark.parametrize("name", REQUIRING_GRAD)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_read_of_a_value_that_requires_grad(name: str) -> None:
    read = READS[name]

    def make() -> Program:
        w = torch.randn(4, 4, requires_grad=True)

        def step(x: torch.Tensor) -> Any:
            h = (x @ w).tanh()
            seen = read(h if name != "pickle" else h.detach())
            h.sum().backward()
            with torch.no_grad():
                w.sub_(0.1 * w.grad)
            w.grad = None
            return seen

        return Program(step, lambda i: (batch(i),), lambda: w)

    check(make)


def test_print_goes_out_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []

    def make() -> Program:
        texts.append(capsys.readouterr().out)

        def step(x: torch.Tensor) -> torch.Tensor:
            print("first", x.sum())
            y = x.cumsum(0)
            print(y[0], "loss", f"{y.mean():.4f}", end=";")
            print(y.tolist()[0][0])
            return y

        return function_program(step)

    check(make)
    texts.append(capsys.readouterr().out)
    assert texts[1]
    assert texts[1] == texts[2]


def test_logging_whose_level_changes() -> None:
    def make() -> Program:
        lines: list[str] = []
        logger = logging.Logger("run")
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            logger.debug("mean %.5f of %s", y.mean(), y.shape)
            logger.info("sum %s", y.sum())
            return y * 2

        def args(i: int) -> tuple[Any, ...]:
            logger.setLevel(logging.DEBUG if i >= 6 else logging.INFO)
            return (batch(i),)

        return Program(step, args, lambda: lines)

    check(make, n=12)


def test_a_numpy_view_taken_inside_sees_and_makes_later_writes() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
        h = x * 2
        view = h.numpy()
        h.add_(1)  # the array sees it
        early = view.copy()
        view[0] = 7.0  # the tensor sees it
        out = h.sum(1)
        view[1] = -7.0
        return out, early, h

    check(lambda: function_program(step))


def test_a_numpy_view_of_a_parameter_kept_for_ever() -> None:
    def make() -> Program:
        w = torch.ones(4)
        view = w.numpy()

        def step(x: torch.Tensor) -> tuple[float, torch.Tensor]:
            y = x * w
            w.mul_(0.5)
            seen = float(view[0])
            view[1] += 1
            return seen, (y + w).sum()

        return Program(step, lambda i: (batch(i),), lambda: (w, view.copy()))

    check(make)


def test_a_staging_array_refilled_for_every_batch() -> None:
    def make() -> Program:
        buffer = np.zeros((6, 4), dtype=np.float32)
        x = torch.from_numpy(buffer)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(y: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            buffer[:] = -1.0  # Python overwrites while the graph may still be running
            optimizer.step()
            return loss.item()

        def args(i: int) -> tuple[Any, ...]:
            buffer[:] = batch(i).numpy()
            return (labels(i),)

        return Program(step, args, lambda: (model, buffer))

    check(make)


def test_a_staging_tensor_refilled_in_place() -> None:
    def make() -> Program:
        x = torch.zeros(6, 4)

        def step(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = (x * scale).cumsum(0)
            x.fill_(9.0)
            return y, x + 1

        def args(i: int) -> tuple[Any, ...]:
            x.copy_(batch(i))
            return (torch.tensor(float(i)),)

        return Program(step, args, lambda: x)

    check(make)


def test_from_numpy_inside_the_step_then_overwritten() -> None:
    def make() -> Program:
        def step(x: torch.Tensor) -> torch.Tensor:
            array = np.arange(4, dtype=np.float32)
            t = torch.from_numpy(array)
            y = x + t
            array[:] = 100.0
            return y * t

        return function_program(step)

    check(make)


def test_frombuffer_and_asarray_alias_python_memory() -> None:
    def make() -> Program:
        raw = bytearray(16)
        t = torch.frombuffer(raw, dtype=torch.float32)

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x + t
            raw[:] = np.full(4, 3.0, np.float32).tobytes()
            z = y * t
            raw[:] = bytes(16)
            return z

        return function_program(step)

    check(make)


def test_deepcopy_pickle_and_state_dict_of_the_model_in_the_step() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        plain = training(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = plain(x, y)
            frozen = copy.deepcopy(model)
            saved = {k: v.clone() for k, v in model.state_dict().items()}
            again = pickle.loads(pickle.dumps(model))
            second = plain(x, y)
            return loss, second, frozen, saved, again, copy.deepcopy(optimizer.state_dict())

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make, max_fallbacks=10, phase=None, min_co_executed=0)


def test_state_dict_aliases_live_parameters() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = training(model, optimizer)
        alias = model.state_dict()

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            before = alias["0.weight"].sum()
            loss = plain(x, y)
            return before, loss, alias["0.weight"].sum()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, alias))

    check(make)


def test_checkpoint_written_every_third_step() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        plain, calls, sizes = training(model, optimizer), [0], []

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = plain(x, y)
            calls[0] += 1
            if calls[0] % 3 == 0:
                buffer = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
                buffer.seek(0)
                sizes.append(torch.load(buffer)["model"]["0.weight"].sum().item())
            return loss

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer, sizes))

    check(make, n=14, max_fallbacks=4)


def test_a_value_is_read_after_its_memory_was_overwritten() -> None:
    def step(x: torch.Tensor) -> Any:
        a = x * 2
        b = a.clone()
        total = a.sum()
        a.zero_()
        return total.item(), b.sum().item(), a.sum().item()

    check(lambda: function_program(step))


def test_third_party_answer_feeds_the_graph() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        h = x.t() @ x + torch.eye(4)
        solved = np.linalg.solve(h.numpy().astype(np.float64), np.ones(4))
        return h @ torch.from_numpy(solved).float()

    check(lambda: function_program(step))


def test_metric_kept_on_a_list_and_averaged_later() -> None:
    def make() -> Program:
        losses: list[torch.Tensor] = []
        w = torch.ones(4, requires_grad=True)

        def step(x: torch.Tensor) -> float | None:
            loss = (x * w).pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
            if len(losses) % 4 == 0:
                mean = torch.stack(losses).mean().item()
                losses.clear()
                return mean
            return None

        return Program(step, lambda i: (batch(i),), lambda: (losses, w))

    check(make, n=16, max_fallbacks=4)


def test_a_python_float_from_the_graph_feeds_it_again() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max().item()
        y = x / scale
        return y * round(y.mean().item(), 2) + scale

    check(lambda: function_program(step))


def test_data_dependent_python_integers_shape_the_graph() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        k = int(x.abs().sum().item()) % 3 + 1
        return x[:k].sum(0) + x.topk(k, dim=0).values.sum()

    check(lambda: function_program(step), n=14, max_fallbacks=4)


def test_getters_that_read_no_value() -> None:
    def step(x: torch.Tensor) -> Any:
        h = x @ x.t()
        info = (h.shape, h.dtype, h.device, h.requires_grad, h.is_leaf, h.ndim, h.numel(), h.layout)
        return info, h.size(0), h.dim(), h.is_floating_point(), type(h) is torch.Tensor, h.mT.is_contiguous(), h

    check(lambda: function_program(step))


def test_attributes_put_on_a_value_in_flight_stay() -> None:
    def step(x: torch.Tensor) -> Any:
        h = x + 1
        h.note = "kept"  # type: ignore[attr-defined]
        table = {h: 1}
        y = h * 2
        return h.note, table[h], y  # type: ignore[attr-defined]

    check(lambda: function_program(step))
