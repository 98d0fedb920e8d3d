"""Random numbers: one stream, in program order, whoever draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, function_program, labels, training


def test_dropout_in_training() -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3), nn.AlphaDropout(0.2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Program(training(model, optimizer), lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)


DRAWS: dict[str, Any] = {
    "rand": lambda x: torch.rand(3),
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(0, 9, (4,)),
    "randperm": lambda x: torch.randperm(6),
    "normal": lambda x: torch.normal(x, 0.1),
    "normal of two": lambda x: torch.normal(x, x.abs() + 1),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2),
    "poisson": lambda x: torch.poisson(x.abs() * 3),
    "exponential_": lambda x: x.clone().exponential_(),
    "geometric_": lambda x: x.clone().geometric_(0.5),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "gamma": lambda x: torch.distributions.Gamma(x.abs() + 0.5, torch.tensor(1.0)).sample(),
    "rsample": lambda x: torch.distributions.Normal(x, x.abs() + 0.1).rsample(),
    "categorical": lambda x: torch.distributions.Categorical(logits=x).sample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.abs() + 0.5).sample(),
    "gumbel": lambda x: nn.functional.gumbel_softmax(x, hard=True),
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
    "dropout2d": lambda x: nn.functional.dropout2d(x.view(1, 6, 2, 2), 0.5),
    "fractional pool": lambda x: nn.functional.fractional_max_pool2d(x.view(1, 1, 6, 4), 2, output_size=(3, 2)),
    "init": lambda x: nn.init.kaiming_normal_(torch.empty(4, 4)),
    "new layer": lambda x: nn.Linear(4, 3)(x).detach(),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(torch.empty(4, 4)),
    "sdpa dropout": lambda x: nn.functional.scaled_dot_product_attention(*[x.view(1, 2, 3, 4)] * 3, dropout_p=0.5),
    "lstm dropout": lambda x: nn.LSTM(4, 3, 2, dropout=0.5)(x.view(6, 1, 4))[0].detach(),
    "sobol": lambda x: torch.quasirandom.SobolEngine(2, scramble=True).draw(3),
    "binomial": lambda x: torch.binomial(torch.full((6, 4), 5.0), x.sigmoid()),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_kind_of_draw(name: str) -> None:
    draw = DRAWS[name]

    def step(x: torch.Tensor) -> Any:
        first = torch.rand(2)
        return first, draw(x), draw(x * 2), torch.rand(2)

    check(lambda: function_program(step), n=20)  # a rejection loop is folded on the way


def test_python_draws_between_draws_of_the_graph() -> None:
    def step(x: torch.Tensor) -> Any:
        a = torch.rand(4)
        host = torch.rand(1).item()
        b = nn.functional.dropout(x, 0.5)
        choice = torch.randint(0, 10, ()).item()
        index = int(torch.empty((), dtype=torch.int64).random_().item())
        c = torch.randn(2)
        return a, host, b, choice, index, c, random.random(), np.random.rand()

    check(lambda: function_program(step))


def test_a_draw_that_decides_a_branch() -> None:
    def step(x: torch.Tensor) -> Any:
        if torch.rand(()).item() < 0.5:
            x = nn.functional.dropout(x, 0.5)
        return x, torch.rand(2)

    check(lambda: function_program(step), n=16)


def test_generators_of_the_users_own() -> None:
    def make() -> Program:
        generator = torch.Generator().manual_seed(7)

        def step(x: torch.Tensor) -> Any:
            a = torch.randn(3, generator=generator)
            b = torch.rand(2)
            noise = x.clone().normal_(generator=generator)
            order = torch.randperm(6, generator=generator)
            return a, b, noise, x[order], torch.bernoulli(torch.full((3,), 0.5), generator=generator)

        return Program(step, lambda i: (batch(i),), lambda: generator.get_state())

    check(make)


def test_manual_seed_inside_the_step() -> None:
    def step(x: torch.Tensor) -> Any:
        a = torch.rand(2)
        torch.manual_seed(int(abs(x[0, 0].item()) * 100))
        b = torch.rand(2)
        torch.random.manual_seed(3)
        return a, b, nn.functional.dropout(x, 0.5), torch.initial_seed()

    check(lambda: function_program(step))


def test_default_generator_used_by_name() -> None:
    def step(x: torch.Tensor) -> Any:
        a = torch.rand(2)
        state = torch.default_generator.get_state()
        b = torch.rand(2)
        torch.default_generator.set_state(state)
        c = torch.rand(2)
        torch.default_generator.manual_seed(11)
        return a, b, c, torch.rand(2), torch.rand(2, generator=torch.default_generator), state

    check(lambda: function_program(step))


def test_fork_rng_and_state_juggling() -> None:
    def step(x: torch.Tensor) -> Any:
        a = torch.rand(2)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            b = nn.functional.dropout(x, 0.5)
        state = torch.get_rng_state()
        c = torch.rand(2)
        torch.set_rng_state(state)
        d = torch.rand(2)
        return a, b, c, d, state

    check(lambda: function_program(step))


def test_streams_survive_a_fallback() -> None:
    calls = [0]

    def step(x: torch.Tensor) -> Any:
        calls[0] += 1
        a = nn.functional.dropout(x, 0.5)
        b = torch.rand(3)
        if calls[0] % 7 == 5:
            b = b + torch.randn(3)
        return a, b, torch.rand(1)

    def make() -> Program:
        calls[0] = 0
        return function_program(step)

    check(make, n=16)


def test_streams_survive_an_exception() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, bad: bool) -> Any:
            a = nn.functional.dropout(x, 0.5)
            if bad:
                raise ValueError(a.shape)
            return a, torch.rand(2)

        return Program(step, lambda i: (batch(i), i in (4, 9)))

    check(make, n=12, raises=(ValueError,))


def test_seeding_between_steps() -> None:
    def make() -> Program:
        def args(i: int) -> tuple[Any, ...]:
            if i % 4 == 3:
                torch.manual_seed(i)
            return (batch(i),)

        return Program(lambda x: (nn.functional.dropout(x, 0.5), torch.rand(2)), args)

    check(make, n=12)


def test_numpy_and_python_augmentation() -> None:
    def step(x: torch.Tensor) -> Any:
        rows = list(range(6))
        random.shuffle(rows)
        keep = np.random.permutation(6)[:3]
        flip = random.random() < 0.5
        y = x[rows][torch.from_numpy(keep)]
        return y.flip(1) if flip else y

    check(lambda: function_program(step), n=20)


def test_random_op_modes_of_determinism() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        check(lambda: function_program(lambda x: (torch.empty(3).fill_(1), x.cumsum(0), torch.rand(2))))
    finally:
        torch.use_deterministic_algorithms(False)
