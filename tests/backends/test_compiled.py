"""Compiled segments: eager's results within the rule, publishes at their place, writes where they belong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from coexec.backends import publish
from coexec.backends.aliasing import covering_inputs
from coexec.backends.publish import PublishLostError, check_generated_code
from coexec.backends.spec import Mode
from coexec.backends.verify import load, verify
from tests.backends.conftest import Compile
from tests.backends.programs import PROGRAMS
from tests.backends.recording import Recorder, record

pytestmark = pytest.mark.compile

CASES = [
    ("mlp_adamw", "commit"),
    ("mlp_adamw", "functional"),
    ("convnet_sgd", "functional"),
    ("transformer_adamw", "commit"),
    ("view_soup", "commit"),
    ("view_soup", "functional"),
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_programs_pass_the_check(name: str, mode: Mode, compiled: Compile) -> None:
    recording = PROGRAMS[name](mode=mode)
    artifact = compiled(recording.spec)
    report = verify(recording.spec, artifact.library, recording.fresh_inputs(), recording.rng_before, timed=False)
    assert report.problems == []
    assert report.wide
    expected = len(recording.spec.outputs) + len(recording.spec.mutated) + len(recording.spec.publishes)
    assert report.compared == expected
    places = artifact.meta["publish_places"]
    assert len(places) == len(recording.spec.publishes)
    assert places == sorted(places)


def test_a_library_from_elsewhere_is_checked_where_nothing_was_compiled(compiled: Compile) -> None:
    """An imported one, or the tuner's: it was refused, because the op that it publishes with was not there yet."""
    recording = PROGRAMS["mlp_adamw"](mode="commit")
    library = compiled(recording.spec).library
    publish.unregister_publish()
    report = verify(recording.spec, library, recording.fresh_inputs(), recording.rng_before, timed=False)
    assert recording.spec.publishes
    assert report.problems == []


@pytest.mark.parametrize("name", ["mlp_adamw", "transformer_adamw"])
def test_the_loss_is_published_before_the_backward_pass(name: str, compiled: Compile) -> None:
    """Without an order, Inductor puts the call behind everything."""
    artifact = compiled(PROGRAMS[name](mode="commit").spec)
    assert 0.1 < artifact.meta["publish_places"][0] < 0.6


def test_commit_writes_parameters_in_place_without_a_copy(compiled: Compile) -> None:
    recording = PROGRAMS["mlp_adamw"](mode="commit")
    artifact = compiled(recording.spec)
    inputs = recording.fresh_inputs()
    addresses = [t.data_ptr() for t in inputs]
    publish.register_publish()
    torch.set_rng_state(recording.rng_before)
    returned = load(artifact.library)(list(inputs))
    assert len(returned) == len(recording.spec.outputs)
    assert addresses == [t.data_ptr() for t in inputs]
    for position, expected in zip(recording.spec.mutated, recording.mutated, strict=True):
        torch.testing.assert_close(inputs[position], expected, rtol=1e-4, atol=1e-5)
    body = artifact.meta["code"]
    body = body[body.rfind("AOTInductorModel::run_impl(") :]
    # A written parameter is an output pointer of the kernel that computes it, and nothing copies whole tensors.
    written = {int(n) for n in re.findall(r"\(float\*\)\(arg(\d+)_1\.data_ptr\(\)\)", body)}
    floats = [i for i in recording.spec.mutated if recording.spec.input_value(i).dtype == "float32"]
    assert set(floats) <= written
    assert "aoti_torch_copy_" not in body
    assert "aoti_torch_clone" not in body


def test_a_result_that_copies_what_is_written_has_memory_of_its_own(compiled: Compile) -> None:
    """The compiler takes such a copy for one that changes nothing, and returns the input itself."""
    cache, row, usage = torch.randn(6, 3), torch.randn(3), torch.zeros(6)

    def run(recorder: Recorder) -> Sequence[torch.Tensor]:
        before = cache.clone()
        cache[2].copy_(row * 2)
        usage.mul_(0.9)[2].add_(1)
        return [before, cache.clone(), cache[1:3].clone(), usage.clone(), cache.t() + 0, usage.sum()]

    recording = record(run, "commit")
    artifact = compiled(recording.spec)
    report = verify(recording.spec, artifact.library, recording.fresh_inputs(), timed=False)
    assert report.problems == []


def test_adam_step_sizes_are_read_at_run_time(compiled: Compile) -> None:
    recording = PROGRAMS["mlp_adamw"](mode="commit")
    run = load(compiled(recording.spec).library)
    results = []
    for factor in (1.0, 3.0):
        inputs = [t * factor if t.dtype == torch.float64 else t for t in recording.fresh_inputs()]
        run(list(inputs))
        results.append(inputs)
    weight = next(i for i in recording.spec.mutated if len(recording.spec.input_value(i).sizes) == 2)
    assert not torch.equal(results[0][weight], results[1][weight])


def test_publishes_keep_their_order_where_nothing_else_orders_them(compiled: Compile) -> None:
    a = torch.randn(64, 64)

    def run(recorder: Recorder) -> Sequence[torch.Tensor]:
        late = (a @ a).sum()
        early = a.sum()  # could be computed first
        recorder.publish(late)
        recorder.publish(early)
        recorder.publish(a)
        recorder.publish(late)
        return [torch.tanh(a @ a.t())]

    recording = record(run)
    artifact = compiled(recording.spec)
    report = verify(recording.spec, artifact.library, recording.fresh_inputs(), timed=False)
    assert report.problems == []
    assert artifact.meta["publish_places"][-1] < 1.0  # the second product is made to wait


def test_a_publish_sees_the_content_of_its_moment(compiled: Compile) -> None:
    memory = torch.arange(6.0)

    def run(recorder: Recorder) -> Sequence[torch.Tensor]:
        recorder.publish(memory)
        memory.mul_(3)
        recorder.publish(memory)
        memory.add_(1)
        return [memory + 1]

    recording = record(run, "commit")
    assert [t.tolist() for t in recording.published] == [[0, 1, 2, 3, 4, 5], [0, 3, 6, 9, 12, 15]]
    report = verify(recording.spec, compiled(recording.spec).library, recording.fresh_inputs(), timed=False)
    assert report.problems == []


def test_results_never_share_memory(compiled: Compile) -> None:
    """Results that are an input, a view of an input, each other, or a part of something larger."""
    a, b = torch.randn(4, 6), torch.randn(6)

    def run(_: Recorder) -> Sequence[torch.Tensor]:
        wide = a @ torch.ones(6, 8)
        return [a.clone(), a.t().clone(), wide[:, :4].clone(), wide[:, 4:].contiguous(), b.expand(3, 6).contiguous()]

    recording = record(run)
    report = verify(recording.spec, compiled(recording.spec).library, recording.fresh_inputs(), timed=False)
    assert report.problems == []


@pytest.mark.parametrize("mode", ["functional", "commit"])
def test_draws_that_nobody_uses_move_the_generator(mode: Mode, compiled: Compile) -> None:
    a, seen = torch.randn(4, 6), torch.zeros(6)

    def run(_: Recorder) -> Sequence[torch.Tensor]:
        h = a * 2
        (F.dropout(h, 0.3) + 1).exp()
        torch.rand(3)
        seen.add_(torch.rand(6))
        torch.bernoulli(h.sigmoid(), 0.5)
        return [h]

    recording = record(run, mode)
    artifact = compiled(recording.spec)
    report = verify(recording.spec, artifact.library, recording.fresh_inputs(), recording.rng_before, timed=False)
    assert report.problems == []
    assert report.compared == 2


@pytest.mark.parametrize("mode", ["functional", "commit"])
def test_writes_through_strided_and_overlapping_views(mode: Mode, compiled: Compile) -> None:
    a, table, grid, scratch = torch.randn(6), torch.ones(7, 6), torch.ones(6, 4), torch.ones(4, 3)
    later, column, middle = table[1:], grid[:, 0], scratch.view(-1)[3:9]

    def run(_: Recorder) -> Sequence[torch.Tensor]:
        later.copy_(a.expand(6, 6))
        column.add_(a)
        middle.zero_()
        scratch.add_(0.5)
        middle.mul_(a)
        return [scratch.sum()]

    recording = record(run, mode)
    spec = replace(recording.spec, mutated=covering_inputs(recording.spec))
    assert len(spec.mutated) == 3  # `middle` is a part of `scratch`
    report = verify(spec, compiled(spec).library, recording.fresh_inputs(), timed=False)
    assert report.problems == []
    assert report.compared == 4


def test_strides_are_the_recorded_ones_after_channels_last_work(compiled: Compile) -> None:
    x, w = torch.randn(2, 4, 8, 8), torch.randn(6, 4, 3, 3)

    def run(_: Recorder) -> Sequence[torch.Tensor]:
        h = F.relu(F.conv2d(x, w, padding=1))
        return [h, F.conv2d(h, torch.ones(2, 6, 3, 3)), h.permute(0, 2, 3, 1).contiguous()]

    recording = record(run)
    report = verify(recording.spec, compiled(recording.spec).library, recording.fresh_inputs(), timed=False)
    assert report.problems == []


def test_bfloat16_rounds_where_eager_does(compiled: Compile) -> None:
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()

    def run(_: Recorder) -> Sequence[torch.Tensor]:
        h = torch.nn.functional.gelu(a * b + a) * 1.7
        return [h.softmax(-1), h.sum(0), (h @ a.t()).tanh()]

    recording = record(run)
    report = verify(recording.spec, compiled(recording.spec).library, recording.fresh_inputs(), timed=False)
    assert report.problems == []


def test_a_lost_or_doubled_publish_is_found_in_the_code(compiled: Compile) -> None:
    artifact = compiled(PROGRAMS["mlp_adamw"](mode="commit").spec)
    code = artifact.meta["code"]
    ops = {"nodes": [{"node": {"target": "coexec::publish"}}]}
    assert check_generated_code(code, [0], ops) == artifact.meta["publish_places"]
    for channels in ([], [1], [0, 1]):
        with pytest.raises(PublishLostError):
            check_generated_code(code, channels, ops)
    call = re.search(r"^.*aoti_torch_proxy_executor_call_function\(proxy_executor.*$", code, re.MULTILINE)
    assert call is not None
    with pytest.raises(PublishLostError, match=r"\[0, 0\]"):
        check_generated_code(code.replace(call[0], call[0] + "\n" + call[0]), [0], ops)


def test_the_thread_count_is_part_of_the_code(compiled: Compile) -> None:
    x = torch.randn(512, 512)
    recording = record(lambda _: [torch.sin(x) * torch.cos(x)])
    for threads in (1, 2):
        spec = replace(recording.spec, threads=threads)
        report = verify(spec, compiled(spec).library, recording.fresh_inputs(), timed=False)
        assert report.problems == []
