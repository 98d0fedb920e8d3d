"""What the inference benchmark computes from times: means, single backends, and the rule for right answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.correctness import excess_of, noisy_runs
from benchmarks.inference_summary import (
    GraphTimes,
    backend_speedup,
    best_single,
    best_speedup,
    geomean,
    graph_times,
    means_of,
)


def measured(backend: str, median_s: float | None, eager_s: float | None = 2.0, outcome: str = "ok") -> dict[str, Any]:
    return {"backend": backend, "median_s": median_s, "eager_s": eager_s, "outcome": outcome}


def test_failures_count_as_one_or_are_dropped_and_nothing_is_clipped() -> None:
    means = means_of([4.0, None, 0.25, 4.0])
    assert means.failures_as_one == pytest.approx(4.0 ** (1 / 4))
    assert means.failures_dropped == pytest.approx(4.0 ** (1 / 3))
    assert (means.lowest, means.failures, means.cases) == (0.25, 1, 4)


def test_means_of_nothing_are_not_a_number() -> None:
    assert math.isnan(geomean([]))
    assert math.isnan(means_of([None]).failures_dropped)
    assert means_of([None]).failures_as_one == 1.0


def test_the_newest_measurement_of_a_backend_counts() -> None:
    times = graph_times([measured("tvm", 1.0), measured("onnxruntime", 0.5), measured("tvm", None, None, "crash")])
    assert times == GraphTimes(2.0, {"onnxruntime": 4.0})
    assert graph_times([measured("tvm", None, None, "error")]) is None


def test_a_ratio_is_taken_within_its_own_session() -> None:
    times = graph_times([measured("a", 1.0, 2.0), measured("b", 2.0, 8.0)])
    assert times is not None
    assert times.speedups == {"a": 2.0, "b": 4.0}
    assert times.eager_s == 5.0


def test_a_backend_runs_what_it_can_and_eager_the_rest() -> None:
    graphs = [GraphTimes(3.0, {"a": 3.0}), GraphTimes(1.0, {"b": 2.0}), None]
    assert backend_speedup(graphs, "a") == pytest.approx(4.0 / (1.0 + 1.0))
    assert backend_speedup(graphs, "b") == pytest.approx(4.0 / 3.5)
    assert backend_speedup(graphs, "c") is None
    assert best_speedup(graphs) == pytest.approx(4.0 / 1.5)
    assert best_speedup([GraphTimes(1.0, {"slow": 0.5})]) == 1.0
    assert best_speedup([None]) is None


def test_the_best_single_backend_is_best_with_its_failures() -> None:
    means = {"fast but rare": means_of([3.0, None, None, None]), "steady": means_of([1.5] * 4)}
    assert best_single(means) == "steady"


EXACT = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
EAGER = EXACT.float()


def test_answers_may_be_16_eps_or_twice_eagers_distance_away() -> None:
    step = 4.0 * torch.finfo(torch.float32).eps
    near, far = EAGER + 8 * step, EAGER + 64 * step
    assert excess_of([near], [EAGER], [EXACT]) < 1.0
    assert excess_of([far], [EAGER], [EXACT]) > 1.0
    assert excess_of([far], [EAGER + 40 * step], [EXACT]) < 1.0


@pytest.mark.parametrize(
    "given",
    [[], [EAGER[:2]], [EAGER.double()], [EAGER * float("nan")], [EAGER, EAGER]],
    ids=["none", "shape", "dtype", "nan", "number"],
)
def test_other_shapes_dtypes_and_nan_are_wrong(given: list[torch.Tensor]) -> None:
    assert excess_of(given, [EAGER], [EXACT]) == float("inf")


def test_integers_are_exact() -> None:
    numbers = torch.arange(3)
    assert excess_of([numbers], [numbers], [numbers]) == 0.0
    assert excess_of([numbers + 1], [numbers], [numbers]) == float("inf")


def test_an_eager_run_that_was_lucky_is_not_the_measure() -> None:
    x = torch.linspace(0.1, 1.0, 64)
    view = x[:32]
    seen = []

    def run() -> list[torch.Tensor]:
        y = x.exp()
        y.add_(1.0)  # writes what a later op reads: it must stay the same memory
        seen.append(x[:32].data_ptr() == view.data_ptr())
        return [y.log().cumsum(0)]

    noisy, exact = noisy_runs(run, 8), [(x.double().exp() + 1).log().cumsum(0)]
    assert all(seen)
    assert not torch.equal(noisy[0][0], noisy[1][0])
    lucky = [exact[0].float()]
    off = [exact[0].float() * (1 + 30 * torch.finfo(torch.float32).eps)]
    assert excess_of(off, lucky, exact) > 1.0
    assert excess_of(off, lucky, exact, [[off[0]]]) < 1.0
    assert excess_of(off, lucky, exact, noisy) <= excess_of(off, lucky, exact)
