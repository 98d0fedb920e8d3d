"""A contender in a process of its own: its thread pool, memory and caches disturb nobody else's.

`Child` is the parent's side. The child (`python -m benchmarks.child PROGRAM VARIANT`) reads one JSON request per line
and answers each with one JSON line. A benchmark with other questions has a module of its own that calls `serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
REQUEST_TIMEOUT_S = 900.0
EXIT_TIMEOUT_S = 30.0
SCHEDULE_STEPS = 10_000  # longer than any benchmark trains: the learning rate keeps changing to the end


class ChildFailed(RuntimeError):  # noqa: N818 - reads as a sentence where it is caught
    """The child answered with an error, or ended."""


class Child:
    """One program in one variant in a child process. Use it as a context manager."""

    def __init__(
        self,
        program: str,
        variant: str,
        name: str = "",
        environment: Mapping[str, str] = {},
        module: str = "benchmarks.child",
    ) -> None:
        self.name = name or variant
        search = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, program, variant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search), **environment},
            start_new_session=True,  # so that whoever is left after its end can be found
        )
        self.session = self._process.pid
        try:
            self.ask("ready")
        except ChildFailed:
            self.close()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request and waits for its answer.

        Raises:
            ChildFailed: with the child's own words.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._read_line(self._process.stdout)
        except BrokenPipeError:
            line = ""
        if not line:
            raise ChildFailed(f"{self.name}: the process ended (exit status {self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildFailed(f"{self.name}: {answer['error']}")
        return answer

    def _read_line(self, stream: IO[str]) -> str:
        """The child's answer; a child that hangs is ended, so that the benchmark is not."""
        if not select.select([stream], [], [], REQUEST_TIMEOUT_S)[0]:
            self._process.kill()
            raise ChildFailed(f"{self.name}: no answer within {REQUEST_TIMEOUT_S:.0f} s")
        return stream.readline()

    def run_block(self, lead_in: int, steps: int, one_by_one: bool) -> float:
        """See `paired.Contender`."""
        return float(self.ask("block", lead_in=lead_in, steps=steps, one_by_one=one_by_one)["seconds"])

    def close(self) -> int:
        """Lets the child end by itself, as a script does, and returns its exit status."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        return self._process.returncode


class AwakeInTurn:
    """A child that runs during its turns only: in between it is stopped, so that not even an idle thread of it spins.

    Use it as a context manager: after the block the child runs again, and can end.
    """

    def __init__(self, child: Child) -> None:
        self.name, self._child = child.name, child

    def __enter__(self) -> AwakeInTurn:
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *exception: object) -> None:
        self._signal(signal.SIGCONT)

    def run_block(self, lead_in: int, steps: int, one_by_one: bool) -> float:
        """See `paired.Contender`."""
        self._signal(signal.SIGCONT)
        try:
            return self._child.run_block(lead_in, steps, one_by_one)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.session, number)


def serve(make_worker: Callable[[str, str], Any]) -> None:
    """The child's loop: requests on stdin, answers on what was stdout.

    Args:
        make_worker: gets the program and the variant; each `do_<command>` of what it returns answers one command.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the program prints goes to stderr, not among the answers
    worker: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            worker = worker or make_worker(sys.argv[1], sys.argv[2])
            answer = getattr(worker, f"do_{command}")(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    """What the child can be asked to do: one method per command."""

    def __init__(self, program: str, variant: str) -> None:
        from examples.demo.variants import make_runner

        self.runner = make_runner(program, variant, SCHEDULE_STEPS)

    def do_ready(self) -> dict[str, Any]:
        """Answers once the program is built."""
        return {"rss_bytes": resident_bytes(), "pid": os.getpid()}

    def do_warm(self, steps: int, timeout_s: float) -> dict[str, Any]:
        """Runs `steps` steps, waits for background compilation, and runs `steps` more, so that it is adopted."""
        self._run(3)
        deadline_s = time.monotonic() + timeout_s
        while self._phase() == "building" and time.monotonic() < deadline_s:
            time.sleep(0.2)
        self._run(steps)
        compiled = True
        if hasattr(self.runner.step, "wait_compiled"):
            compiled = bool(self.runner.step.wait_compiled(timeout_s))
            self._run(steps)
        return {"compiled": compiled}

    def do_block(self, lead_in: int, steps: int, one_by_one: bool) -> dict[str, Any]:
        """Runs one turn; see `paired.Contender`."""
        self._run(lead_in)
        times_s = self._run(steps)
        return {"seconds": median(times_s) if one_by_one else sum(times_s) / steps}

    def do_steps(self, steps: int) -> dict[str, Any]:
        """Runs `steps` steps; answers with each one's time, the loss, memory and threads afterwards."""
        losses: list[float] = []
        times_s = self._run(steps, losses)
        threads = len(os.listdir("/proc/self/task"))
        return {
            "times_s": times_s,
            "loss": losses[-1],
            "rss_bytes": resident_bytes(),
            "threads": threads,
            "phase": self._phase(),
        }

    def do_peak(self, steps: int) -> dict[str, Any]:
        """Runs `steps` steps and answers with the highest resident memory while they ran."""
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._run(steps)
        return {"peak_bytes": status_bytes("VmHWM")}

    def do_stats(self) -> dict[str, Any]:
        """Answers with what coexec says about itself; empty for the other variants."""
        if not hasattr(self.runner.step, "stats"):
            return {}
        return {"stats": asdict(self.runner.step.stats()), "explain": self.runner.step.explain()}

    def _run(self, steps: int, losses: list[float] | None = None) -> list[float]:
        times_s = []
        for _ in range(steps):
            loss, duration_s = self.runner.run_step(time.perf_counter)
            times_s.append(duration_s)
            if losses is not None:
                losses.append(loss)
        return times_s

    def _phase(self) -> str:
        return str(self.runner.step.stats().phase) if hasattr(self.runner.step, "stats") else "eager"


def status_bytes(entry: str) -> int:
    """Returns an entry of /proc/self/status that counts kilobytes, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(entry + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(entry)


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return status_bytes("VmRSS")


if __name__ == "__main__":
    serve(Worker)
