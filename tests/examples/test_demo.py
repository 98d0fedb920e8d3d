"""The demo's programs and its race, short: the two programs learn, runners do not disturb each other, failures show."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from examples.demo import race, report, variants
from examples.demo.child import ChildRunner
from examples.demo.race import Lane, Race
from examples.demo.variants import EAGER, make_runner


@pytest.mark.parametrize(("program", "steps", "target"), [("gpt", 12, 0.97), ("digits", 25, 0.9)])
def test_program_learns(program: str, steps: int, target: float) -> None:
    runner = make_runner(program, EAGER, steps=300)
    losses = [runner.run_step(time.perf_counter)[0] for _ in range(steps)]
    assert sum(losses[-4:]) / 4 < target * losses[0]


def test_runners_taking_turns_get_the_results_of_runners_alone() -> None:
    alone = make_runner("digits", EAGER, steps=300)
    expected = [alone.run_step(time.perf_counter)[0] for _ in range(6)]
    one, other = make_runner("digits", EAGER, steps=300), make_runner("digits", EAGER, steps=300)
    turns = [(one.run_step(time.perf_counter)[0], other.run_step(time.perf_counter)[0]) for _ in range(6)]
    assert turns == [(loss, loss) for loss in expected]


def test_equal_lanes_agree_and_a_different_one_does_not() -> None:
    lanes = [Lane(EAGER, make_runner("digits", EAGER, steps=300)) for _ in range(2)]
    lanes.append(Lane("other data", make_runner("digits", EAGER, steps=300, seed=1)))
    for lane in lanes:
        lane.run(3)
        lane.finish()
    assert lanes[1].parameter_distance(lanes[0]) == 0.0
    assert report.agreement(lanes[1], lanes[0]) == "agree (0e+00)"
    assert report.agreement(lanes[2], lanes[0]).startswith("DIFFER")
    lanes[1].losses.pop()
    assert report.agreement(lanes[1], lanes[0]) == "did not finish"


def test_first_fast_step_is_the_first_of_a_fast_run() -> None:
    lane = Lane("x", paired_s=[0.010, 0.010, 0.011])
    lane.times_s = [2.0, 0.010, 0.5, 0.011, 0.010, 0.010, 0.010]
    lane.ended_s = [2.0, 2.1, 2.6, 2.7, 2.8, 2.9, 3.0]
    assert lane.first_fast_s() == 2.7
    lane.times_s, lane.ended_s = [2.0, *[0.020] * 30], [2.0 + 0.02 * n for n in range(31)]
    assert lane.first_fast_s() == 2.02  # the machine was busier during the whole warm-up
    assert Lane("never timed").first_fast_s() is None


class Breaking:
    """A coexec step that works twice and then raises, as a bug in coexec would."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls > 2:
            raise RuntimeError("broken on purpose\nsecond line")
        return self.function(batch)

    def stats(self) -> Any:
        return SimpleNamespace(phase="co-execution", fallbacks={"because": 2}, segments={"inductor": 3, "replay": 1})

    def explain(self) -> str:
        return "explained"

    def wait_compiled(self, timeout_s: float) -> bool:
        return timeout_s > 0


def run_short_race(names: list[str], monkeypatch: pytest.MonkeyPatch) -> Race:
    monkeypatch.setattr(race, "FIRST_STEPS", 1)
    monkeypatch.setattr(race, "WARMUP_STEPS", 2)
    monkeypatch.setattr(race, "SETTLE_STEPS", 0)
    return race.run_race("digits", names, 8, lambda what, done: None, make_runner)


def test_variant_that_breaks_is_reported_and_the_others_finish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(variants, "_coexec_compile", lambda: Breaking)
    finished = run_short_race([EAGER, "coexec"], monkeypatch)
    assert [len(lane.losses) for lane in finished.lanes] == [8, 2]
    assert report.reasons(finished) == ["coexec: step 3: RuntimeError: broken on purpose"]
    cells = report.cells_of(finished.lanes[1], finished.lanes[0])
    assert cells["parameters"] == "did not finish"
    report.plot_losses([finished], tmp_path / "loss.png")
    report.plot_step_times([finished], tmp_path / "time.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == (tmp_path / "time.png").read_bytes()[:4] == b"\x89PNG"


def test_machine_without_coexec_still_compares_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> Any:
        raise variants.Unavailable("no core")

    monkeypatch.setattr(variants, "_coexec_compile", unavailable)
    finished = run_short_race([EAGER, "coexec"], monkeypatch)
    assert finished.lanes[1].problem == "not available: no core"
    assert finished.lanes[0].median_s is not None


def test_table_shows_what_coexec_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Working(Breaking):
        def __call__(self, batch: Any) -> Any:
            return self.function(batch)

    monkeypatch.setattr(variants, "_coexec_compile", lambda: Working)
    finished = run_short_race([EAGER, "coexec"], monkeypatch)
    cells = report.cells_of(finished.lanes[1], finished.lanes[0])
    assert cells["parameters"] == "agree (0e+00)"
    assert (cells["phase"], cells["fallbacks"], cells["segments"]) == ("co-execution", "2", "3 inductor, 1 replay")
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.make_table(finished))
    console.file.close()
    assert "3 inductor, 1 replay" in console.export_text()


def test_a_variant_in_a_process_of_its_own_is_the_variant() -> None:
    """Up to the order of sums: kernels choose it by how memory happens to be aligned in a process."""
    near, far = make_runner("digits", EAGER, steps=300), ChildRunner("digits", EAGER, steps=300)
    try:
        assert [loss for loss, _ in far.run_steps(3)] == pytest.approx(
            [loss for loss, _ in near.run_steps(3)], rel=1e-5
        )
        for mine, theirs in zip(far.parameters(), near.parameters(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
        assert (far.stats(), far.explain(), far.wait_compiled(1.0)) == (None, "", True)
    finally:
        assert far.close() == 0


def test_a_program_that_cannot_be_built_is_a_lane_that_says_why() -> None:
    lane = race.open_lane("no.such.program", EAGER, 10, ChildRunner)
    assert lane.problem == "eager: ModuleNotFoundError: No module named 'no'"


def test_random_states_are_kept_apart() -> None:
    torch.manual_seed(1)
    first = variants.RngState()
    torch.manual_seed(2)
    second = variants.RngState()
    draws = []
    for state in (first, second, first, second):
        state.enter()
        draws.append(torch.rand(1).item())
        state.leave()
    torch.manual_seed(1)
    assert [draws[0], draws[2]] == torch.rand(2).tolist()
