"""The check accepts what rounds differently and refuses what is wrong. Artifacts are Python functions here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from coexec.backends import publish, verify
from coexec.backends.reference import run_reference
from coexec.backends.verify import Report, error_and_bound
from tests.backends.programs import mlp_adamw
from tests.backends.recording import Recorder, Recording, record

Artifact = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Change = Callable[[list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]]


def check(recording: Recording, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, timed: bool = False) -> Report:
    """Verify with `artifact` in place of a compiled library."""
    monkeypatch.setattr(verify, "load", lambda library: artifact)
    return verify.verify(recording.spec, Path("none"), recording.fresh_inputs(), recording.rng_before, timed)


def small(mode: str = "functional") -> Recording:
    """One matrix product, one write, one publish, one draw."""
    torch.manual_seed(2)
    memory, weight = torch.randn(8, 8), torch.randn(8, 8)

    def run(recorder: Recorder) -> Sequence[torch.Tensor]:
        product = memory @ weight
        recorder.publish(product)
        memory.mul_(0.5)
        return [product.tanh(), product.argmax(1), torch.rand(4)]

    return record(run, mode)  # type: ignore[arg-type]


def faithful(recording: Recording) -> Artifact:
    """An artifact that does what the segment says, by its own way of calling."""

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        results = run_reference(recording.spec, inputs)
        for entry, value in zip(recording.spec.publishes, results.published, strict=True):
            publish.received.append((entry.channel, value))
        return results.outputs + (results.mutated if recording.spec.mode == "functional" else [])

    return run


@pytest.mark.parametrize("mode", ["functional", "commit"])
def test_a_faithful_artifact_is_accepted(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = small(mode)
    before = torch.get_rng_state()
    report = check(recording, faithful(recording), monkeypatch, timed=True)
    assert report.accepted
    assert report.compared == 5
    assert 0.1 < report.ratio < 10
    assert torch.equal(torch.get_rng_state(), before)


def wrong(change: Change) -> Callable[[Recording], Artifact]:
    """A faithful artifact whose results (and inputs) are then changed."""

    def make(recording: Recording) -> Artifact:
        run = faithful(recording)
        return lambda inputs: change(run(inputs), inputs)

    return make


WRONG: dict[str, tuple[Change, str]] = {
    "one element off": (lambda r, i: [r[0] + 1e-3 * (torch.arange(64).view(8, 8) == 5), *r[1:]], "outputs 0 is 0.001"),
    "not a number": (lambda r, i: [torch.where(r[0] == r[0][0, 0], torch.nan, r[0]), *r[1:]], "infinite or NaN"),
    "another index": (lambda r, i: [r[0], (r[1] + 1) % 8, *r[2:]], "outputs 1: 8 of 8 elements differ"),
    "another dtype": (lambda r, i: [r[0].double(), *r[1:]], "result 0 is .*float64"),
    "other strides": (lambda r, i: [r[0].t().contiguous().t(), *r[1:]], r"result 0 is .*\(1, 8\)"),
    "one result less": (lambda r, i: r[:-1], "returned 3 tensors, 4 are expected"),
    "an input itself": (lambda r, i: [*r[:3], i[0].mul_(0.5)], "shares memory"),
    "an input written": (lambda r, i: (i[1].zero_(), r)[1], "input 1 was written"),
    "one draw more": (lambda r, i: (torch.rand(1), r)[1], "generator is left in another state"),
    "a publish missing": (lambda r, i: (publish.received.clear(), r)[1], r"published on channels \[\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_artifact_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = small()
    change, message = WRONG[name]
    report = check(recording, wrong(change)(recording), monkeypatch)
    assert not report.accepted
    assert any(re.search(message, problem) for problem in report.problems), report.problems


def test_strides_of_dimensions_of_one_element_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution by 1x1 gives its weight's gradient the strides of channels-last memory: the same addresses."""
    torch.manual_seed(2)
    x = torch.randn(3, 4)
    recording = record(lambda recorder: [(x * 2).view(3, 4, 1, 1).clone()], "functional")

    def change(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [results[0].as_strided((3, 4, 1, 1), (4, 1, 4, 4)), *results[1:]]

    report = check(recording, wrong(change)(recording), monkeypatch)
    assert report.accepted, report.problems


def test_a_published_value_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = small()

    def change(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        publish.received[0][1].add_(0.1)
        return results

    report = check(recording, wrong(change)(recording), monkeypatch)
    assert [p.split(" is ")[0] for p in report.problems] == ["published 0"]


def test_the_bound_is_the_documented_one() -> None:
    wide = torch.tensor([1.0, -4.0], dtype=torch.float64)
    narrow = wide.float() + torch.tensor([0.0, 3e-3])
    error, allowed = error_and_bound(wide.float() + torch.tensor([5e-3, 0.0]), narrow, wide)
    assert error == pytest.approx(5e-3, rel=1e-3)
    assert allowed == pytest.approx(6e-3, rel=1e-3)  # twice eager's distance
    exact = error_and_bound(wide.float(), wide.float(), wide)
    assert exact == (0.0, pytest.approx(16 * 2**-23 * 4))  # 16 eps of the largest magnitude


def test_a_decision_that_rounding_flips_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both columns are equal up to rounding, so which one is larger is not decided by float32."""
    torch.manual_seed(0)
    base = torch.randn(50, 1)
    columns = torch.cat([base, base], 1)
    recording = record(lambda _: [(columns * 1.1 * 0.7).argmax(1)])

    def other(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [1 - results[0]]

    report = check(recording, wrong(other)(recording), monkeypatch)
    assert report.accepted
    assert report.by_noise == ["outputs 0"]
    decided = record(lambda _: [(columns + torch.tensor([0.0, 1.0])).argmax(1)])
    assert not check(decided, wrong(other)(decided), monkeypatch).accepted


def test_pure_cancellation_is_measured_by_eagers_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a = torch.randn(4000)
    recording = record(lambda _: [((a * 1.3) - (a * 1.3).mean()).sum()])
    rounding = float(recording.outputs[0].abs()) + 1e-4

    def change(size: float) -> Artifact:
        return wrong(lambda r, i: [r[0] + size])(recording)

    assert check(recording, change(rounding * 0.1), monkeypatch).accepted
    assert not check(recording, change(10.0), monkeypatch).accepted


def test_a_loss_that_wants_probabilities_bears_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of one became 1.0000001, and the loss raised: the segment was never compiled."""
    torch.manual_seed(0)
    logits = torch.randn(64)

    def real_or_not(recorder: Recorder) -> list[torch.Tensor]:
        fake = torch.nn.functional.binary_cross_entropy(logits.sigmoid(), torch.zeros(64))
        return [torch.nn.functional.binary_cross_entropy(logits.sigmoid(), torch.ones(64)) - fake]

    def certain(recorder: Recorder) -> list[torch.Tensor]:
        return [torch.nn.functional.binary_cross_entropy((logits * 1e3).sigmoid(), torch.ones(64)) / 3]

    for step in (real_or_not, certain):  # a sigmoid of exactly one, too, is beyond it with the noise
        recording = record(step)
        almost, off = (wrong(lambda r, i, by=by: [r[0] * by])(recording) for by in (1 + 1e-6, 1.01))
        check(recording, almost, monkeypatch)
        assert not check(recording, off, monkeypatch).accepted


def test_a_training_step_with_a_wrong_step_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = mlp_adamw(mode="functional")

    def change(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        weight = next(k for k, t in enumerate(results) if t.shape == (64, 32))
        return [t * 1.0001 if k == weight else t for k, t in enumerate(results)]

    report = check(recording, wrong(change)(recording), monkeypatch)
    assert len(report.problems) == 1
