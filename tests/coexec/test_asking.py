"""What `explain()` and `stats()` say: why a step is in its phase, where Python waits, how long its Python takes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coexec
from coexec.runtime import step_runner
from coexec.runtime.benefit import BLOCK, BLOCKS, SETTLED_ITERATIONS
from coexec.runtime.history import user_line
from coexec.runtime.step_runner import StepRunner
from tests.coexec.harness import check, exact
from tests.coexec.programs import batch, function_program


def line_of(marker: str) -> str:
    """ "file:line" of the line of this file that ends with `# marker`."""
    return line_in(__file__, marker)


def line_in(file: str, marker: str) -> str:
    """ "file:line" of the line of `file` that ends with `# marker`."""
    lines = Path(file).read_text().splitlines()
    return f"{file}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# {marker}'))}"


def test_waits_and_fetches_are_named_by_line_and_counted_once() -> None:
    @exact
    def step(x: torch.Tensor) -> Any:
        for _ in range(20):
            x = torch.tanh(x @ x)
        total = x.sum().item()  # the fetch
        chosen = x.nonzero()  # the wait
        return total, chosen

    for _ in range(12):
        step(torch.eye(200))
    stats, runner = step.stats(), step._runner
    assert (stats.co_executed, stats.fetches) == (10, 10)
    waits = {(wait.reason, wait.place.split(" ")[0]): wait for wait in runner.waits()}
    fetch, sync = waits["fetch", line_of("the fetch")], waits["sync", line_of("the wait")]
    assert (fetch.count, sync.count, waits["step end", ""].count) == (10, 10, 10)
    assert fetch.seconds > sync.seconds
    assert sum(wait.seconds for wait in waits.values()) == pytest.approx(stats.python_stall_s)
    text = step.explain()
    assert "Python waited for the graph 30 times" in text
    assert f"{line_of('the fetch')} in test_waits" in text
    assert "reads a value: 10 times" in text
    assert "needs real tensors: 10 times" in text


def test_what_only_replays_says_which_option_says_so() -> None:
    w = torch.randn(8, 8)

    def make(**options: Any) -> str:
        step = coexec.compile(lambda x: (x @ w).tanh().exp().sin().cos().sum(), **options)
        for _ in range(12):
            step(torch.ones(8, 8))
        text: str = step.explain()
        return text

    assert "replay (numerics='exact' compiles nothing)" in make(numerics="exact")
    assert "replay (backend='replay' compiles nothing)" in make(backend="replay")
    assert "observing" not in make(numerics="exact")


def test_a_step_that_never_settles_says_why_and_where() -> None:
    ops = [torch.tanh, torch.exp, torch.sin, torch.cos, torch.abs, torch.neg, torch.relu, torch.sigmoid]

    @exact
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for k in random.sample(range(8), 8):
            x = ops[k](x)  # always new
        return x

    random.seed(0)
    for i in range(12):
        step(batch(i))
    text = step.explain()
    assert step.stats().phase == "eager"
    assert "eager, because the last 8 calls each did something that the graph did not know; co-execution is" in text
    assert text.count(line_of("always new")) >= 2
    assert "what was new" in text


def test_what_is_left_for_good_is_not_promised_to_be_tried_again() -> None:
    step = exact(lambda x: x * 2)
    step(batch(0))
    step._runner.policy.settle("of a test")
    assert "because of a test; not tried again" in step.explain()


def test_the_same_fallback_again_and_again_is_one_line() -> None:
    @exact
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        if x[0, 0] > 1e9:
            pass
        raise ValueError("every time")

    for i in range(9):
        with pytest.raises(ValueError, match="every time"):
            step(batch(i))
    events = list(step._runner.history.fallbacks)
    assert len(events) == 0  # an incomplete trace never leads to co-execution
    calm = exact(lambda x, bad: _raising(x, bad))
    for i in range(12):
        try:
            calm(batch(i), i > 4)
        except ValueError:
            continue
    (event,) = calm._runner.history.fallbacks
    assert event.count == calm.stats().fallbacks["exception"] > 1
    assert "the step raised" in calm.explain()


def _raising(x: torch.Tensor, bad: bool) -> torch.Tensor:
    x = x * 2
    if bad:
        raise ValueError("now")
    return x + 1


@pytest.mark.parametrize("overlap", [False, True])
def test_the_time_of_python_is_that_of_the_calls_without_their_waits(overlap: bool) -> None:
    @coexec.compile(numerics="exact", overlap=overlap)
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = torch.tanh(x @ x)
        time.sleep(0.01)
        return x.sum()

    x = torch.eye(400)
    for _ in range(4):
        step(x).item()
    before = step.stats()
    for _ in range(5):
        step(x).item()  # waits inside the call, or after it
    stats = step.stats()
    assert stats.co_executed - before.co_executed == 5
    assert stats.returned_early > 0 if overlap else stats.returned_early == 0
    assert stats.python_exec_s - before.python_exec_s >= 5 * 0.01


def test_a_step_that_is_switched_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    step = exact(lambda x: x * 2)
    monkeypatch.setenv("COEXEC_DISABLE", "1")
    step(batch(0))
    assert step.stats().phase == "eager"
    assert "because COEXEC_DISABLE turns coexec off" in step.explain()
    monkeypatch.delenv("COEXEC_DISABLE")
    assert "because of mode='eager'" in exact(lambda x: x, mode="eager").explain()


def test_an_exception_is_named_with_its_type_and_line() -> None:
    @exact
    def step(x: torch.Tensor, wrong: bool) -> torch.Tensor:
        if wrong:
            raise KeyError("no such row")  # what raises
        return x * 2

    for i in range(8):
        step(batch(i), False)
    with pytest.raises(KeyError):
        step(batch(8), True)
    assert f"exception: the step raised KeyError at {line_of('what raises')}" in step.explain()


def test_segments_and_what_python_waits_for_are_counted_apart() -> None:
    step = exact(lambda x: (x @ x.t()).nonzero().sum() * 2)
    for i in range(8):
        step(batch(i, 200))
    text = step.explain()
    assert step.stats().segments == {"replay": 2}
    assert "2 segments: 2 run by replay" in text
    assert "1 operation between segments that Python waits for" in text


def test_users_folders_may_have_any_name() -> None:
    code = compile("x * 2", "/home/me/coexec/torch/train.py", "eval")
    assert user_line([(code, 0)]).startswith("/home/me/coexec/torch/train.py:")
    beside = str(Path(torch.__file__).parent) + "vision/ops.py"
    assert user_line([(compile("x", beside, "eval"), 0)]).startswith(beside)
    inside = compile("x", torch.nn.functional.__file__, "eval")
    ours = compile("x", step_runner.__file__, "eval")
    assert user_line([(inside, 0), (ours, 0)]) == "unknown place"
    assert user_line([(inside, 0), (code, 0)]).startswith("/home/me")


# Paths that raise -----------------------------------------------------------------------------------------------------


def test_a_path_that_raises_inside_try_in_every_call_is_known() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        h = x.t() * 2
        try:
            return (h @ x[:3]).sum()
        except RuntimeError:
            return h.sum()

    out = check(lambda: function_program(step), n=12, max_fallbacks=0)
    assert out.stats is not None
    assert out.stats.co_executed == 10


def test_paths_that_raise_by_turns_are_known_and_the_others_go_ahead() -> None:
    def make() -> Any:
        def step(x: torch.Tensor, rows: int) -> torch.Tensor:
            h = x.t() * 2
            try:
                return (h @ x[:rows]).sum()
            except RuntimeError:
                return h.sum()

        return step

    compiled, plain = exact(make()), make()
    for i in range(22):
        rows = 6 if i < 6 or i % 2 else 3
        assert torch.equal(compiled(batch(i), rows), plain(batch(i), rows))
    stats = compiled.stats()
    assert stats.co_executed >= 18
    assert sum(wait.count for wait in compiled._runner.waits() if wait.reason == "sync") <= 8  # of those that raise


# Errors that are met more than once -----------------------------------------------------------------------------------

PYTHON_KERNEL = """
import torch, coexec
from coexec.intercept.build import build
build(verbose=False)
torch.set_num_threads(1)
library, bad = torch.library.Library("aten", "IMPL"), [False]

def tanh(x):
    if bad[0]:
        raise ValueError("from a Python kernel")
    return x * 2

library.impl("tanh", tanh, "CPU")
state = torch.zeros(3)

@coexec.compile(numerics="exact")
def step(x):
    state.copy_(x)  # what follows depends on the graph: Python must wait for it
    h, seen = torch.tanh(state), []
    try:
        seen.append(h.sum().item())
    except ValueError as error:
        seen.append(str(error))
    seen.append((h + 1).sum().item())
    return seen

for i in range(7):
    bad[0] = i == 5
    try:
        print(step(torch.ones(3)))
    except ValueError as error:
        print("raised", error, error.__notes__)
"""


def test_a_kernels_python_error_may_be_met_at_several_waits() -> None:
    """pybind11 ends the process if one exception object hands its Python error over twice."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PYTHON_KERNEL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "[6.0, 9.0]"
    assert lines[5].startswith("raised from a Python kernel")
    assert lines[5].count("coexec: raised by aten::tanh") == 1


# Trials ---------------------------------------------------------------------------------------------------------------


def test_a_step_inside_a_plain_call_of_a_trial_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COEXEC_KEEP")
    began: list[str] = []
    original = StepRunner._begin

    def begin(self: StepRunner, *args: Any, **kwargs: Any) -> bool:
        began.append(self.name.rpartition(".")[2])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StepRunner, "_begin", begin)

    @coexec.compile(numerics="exact")
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @coexec.compile(numerics="exact")
    def outer(x: torch.Tensor) -> torch.Tensor:
        with coexec.step("inner block", numerics="exact"):
            x = x * 2
        return inner(x) * 2

    for _ in range(SETTLED_ITERATIONS + BLOCK * BLOCKS + 6):
        if not outer._runner.benefit.verdict:
            assert outer(torch.ones(2)).tolist() == [6.0, 6.0]
    assert outer._runner.benefit.verdict
    assert set(began) == {"outer"}
    inner(torch.ones(2))
    assert began[-1] == "inner"


# Late errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meet", ["read", "gradient", "stats", "next call", "another thing"])
def test_gradients_in_the_handler_of_a_late_error_are_eagers(meet: str) -> None:
    table = nn.Embedding(5, 4)

    @coexec.compile(numerics="exact", overlap=True)
    def step(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        table.zero_grad()
        for _ in range(20):
            x = torch.tanh(x @ x)
        loss = (table(ids) + x.sum()).sum()
        loss.backward()
        return loss.detach()

    good, bad, x = torch.tensor([0, 1]), torch.tensor([0, 9]), torch.randn(300, 300)
    for _ in range(6):
        step(good, x)
    step.stats()
    loss = step(bad, x)
    actions = {
        "read": loss.item,
        "gradient": lambda: table.weight.grad.sum(),
        "stats": step.stats,
        "next call": lambda: step(good, x),
        "another thing": lambda: torch.manual_seed(0),
    }
    with pytest.raises(IndexError):
        actions[meet]()
    assert table.weight.grad is None  # as in eager, which never came to backward()


# Without a core -------------------------------------------------------------------------------------------------------

NO_CORE = """
import warnings, torch, coexec
step = coexec.compile(lambda x: x * 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        assert step(torch.ones(2)).tolist() == [2.0, 2.0]
        with coexec.step():
            torch.ones(2).sum()
print([(str(w.message), w.lineno) for w in caught])
print(step.stats().phase)
print(step.explain())
"""


@pytest.mark.parametrize("what", ["others may write", "a file is in the way"])
def test_an_unusable_cache_folder_is_reported_once_and_the_step_runs(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    if what == "others may write":
        (folder / "native").mkdir(parents=True, mode=0o700)
        folder.chmod(0o777)
    else:
        folder.write_text("")
    done = subprocess.run(
        [sys.executable, "-c", NO_CORE],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COEXEC_CACHE_DIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    caught, phase, *text = done.stdout.splitlines()
    assert caught.count("coexec is off in this process") == 1
    assert str(folder) in caught
    assert "COEXEC_CACHE_DIR" in caught
    assert ("chmod go-w" in caught) == (what == "others may write")
    assert caught.endswith(", 7)]")  # the line that called the step
    assert phase == "eager"
    assert str(folder) in text[0]
