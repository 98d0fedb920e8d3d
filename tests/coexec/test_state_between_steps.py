"""Parameters, optimizers and modes that are copied, saved, loaded, replaced or switched between two steps."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import coexec
from tests.coexec.harness import Program, check, exact
from tests.coexec.programs import batch, labels


class Net(nn.Module):
    """Buffers, dropout, normalization; sizes that fit `batch` and `labels`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(h.to(self.last.weight.dtype))


class State:
    """What a training script holds: everything may be replaced while the step stays the same."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model = Net()
        self.optimizer = kind(self.model.parameters(), lr=0.02)  # type: ignore[call-arg]
        self.kept: list[Any] = []

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x.to(self.model.first.weight.dtype)).float(), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def changing(changes: dict[int, Callable[[State], None]], kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    """Returns a `make` whose program applies `changes[i]` before call `i`."""

    def make() -> Program:
        state = State(kind)

        def args(i: int) -> tuple[Any, ...]:
            if i in changes:
                changes[i](state)
            return batch(i), labels(i)

        return Program(state.step, args, lambda: (state.model, state.optimizer, state.kept))

    return make


def deepcopied(s: State) -> None:
    s.kept.append(s.model)
    s.model, s.optimizer = copy.deepcopy((s.model, s.optimizer))


def pickled(s: State) -> None:
    s.model, s.optimizer = pickle.loads(pickle.dumps((s.model, s.optimizer)))


def saved_and_loaded(s: State) -> None:
    buffer = io.BytesIO()
    torch.save({"model": s.model.state_dict(), "optimizer": s.optimizer.state_dict()}, buffer)
    buffer.seek(0)
    fresh = State()
    found = torch.load(buffer)
    fresh.model.load_state_dict(found["model"])
    fresh.optimizer.load_state_dict(found["optimizer"])
    s.model, s.optimizer = fresh.model, fresh.optimizer


def remembered(s: State) -> None:
    s.kept[:] = [copy.deepcopy(s.model.state_dict()), copy.deepcopy(s.optimizer.state_dict())]


def recalled(s: State) -> None:
    s.model.load_state_dict(s.kept[0])
    s.optimizer.load_state_dict(s.kept[1])


def assigned(s: State) -> None:
    s.model.load_state_dict({k: v.clone() for k, v in s.kept[0].items()}, assign=True)
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01)


def weight_replaced(s: State) -> None:
    s.optimizer.state.pop(s.model.last.weight)
    s.model.last.weight = nn.Parameter(torch.full((3, 8), 0.1))
    s.optimizer.param_groups[0]["params"] = list(s.model.parameters())


def parameter_added(s: State) -> None:
    s.model.extra = nn.Linear(3, 3)  # type: ignore[assignment]
    s.optimizer.add_param_group({"params": s.model.extra.parameters(), "lr": 0.1})
    s.model.forward = lambda x: s.model.extra(Net.forward(s.model, x))  # type: ignore[method-assign, operator]


def parameter_removed(s: State) -> None:
    s.model.last.bias = None  # type: ignore[assignment]


def frozen(s: State) -> None:
    s.model.first.requires_grad_(False)


def thawed(s: State) -> None:
    s.model.first.requires_grad_(True)


def gradient_given(s: State) -> None:
    s.optimizer.zero_grad = lambda: None  # type: ignore[method-assign, assignment]
    for p in s.model.parameters():
        p.grad = torch.full_like(p, 0.01)


def tied(s: State) -> None:
    s.model.norm.bias = s.model.first.bias


def as_double(s: State) -> None:
    s.model.double()
    other_optimizer(s)


def as_half(s: State) -> None:
    s.model.last.to(torch.bfloat16)
    other_optimizer(s)


def data_replaced(s: State) -> None:
    for p in s.model.parameters():
        p.data = p.data.clone()


def written_through_a_view(s: State) -> None:
    s.model.last.weight.data[0].zero_()
    s.model.first.bias.detach().numpy()[:] = 0.5


def vector_loaded(s: State) -> None:
    vector = nn.utils.parameters_to_vector(s.model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.9, s.model.parameters())


def swapped(s: State) -> None:
    other = nn.Parameter(torch.full((3, 8), 0.2))
    torch.utils.swap_tensors(s.model.last.weight, other)


def pruned(s: State) -> None:
    prune.l1_unstructured(s.model.last, "weight", 0.3)


def normalized(s: State) -> None:
    parametrizations.weight_norm(s.model.last)
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01)


def plain_again(s: State) -> None:
    parametrize.remove_parametrizations(s.model.last, "weight")
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01)


def other_optimizer(s: State) -> None:
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def reset(s: State) -> None:
    s.model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)


def learning_rate(s: State) -> None:
    s.optimizer.param_groups[0]["lr"] *= 0.5


def state_cleared(s: State) -> None:
    s.optimizer.state.clear()


CHANGES: dict[str, dict[int, Callable[[State], None]]] = {
    "deepcopy": {6: deepcopied, 12: deepcopied},
    "pickle": {6: pickled, 7: pickled, 12: pickled},
    "save and load": {6: saved_and_loaded, 12: saved_and_loaded},
    "load_state_dict": {5: remembered, 9: recalled, 12: recalled},
    "load_state_dict(assign=True)": {5: remembered, 9: assigned},
    "a parameter replaced": {6: weight_replaced, 11: weight_replaced},
    "add_param_group": {6: parameter_added},
    "a parameter removed": {6: parameter_removed},
    "freezing": {5: frozen, 9: thawed, 13: frozen},
    "a gradient given": {6: gradient_given},
    "parameters tied": {6: tied},
    "double": {6: as_double},
    "part of it bfloat16": {6: as_half},
    "data replaced": {5: data_replaced, 6: data_replaced, 11: data_replaced},
    "written through a view": {5: written_through_a_view, 9: written_through_a_view},
    "vector_to_parameters": {6: vector_loaded},
    "swap_tensors": {6: swapped},
    "pruning": {6: pruned},
    "weight_norm on and off": {6: normalized, 12: plain_again},
    "another optimizer": {6: other_optimizer},
    "reset_parameters": {6: reset, 11: reset},
    "learning rate": {6: learning_rate, 9: learning_rate},
    "optimizer state cleared": {6: state_cleared},
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.filterwarnings("ignore:.*expandable.*", "ignore::UserWarning")
def test_training_goes_on_as_in_eager(what: str) -> None:
    check(changing(CHANGES[what]), n=20, max_fallbacks=6)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_train_and_eval_by_turns(period: int) -> None:
    def make() -> Program:
        state = State()

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            if state.model.training:
                return state.step(x, y)
            with torch.no_grad():
                return state.model(x).argmax(1).eq(y).float().mean().item()

        def args(i: int) -> tuple[Any, ...]:
            state.model.train((i // period) % 2 == 0)
            return batch(i), labels(i)

        return Program(step, args, lambda: (state.model, state.optimizer))

    check(make, n=24)


def test_parts_of_a_model_in_other_modes_than_the_rest() -> None:
    def make() -> Program:
        state = State()

        def args(i: int) -> tuple[Any, ...]:
            state.model.train()
            state.model.norm.train(i % 3 != 1)
            state.model.drop.p = 0.2 if i % 2 else 0.4
            state.model.norm.momentum = 0.1 + 0.01 * i  # a number that changes in each call
            return batch(i), labels(i)

        return Program(state.step, args, lambda: (state.model, state.optimizer))

    check(make, n=24)


def test_copies_made_inside_the_step() -> None:
    def make() -> Program:
        state = State()
        best: list[Any] = [None, None]

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = state.step(x, y)
            if best[0] is None or loss < best[0]:
                best[:] = [loss, copy.deepcopy(state.model.state_dict())]
            if len(state.kept) < 30:
                state.kept.append(pickle.loads(pickle.dumps(state.optimizer.state_dict())))
            return loss

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (state.model, best, state.kept[-1:]))

    check(make, n=14, max_fallbacks=6)


def test_a_step_that_is_copied_with_the_trainer_that_holds_it() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.state = State()
            self.step = exact(self.train)

        def train(self, i: int) -> float:
            return self.state.step(batch(i), labels(i))

    torch.manual_seed(0)
    trainer = Trainer()
    for i in range(5):
        trainer.step(i)
    twin = copy.deepcopy(trainer)
    rng = torch.get_rng_state()
    own = [trainer.step(i) for i in range(5, 11)]
    torch.set_rng_state(rng)
    assert [twin.step(i) for i in range(5, 11)] == own
    assert twin.state.model is not trainer.state.model
    assert torch.equal(twin.state.model.first.weight, trainer.state.model.first.weight)
    assert trainer.step.stats().phase == twin.step.stats().phase == "co-execution"


def test_a_wrapped_module_is_saved_loaded_and_switched_as_the_module() -> None:
    torch.manual_seed(0)
    model = Net()
    wrapped = coexec.compile(model, backend="replay", numerics="exact")
    for i in range(6):
        wrapped.train(i % 2 == 0)
        torch.manual_seed(i)
        got = wrapped(batch(i))
        reference = copy.deepcopy(model)
        torch.manual_seed(i)
        assert got.shape == reference(batch(i)).shape
    buffer = io.BytesIO()
    torch.save(wrapped.state_dict(), buffer)
    buffer.seek(0)
    fresh = Net()
    fresh.load_state_dict(torch.load(buffer))
    wrapped.eval()
    fresh.eval()
    assert torch.equal(wrapped(batch(9)), fresh(batch(9)))
    wrapped.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert float(wrapped(batch(9)).abs().sum().detach()) == 0.0
