"""Compiles segments in a child process while the user's step keeps running.

    worker = CompileWorker()
    job = worker.submit(spec, snapshot)     # returns at once
    for done in worker.poll(): ...          # returns at once; call it now and then
    worker.close()

No call waits for the child. One job is with the child at a time, so a crash has one suspect; the others wait here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from coexec.backends.cache import REFUSED, Artifact, ArtifactCache, Failure, digest_of
from coexec.backends.key import hash_text, key_text
from coexec.backends.leftovers import own_prefix, sweep
from coexec.backends.snapshot import delete_snapshot
from coexec.backends.spec import SegmentSpec
from coexec.backends.spec_json import dumps
from coexec.backends.symbolic import SymbolicSpec
from coexec.config import private_cache_dir
from coexec.errors import CacheFolderError
from coexec.intercept.background import make_room, pacer

TIMEOUT_S = 600.0
MEMORY_BYTES = 16 << 30
LOG_TAIL_BYTES = 1500


@dataclass(frozen=True, slots=True)
class Finished:
    """How a job ended: with an artifact or with a failure."""

    job: int
    key: str
    artifact: Artifact | None
    failure: Failure | None
    report: Mapping[str, Any] | None  # of verify, if it ran now or when the artifact was made


@dataclass(slots=True)
class _Job:
    number: int
    key: str
    text: str  # what the key is the hash of
    spec_path: Path | None  # None if the answer is known already
    snapshots: tuple[Path, ...]
    timed: bool
    note: str = ""  # where the segment was met, for people
    library: Path | None = None  # compiled already, to be checked on the snapshots
    started_s: float = 0.0


class CompileWorker:
    """Compiles segments in one child process.

    Args:
        cache: where artifacts go; the child uses the same folder.
        timeout_s: a job that runs longer is ended and remembered as failing.
        memory_bytes: limit of the child's private memory, and of each compiler that it starts.
        command: replaces the child's program, for tests.
    """

    def __init__(
        self,
        cache: ArtifactCache | None = None,
        timeout_s: float = TIMEOUT_S,
        memory_bytes: int = MEMORY_BYTES,
        command: list[str] | None = None,
    ) -> None:
        self.cache = cache or ArtifactCache()
        self._timeout_s, self._memory_bytes, self._command = timeout_s, memory_bytes, command
        self._lock = threading.Lock()  # poll and submit may come from different threads
        self._owner_pid = os.getpid()
        self._next = 0
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._finished: list[Finished] = []
        self._child: _Child | None = None
        self._swept = False  # what killed processes have left in the compile folder
        _workers.add(self)

    def submit(self, spec: SegmentSpec, snapshot: Path | None = None, timed: bool = True, note: str = "") -> int:
        """Queue a segment; return the job's number.

        Args:
            spec: what to compile.
            snapshot: live inputs to check on (see :mod:`coexec.backends.snapshot`); removed when the job ends. Without
                one the artifact is stored unchecked. A library that is known, and that nobody has checked here, is
                checked on them, and the usual one compiled if it is wrong.
            timed: also time the artifact against the recorded ops.
            note: where the segment was met, for people; kept with the artifact.
        """
        return self._submit(key_text(spec), dumps(spec), () if snapshot is None else (snapshot,), timed, note)

    def submit_symbolic(self, spec: SymbolicSpec, snapshots: Sequence[Path], timed: bool = True, note: str = "") -> int:
        """Queue a segment for many sizes; return the job's number.

        Args:
            spec: what to compile.
            snapshots: live inputs of each of `spec.observed`; the artifact is checked on all of them.
            timed, note: as for :meth:`submit`.
        """
        text = f"[{','.join(dumps(observed) for observed in spec.observed)}]"
        return self._submit(key_text(spec), text, tuple(snapshots), timed, note)

    def _submit(self, key_text: str, text: str, snapshots: tuple[Path, ...], timed: bool, note: str) -> int:
        key = hash_text(key_text)
        known = self.cache.get(key)
        with self._lock:
            self._next += 1
            job = _Job(self._next, key, key_text, None, snapshots, timed, note)
            if isinstance(known, Artifact) and not known.is_checked and snapshots:
                job.library = known.library
                self._enqueue(job, text)
            elif known is not None:
                self._finish_known(job, known)
            else:
                self._enqueue(job, text)
            return job.number

    def poll(self) -> list[Finished]:
        """Jobs that ended since the last call. Starts the next one; never waits."""
        with self._lock:
            self._read_answers()
            self._check_child()
            self._start_next()
            if self._running is None and self._child is not None:
                pacer.dismiss(self._child.process.pid)
            finished, self._finished = self._finished, []
            return finished

    def busy(self) -> bool:
        """Some job has not ended, or its end has not been polled."""
        with self._lock:
            return bool(self._running or self._waiting or self._finished)

    def wait(self, timeout_s: float) -> list[Finished]:
        """Poll until no job is left or `timeout_s` has passed; return all that ended."""
        deadline_s, finished = time.monotonic() + timeout_s, list[Finished]()
        while self.busy() and time.monotonic() < deadline_s:
            finished += self.poll()
            time.sleep(0.02)
        return finished + self.poll()

    def cancel(self, job: int) -> bool:
        """Drop a job that has not ended: it will not be reported. Returns whether there was one."""
        with self._lock:
            if self._running is not None and self._running.number == job:
                self._stop_child()
                self._clean(self._running)
                self._running = None
                return True
            for waiting in self._waiting:
                if waiting.number == job:
                    self._waiting.remove(waiting)
                    self._clean(waiting)
                    return True
            return False

    def close(self) -> None:
        """End the child and drop every job. A later submit starts again."""
        with self._lock:
            self._stop_child()
            for job in (*self._waiting, *([self._running] if self._running else [])):
                self._clean(job)
            self._waiting.clear()
            self._running, self._finished = None, []

    def close_if_ours(self) -> None:
        """`close`, unless this process is a forked copy: child and files belong to the process that was copied."""
        if os.getpid() == self._owner_pid:
            self.close()

    @property
    def child_pid(self) -> int | None:
        """The child's process id while it runs."""
        return None if self._child is None else self._child.process.pid

    def forget_child_after_fork(self) -> None:
        """In a forked copy: the child and its jobs belong to the process that was copied."""
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        if self._child is not None:
            self._child.disown()
        self._child, self._running, self._finished = None, None, []
        self._waiting.clear()

    # ---------------------------------------------------------------------------------------- under the lock from here

    def _enqueue(self, job: _Job, text: str) -> None:
        try:
            # In a file: a pipe takes 64 KiB and would block us while the child is importing torch.
            folder = private_cache_dir("compile")
            descriptor, name = tempfile.mkstemp(prefix=own_prefix("spec"), suffix=".json", dir=folder)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            job.spec_path = Path(name)
        except (OSError, CacheFolderError) as error:
            return self._fail(job, "compile error", f"the segment cannot be handed over: {error}", remember=False)
        self._waiting.append(job)
        self._start_next()

    def _finish_known(self, job: _Job, known: Artifact | Failure) -> None:
        artifact = known if isinstance(known, Artifact) else None
        failure = known if isinstance(known, Failure) else None
        report = artifact.meta.get("report") if artifact else None
        self._finished.append(Finished(job.number, job.key, artifact, failure, report))
        self._clean(job)

    def _fail(self, job: _Job, kind: str, reason: str, remember: bool = True) -> None:
        failure = Failure(job.key, kind, reason)
        if remember:
            facts = {} if job.library is None else {REFUSED: digest_of(job.library)}
            failure = self.cache.put_failure(job.key, job.text, kind, reason, facts)
        self._finished.append(Finished(job.number, job.key, None, failure, None))
        self._clean(job)

    def _clean(self, job: _Job) -> None:
        if job.spec_path is not None:
            job.spec_path.unlink(missing_ok=True)
        for snapshot in job.snapshots:
            delete_snapshot(snapshot)

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        job = self._waiting.popleft()
        try:
            if self._child is None:
                self._sweep()
                self._child = _Child(self._command or _command(self._memory_bytes))
            self._child.send(job)
        except OSError as error:
            self._stop_child()
            return self._fail(job, "crashed", f"the compile process could not be started: {error}", remember=False)
        job.started_s = time.monotonic()
        self._running = job
        pacer.admit(self._child.process.pid)

    def _sweep(self) -> None:
        """Once: later nobody but us has begun anything here that could be left behind."""
        if not self._swept:
            self._swept = True
            with contextlib.suppress(CacheFolderError):  # the job will say so
                sweep(private_cache_dir("compile"))

    def _read_answers(self) -> None:
        for answer in self._child.answers() if self._child is not None else ():
            job = self._running
            if job is not None and answer.get("job") == job.number:
                self._running = None
                self._take(job, answer)

    def _take(self, job: _Job, answer: dict[str, Any]) -> None:
        if (failure := answer["failure"]) is not None:
            # The child has stored it already.
            facts = {"op": failure["op"]} if "op" in failure else {}
            known = Failure(job.key, failure["kind"], failure["reason"], facts)
            self._finished.append(Finished(job.number, job.key, None, known, answer["report"]))
            return self._clean(job)
        artifact = self.cache.get(job.key)
        if not isinstance(artifact, Artifact):
            return self._fail(job, "compile error", "the artifact vanished from the cache folder", remember=False)
        self._finished.append(Finished(job.number, job.key, artifact, None, answer["report"]))
        self._clean(job)

    def _check_child(self) -> None:
        """A child that ended fails its job; a job that takes too long loses its child."""
        job, child = self._running, self._child
        if child is None:
            return
        if (status := child.process.poll()) is not None:
            reason = f"compiler crashed (exit status {status}): {child.last_words()}"
            self._stop_child()
            if job is not None:
                self._running = None
                self._fail(job, "crashed", reason)
        elif job is not None and self._worked_s(job, child) > self._timeout_s:
            self._stop_child()
            self._running = None
            self._fail(job, "timeout", f"compiling took more than {self._timeout_s:.0f} s")

    @staticmethod
    def _worked_s(job: _Job, child: _Child) -> float:
        return time.monotonic() - job.started_s - pacer.stopped_s(child.process.pid)

    def _stop_child(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None


class _Child:
    """The process, its pipes, and what it printed."""

    def __init__(self, command: list[str]) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by end)
        try:
            self.process = _start(command, self.log)
        except BaseException:
            self.log.close()
            raise
        make_room(self.process.pid)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.partial = b""
        # Also runs at interpreter exit; does nothing in a forked copy.
        self.end = weakref.finalize(self, _end, self.process, self.log, os.getpid())

    def send(self, job: _Job) -> None:
        """Hand a job over: one short line, so the pipe never fills."""
        message = {
            "job": job.number,
            "spec": str(job.spec_path),
            "snapshots": [str(snapshot) for snapshot in job.snapshots],
            "timed": job.timed,
            "note": job.note,
            "library": None if job.library is None else str(job.library),
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """Complete answers that have arrived."""
        assert self.process.stdout is not None
        while True:
            chunk = self.process.stdout.read(1 << 16)
            if not chunk:
                break
            self.partial += chunk
        *lines, self.partial = self.partial.split(b"\n")
        return [json.loads(line) for line in lines]

    def last_words(self) -> str:
        """The end of what the child printed."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - LOG_TAIL_BYTES))
        return self.log.read().decode(errors="replace").strip()

    def disown(self) -> None:
        """In a forked copy: close our ends of the pipes, or the child would not see its parent go."""
        self.end.detach()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                _replace_by_null(pipe.fileno())
        self.process.returncode = 0  # not our child: nothing to wait for


def _replace_by_null(descriptor: int) -> None:
    """Close a pipe under the feet of its file object, whose lock another thread may have held at the fork."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def _end(process: subprocess.Popen[bytes], log: IO[bytes], owner_pid: int) -> None:
    """Kill the child with its compilers and reap it."""
    if os.getpid() != owner_pid:
        return
    pacer.dismiss(process.pid)
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unsent bytes for a dead child
                continue
    log.close()


def _start(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        process_group=0,  # Ctrl-C does not reach it, and its compilers end with it; the session is ours
        env=_environment(),
    )


def _command(memory_bytes: int) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "coexec.backends.worker_main"]
    command += ["--parent", str(os.getpid()), "--memory-bytes", str(memory_bytes)]
    # The kernel's parent-death signal follows the thread that forks: see worker_main.
    return [*command, "--die-with-thread"] if threading.current_thread() is threading.main_thread() else command


def _environment() -> dict[str, str]:
    """The child finds the same torch and coexec, compiles on one core, and is never intercepted itself."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COEXEC_DISABLE": "1"}


_workers: weakref.WeakSet[CompileWorker] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for worker in list(_workers):
        worker.forget_child_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _close_all() -> None:
    """At exit: what was captured for the child (live inputs) must not stay in the cache folder."""
    for worker in list(_workers):
        worker.close_if_ours()


atexit.register(_close_all)
