"""Compiling in a child: nobody waits for it, it survives everything, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coexec.backends.cache import Artifact, ArtifactCache, Failure
from coexec.backends.key import artifact_key
from coexec.backends.leftovers import FOREIGN_AGE_S, own_prefix
from coexec.backends.snapshot import write_snapshot
from coexec.backends.spec import SegmentSpec
from coexec.backends.worker import CompileWorker, Finished
from coexec.config import private_cache_dir
from tests.backends.programs import mlp_adamw
from tests.backends.recording import Recording, record
from tests.backends.test_spec import small_spec

ANSWER = """
import json, os, sys, time
print("starting", file=sys.stderr, flush=True)
for line in sys.stdin:
    job = json.loads(line)
    spec = open(job["spec"]).read()
    {body}
    print(json.dumps({{"job": job["job"], "key": "", "failure": {{"kind": "wrong", "reason": "played"}},
                      "report": None}}), flush=True)
"""


def dead_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_killed_processes_left_is_removed_when_a_worker_starts() -> None:
    folder, dead = private_cache_dir("compile"), dead_process()
    ours, here = own_prefix("live"), own_prefix("live").split("-")[1]
    gone_names = [
        f"live-{here}-{dead}-0.bin",
        f"live-{here}-{dead}-0.json",
        f"spec-{here}-{dead}-x.json",
        "live-77-1.bin",
    ]
    kept_names = [f"{ours}0.bin", f"live-000000-{dead}-0.bin", "spec-younger.json", "notes.txt"]
    for name in (*gone_names, *kept_names):
        (folder / name).write_text("")
    (folder / f"job-{here}-{dead}-y").mkdir()
    (folder / f"job-{here}-{dead}-y" / "unit.cpp").write_text("")
    day_before_s = time.time() - FOREIGN_AGE_S - 60
    for name in ("live-77-1.bin", "notes.txt"):  # the first as an older coexec named it
        os.utime(folder / name, (day_before_s, day_before_s))
    worker = play("pass")
    worker.submit(small_spec())
    ended(worker)
    worker.close()
    assert {path.name for path in folder.iterdir()} == set(kept_names)


@pytest.fixture(autouse=True)
def own_cache_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache; tests that really compile share one, where Inductor keeps what it knows of the machine."""
    if request.node.get_closest_marker("compile") is None:
        monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "cache"))


def play(body: str, **options: float) -> CompileWorker:
    """A worker whose child runs `body` for each job and then refuses it."""
    code = ANSWER.format(body=body.replace("\n", "\n    "))
    return CompileWorker(command=[sys.executable, "-c", code], **options)  # type: ignore[arg-type]


def other(threads: int) -> SegmentSpec:
    return replace(small_spec(), threads=threads)


def ended(worker: CompileWorker, timeout_s: float = 30.0) -> list[Finished]:
    finished = worker.wait(timeout_s)
    assert not worker.busy()
    return finished


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    """The process no longer runs (a zombie that nobody reaps counts as gone)."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_answers_come_back_in_order_and_files_go_away(tmp_path: Path) -> None:
    worker = play("assert 'aten::mul.Tensor' in spec")
    jobs = [worker.submit(other(n)) for n in (1, 2, 3)]
    finished = ended(worker)
    assert [f.job for f in finished] == jobs
    assert {f.failure.reason for f in finished if f.failure} == {"played"}
    assert list((tmp_path / "cache" / "compile").iterdir()) == []
    worker.close()


def test_no_call_waits_for_the_child() -> None:
    worker = play("time.sleep(60)")
    worker.submit(other(1))
    start = time.monotonic()
    for n in range(2, 12):
        worker.submit(other(n))
        assert worker.poll() == []
    worker.close()
    assert time.monotonic() - start < 5


def test_a_crash_fails_its_job_and_the_next_one_gets_a_new_child() -> None:
    worker = play("if '\"threads\":1}' in spec: print('last words', file=sys.stderr, flush=True); os.abort()")
    crashed, fine = worker.submit(other(1)), worker.submit(other(2))
    finished = {f.job: f.failure for f in ended(worker)}
    assert finished[crashed] is not None
    assert finished[crashed].kind == "crashed"
    assert "compiler crashed" in finished[crashed].reason
    assert "last words" in finished[crashed].reason
    assert finished[fine] is not None
    assert finished[fine].reason == "played"
    again = worker.submit(other(1))  # remembered: no child is asked
    assert [(f.job, f.failure.kind) for f in worker.poll() if f.failure] == [(again, "crashed")]
    worker.close()


def test_a_job_that_takes_too_long_is_ended_and_remembered() -> None:
    worker = play("if '\"threads\":1}' in spec: time.sleep(60)", timeout_s=1.0)
    slow, fine = worker.submit(other(1)), worker.submit(other(2))
    finished = {f.job: f.failure for f in ended(worker)}
    assert finished[slow] is not None
    assert finished[slow].kind == "timeout"
    assert finished[fine] is not None
    assert isinstance(ArtifactCache().get(finished[slow].key), Failure)
    worker.close()


def test_a_cancelled_job_is_not_reported() -> None:
    worker = play("time.sleep(60 if '\"threads\":1}' in spec else 0)")
    running, waiting, last = (worker.submit(other(n)) for n in (1, 2, 3))
    worker.poll()
    pid = worker.child_pid
    assert pid is not None
    assert worker.cancel(waiting)
    assert worker.cancel(running)
    assert not worker.cancel(99)
    assert gone(pid)
    assert [f.job for f in ended(worker)] == [last]
    worker.close()


def test_the_child_is_idle_in_our_session_and_in_a_group_of_its_own() -> None:
    worker = play("time.sleep(60)")
    worker.submit(other(1))
    pid = worker.child_pid
    assert pid is not None
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE or os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid != os.getpgid(0)
    worker.close()
    assert gone(pid)


def test_a_child_that_cannot_start_is_no_error_of_the_caller() -> None:
    worker = CompileWorker(command=["/nowhere/python"])
    worker.submit(other(1))
    (finished,) = ended(worker)
    assert finished.failure is not None
    assert "could not be started" in finished.failure.reason
    assert ArtifactCache().get(finished.key) is None  # no fault of the segment: tried again next time


def test_a_fork_leaves_the_child_to_its_owner() -> None:
    worker = play("time.sleep(1)")
    job = worker.submit(other(1))
    pid = os.fork()
    if pid == 0:  # the copy: has no jobs, and may compile with a child of its own
        try:
            clean = worker.poll() == [] and not worker.busy() and worker.child_pid is None
            own = worker.submit(other(2))
            clean = clean and [f.job for f in worker.wait(20)] == [own]
            worker.close()
            os._exit(0 if clean else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [f.job for f in ended(worker)] == [job]
    worker.close()


OWNER = """
import sys, time
from coexec.backends.worker import CompileWorker
from tests.backends.test_spec import small_spec
worker = CompileWorker()
worker.submit(small_spec())
print(worker.child_pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["time.sleep(60)", "sys.exit(0)", "raise SystemError", "__import__('os')._exit(3)"])
def test_nothing_is_left_when_the_owner_ends(end: str) -> None:
    root = Path(__file__).resolve().parents[2]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(end=end)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    assert not gone(child, 0.0)
    if "sleep" in end:
        time.sleep(2.5)  # the child is importing torch by now
        owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert gone(child)


@pytest.mark.parametrize("end", ["time.sleep(60)"])
def test_a_stopped_child_and_its_compilers_end_with_a_killed_owner(end: str, tmp_path: Path) -> None:
    """The pacer stops the child's group; the owner is killed in such a moment."""
    root = Path(__file__).resolve().parents[2]
    code = OWNER.format(end="import os, signal\ntime.sleep(3)\nos.killpg(worker.child_pid, signal.SIGSTOP)\n" + end)
    started = code.replace("worker = CompileWorker()", f"worker = CompileWorker(command={_with_compiler(tmp_path)})")
    owner = subprocess.Popen(
        [sys.executable, "-c", started.replace("import sys", "import os, sys")], stdout=subprocess.PIPE, cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    deadline_s = time.monotonic() + 30
    while _state(child) != "T" and time.monotonic() < deadline_s:
        time.sleep(0.05)
    compiler = int((tmp_path / "compiler").read_text())
    while _state(compiler) != "T" and time.monotonic() < deadline_s:
        time.sleep(0.05)  # the signal reaches the members of a group one after the other
    assert (_state(child), _state(compiler)) == ("T", "T")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert gone(child)
    assert gone(compiler)


def _with_compiler(folder: Path) -> str:
    """The child's command, as source: the real one, after it has started a process in its group."""
    code = (
        "import subprocess, sys, pathlib;"
        f"p = subprocess.Popen(['sleep', '61.9']); pathlib.Path({str(folder / 'compiler')!r}).write_text(str(p.pid));"
        "from coexec.backends.worker_main import main; sys.exit(main(sys.argv[1:]))"
    )
    return f"[sys.executable, '-c', {code!r}, '--parent', str(os.getpid())]"


def _state(pid: int) -> str:
    """The kernel's letter for it: "T" is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def a_small_recording() -> Recording:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    return record(lambda _: [(a @ b).tanh(), a.add_(b)][:1])


@pytest.mark.compile
def test_a_segment_is_compiled_checked_and_found_again(tmp_path: Path) -> None:
    recording, worker = a_small_recording(), CompileWorker()
    worker.cache.forget(artifact_key(recording.spec))
    write_snapshot(tmp_path / "live.json", recording.inputs, None)
    worker.submit(recording.spec, tmp_path / "live.json")
    (finished,) = ended(worker, 300)
    assert finished.failure is None
    assert finished.artifact is not None
    assert finished.report is not None
    assert finished.report["accepted"]
    assert finished.report["ratio"] > 0
    assert not (tmp_path / "live.json").exists()
    worker.close()
    second = CompileWorker()
    second.submit(recording.spec)
    (known,) = second.poll()  # at once, without a child
    assert isinstance(known.artifact, Artifact)
    assert known.report == finished.report
    assert second.child_pid is None


@pytest.mark.compile
def test_wrong_live_results_and_uncompilable_segments_are_failures_with_a_reason(tmp_path: Path) -> None:
    worker = CompileWorker()
    recording, honest = record(lambda _: [torch.randn(40).exponential_()]), a_small_recording()
    unknown = replace(honest.spec.ops[1], op="aten::nonexistent")
    broken_spec = replace(honest.spec, ops=(honest.spec.ops[0], unknown, honest.spec.ops[2]))
    for spec in (recording.spec, broken_spec):
        worker.cache.forget(artifact_key(spec))
        worker.submit(spec)
    refused, broken = ended(worker, 300)
    assert refused.failure is not None
    assert refused.failure.kind == "not lowerable"
    assert "exponential" in refused.failure.reason
    assert broken.failure is not None
    assert broken.failure.kind == "compile error"
    assert "nonexistent" in broken.failure.reason
    worker.close()


@pytest.mark.compile
def test_a_training_step_goes_through(tmp_path: Path) -> None:
    recording, worker = mlp_adamw(mode="commit"), CompileWorker()
    worker.cache.forget(artifact_key(recording.spec))
    write_snapshot(tmp_path / "live.json", recording.inputs, recording.rng_before)
    worker.submit(recording.spec, tmp_path / "live.json", timed=False)
    (finished,) = ended(worker, 300)
    assert finished.failure is None
    assert finished.report is not None
    assert finished.report["problems"] == []
    worker.close()
