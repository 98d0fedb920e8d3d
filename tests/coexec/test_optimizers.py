"""Training steps with every optimizer, schedule, scaler and accumulation scheme of torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, labels, mlp, training

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "t0": 3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_updates_as_eager(name: str, foreach: bool) -> None:
    kind, options = OPTIMIZERS[name]

    def make() -> Program:
        model = mlp()
        optimizer = kind(model.parameters(), foreach=foreach, **options)  # type: ignore[call-arg]
        return Program(training(model, optimizer), lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    # RAdam and ASGD take other branches in their first steps
    check(make, n=14 if name in ("radam", "asgd") else 10, max_fallbacks=4)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad])
def test_step_counters_that_the_optimizer_reads_back_are_no_wait(kind: Any, foreach: bool) -> None:
    def make() -> Program:
        model = mlp()
        optimizer = kind(model.parameters(), lr=0.01, foreach=foreach)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    waits = check(make).compiled._runner.wait_counts()
    assert {why for why, n in waits.items() if n} == {"step end"}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers(kind: Any) -> None:
    def make() -> Program:
        model = mlp()
        optimizer = kind(model.parameters(), lr=0.01, fused=True)
        return Program(training(model, optimizer), lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)


def test_sparse_adam_with_sparse_embedding_gradients() -> None:
    def make() -> Program:
        model = nn.Embedding(10, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)

        def step(ids: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = model(ids).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (labels(i, 6, 10),), lambda: (model.weight.detach(), optimizer))

    check(make)


def test_adafactor() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
        return Program(training(model, optimizer), lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)


def test_muon() -> None:
    def make() -> Program:
        model = nn.Linear(4, 3, bias=False)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.05)
        return Program(training(model, optimizer), lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_runs_its_closure_as_often_as_eager(line_search: str | None) -> None:
    def make() -> Program:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, line_search_fn=line_search)
        runs: list[float] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                runs.append(loss.item())
                return loss

            return optimizer.step(closure).item()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, len(runs), runs[-3:]))

    check(make, n=12, phase=None, max_fallbacks=12, min_co_executed=0)


SCHEDULES: dict[str, Any] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 / (e + 1)),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.*:UserWarning", "ignore:The epoch parameter:UserWarning")
def test_a_schedule_inside_the_step_makes_no_new_paths(name: str) -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = SCHEDULES[name](optimizer)
        plain = training(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
            loss = plain(x, y)
            schedule.step()
            return loss, schedule.get_last_lr()[0]

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer, schedule.get_last_lr()))

    check(make)


def test_reduce_on_plateau_between_steps() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return Program(
            training(model, optimizer),
            lambda i: (batch(i), labels(i)),
            lambda: (model, optimizer),
            lambda i, loss: schedule.step(loss),
        )

    check(make)


def test_tensor_learning_rate() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False, capturable=False)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        plain = training(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = plain(x, y)
            schedule.step()
            return loss

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)


def test_hyper_parameters_changed_by_the_user_between_steps() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def args(i: int) -> tuple[Any, ...]:
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            optimizer.param_groups[0]["weight_decay"] = 0.01 if i > 4 else 0.0
            return batch(i), labels(i)

        return Program(training(model, optimizer), args, lambda: (model, optimizer))

    check(make, n=12)


def test_a_parameter_group_added_later() -> None:
    def make() -> Program:
        model, extra = mlp(), nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def args(i: int) -> tuple[Any, ...]:
            if i == 5:
                optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.1})
            return batch(i), labels(i)

        step = training(nn.Sequential(model, extra), optimizer)
        return Program(step, args, lambda: (model, extra, optimizer))

    check(make, n=12)


def test_frozen_and_thawed_layers() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def args(i: int) -> tuple[Any, ...]:
            model[0].requires_grad_(i % 4 < 2)
            return batch(i), labels(i)

        return Program(training(model, optimizer), args, lambda: (model, optimizer))

    check(make, n=16)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("place", ["before", "after", "between"])
def test_where_gradients_are_zeroed(set_to_none: bool, place: str) -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if place == "before":
                optimizer.zero_grad(set_to_none)
            loss = nn.functional.cross_entropy(model(x), y)
            if place == "between":
                model.zero_grad(set_to_none)
            loss.backward()
            optimizer.step()
            if place == "after":
                optimizer.zero_grad(set_to_none)
            return loss.detach()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)


def test_gradient_accumulation_over_several_calls() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        calls = [0]

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = nn.functional.cross_entropy(model(x), y) / 3
            loss.backward()
            calls[0] += 1
            if calls[0] % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make, n=15, max_fallbacks=5)


def test_gradient_accumulation_inside_one_call() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> list[float]:
            optimizer.zero_grad()
            losses = []
            for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
                loss = nn.functional.cross_entropy(model(part), target)
                loss.backward()
                losses.append(loss)
            optimizer.step()
            return [loss.item() for loss in losses]

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_by_norm_and_by_value(foreach: bool) -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x) * 10, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            nn.utils.clip_grad_value_(model.parameters(), 0.1, foreach=foreach)
            optimizer.step()
            return loss.detach(), norm

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)


def test_a_step_skipped_on_a_bad_norm_rejoins() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> bool:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
            good = bool(norm < 3)
            if good:
                optimizer.step()
            return good

        return Program(step, lambda i: (batch(i) * (100 if i % 4 == 1 else 1), labels(i)), lambda: (model, optimizer))

    check(make, n=14)


def test_ema_by_averaged_model_and_by_hand() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        shadow = copy.deepcopy(model).requires_grad_(False)
        plain = training(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = plain(x, y)
            average.update_parameters(model)
            with torch.no_grad():
                for old, new in zip(shadow.parameters(), model.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
            return loss

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer, average, shadow))

    check(make)


def test_swa_with_batch_norm_update() -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        plain = training(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = plain(x, y)
            average.update_parameters(model)
            return loss

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, average))

    check(make)


def test_autocast_bf16_training() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.dtype]:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
                with torch.autocast("cpu", enabled=False):
                    extra = (logits.float() ** 2).mean()
                loss = nn.functional.cross_entropy(logits, y) + 0.1 * extra
            loss.backward()
            optimizer.step()
            return loss.item(), logits.dtype

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)


def test_autocast_around_the_call() -> None:
    def make() -> Program:
        model = mlp()

        def step(x: torch.Tensor) -> torch.Tensor:
            return model(x) @ torch.ones(3, 2)

        compiled = Program(step, lambda i: (batch(i),), lambda: model)
        return compiled

    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(make)


def test_grad_scaler_with_overflowing_iterations() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.item(), scaler.get_scale()

        return Program(
            step,
            lambda i: (batch(i) * (float("inf") if i % 5 == 3 else 1), labels(i)),
            lambda: (model, optimizer, scaler.state_dict()),
        )

    check(make, n=16, max_fallbacks=4)


def test_two_optimizers_of_a_gan() -> None:
    def make() -> Program:
        maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
        first = torch.optim.Adam(maker.parameters(), lr=0.01)
        second = torch.optim.RMSprop(judge.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> tuple[float, float]:
            fake = maker(x)
            second.zero_grad()
            bad = judge(fake.detach()).mean() - judge(x).mean()
            bad.backward()
            second.step()
            first.zero_grad()
            good = -judge(fake).mean()
            good.backward()
            first.step()
            return bad.item(), good.item()

        return Program(step, lambda i: (batch(i),), lambda: (maker, judge, first, second))

    check(make)


def test_batch_norm_and_its_buffers() -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Program(
            training(model, optimizer),
            lambda i: (batch(i, 6, 16).view(6, 1, 4, 4), labels(i)),
            lambda: (model, optimizer),
        )

    check(make)


def test_running_statistics_read_by_python_in_the_step() -> None:
    def make() -> Program:
        layer = nn.BatchNorm1d(64)

        def step(x: torch.Tensor) -> Any:
            for _ in range(30):
                x = torch.tanh(x @ x)
            y = layer(x)
            return layer.running_mean[0].item(), layer.running_var.sum(), y.sum().item()

        return Program(step, lambda i: (batch(i, 64, 64),), lambda: layer)

    check(make)


def test_train_and_eval_in_one_step() -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = training(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.Tensor]:
            model.train()
            loss = plain(x, y)
            model.eval()
            with torch.no_grad():
                return loss, model(x).argmax(1)

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make)
