"""A contender in a process of its own: its thread pool, memory and caches disturb nobody else's.

`Child` is the parent's side. The child (`python -m examples.demo.child PROGRAM VARIANT STEPS`) reads one JSON request
per line and answers each with one JSON line. A benchmark with other questions has a module of its own that calls
`serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import IO, Any

import numpy as np

from coexec.tuning.process_tree import is_stopped, tree
from examples.demo.variants import Unavailable, make_runner

ROOT = Path(__file__).resolve().parent.parent.parent
REQUEST_TIMEOUT_S = 900.0
EXIT_TIMEOUT_S = 30.0
SCHEDULE_STEPS = 100_000  # longer than any benchmark trains: the learning rate keeps changing to the end


class ChildFailed(RuntimeError):  # noqa: N818 - reads as a sentence where it is caught
    """The child answered with an error, whose type is `kind` and whose text is `words`, or ended."""

    def __init__(self, text: str, kind: str = "", words: str = "") -> None:
        super().__init__(text)
        self.kind, self.words = kind, words


class Child:
    """One program in one variant in a child process. Use it as a context manager."""

    def __init__(
        self,
        program: str,
        variant: str,
        name: str = "",
        environment: Mapping[str, str] = {},
        module: str = "examples.demo.child",
        steps: int = SCHEDULE_STEPS,
    ) -> None:
        self.name, self.contender = name or variant, variant
        self.timeout_s = REQUEST_TIMEOUT_S  # of each request
        search = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, program, variant, str(steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search), **environment},
            start_new_session=True,  # so that whoever is left after its end can be found
        )
        self.session = self._process.pid
        self.processes = ProcessTree(self.session)
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
            raise ChildFailed(f"{self.name}: {answer['kind']}: {answer['error']}", answer["kind"], answer["error"])
        return answer

    def _read_line(self, stream: IO[str]) -> str:
        """The child's answer; a child that hangs is ended, so that the benchmark is not."""
        if not select.select([stream], [], [], self.timeout_s)[0]:
            self._process.kill()
            raise ChildFailed(f"{self.name}: no answer within {self.timeout_s:.0f} s")
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


class ProcessTree:
    """A process and all that it has started, compilers in process groups of their own among them."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._stopped: list[int] = []

    def stop(self) -> None:
        """Stops them all."""
        # One that was being forked may be missed: until a look finds no more.
        while fresh := [pid for pid in tree(self._root) if pid not in self._stopped and not is_stopped(pid)]:
            self._stopped += fresh
            for pid in fresh:
                _signal(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Undoes `stop`; what one of them had stopped by then stays so (coexec stops its compilers now and then)."""
        stopped, self._stopped = self._stopped, []
        for pid in reversed(stopped):
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class AwakeInTurn:
    """A child that runs during its turns only: in between it is stopped, so that not even an idle thread of it spins.

    Use it as a context manager: after the block the child runs again, and can end.
    """

    def __init__(self, child: Child) -> None:
        self.name, self._child = child.name, child

    def __enter__(self) -> AwakeInTurn:
        self._child.processes.stop()
        return self

    def __exit__(self, *exception: object) -> None:
        self._child.processes.go_on()

    def run_block(self, lead_in: int, steps: int, one_by_one: bool) -> float:
        """See `paired.Contender`."""
        self._child.processes.go_on()
        try:
            return self._child.run_block(lead_in, steps, one_by_one)
        finally:
            self._child.processes.stop()


class ChildRunner:
    """A variant as the demo's race wants it, in a process of its own (see `race.Contender`)."""

    def __init__(self, program: str, variant: str, steps: int) -> None:
        """Starts the process.

        Raises:
            Unavailable: the variant cannot run here.
        """
        try:
            self._child = Child(program, variant, steps=steps)
        except ChildFailed as failure:
            if failure.kind == Unavailable.__name__:
                raise Unavailable(failure.words) from None
            raise

    def run_steps(self, steps: int) -> Iterator[tuple[float, float]]:
        """Yields the loss and the seconds of each step."""
        answer = self._child.ask("turn", steps=steps)
        yield from map(tuple, answer["steps"])
        if answer["failure"]:
            raise ChildFailed(answer["failure"])

    def stats(self) -> Any:
        """Returns coexec's statistics; None for the other variants."""
        stats = self._child.ask("stats").get("stats")
        return None if stats is None else SimpleNamespace(**stats)

    def explain(self) -> str:
        """Returns what coexec says about its step."""
        return str(self._child.ask("stats").get("explain", ""))

    def wait_native(self, timeout_s: float) -> None:
        """Waits for coexec's native core."""
        self._child.ask("wait_native", timeout_s=timeout_s)

    def wait_compiled(self, timeout_s: float) -> bool:
        """Waits for background compilation."""
        return bool(self._child.ask("wait_compiled", timeout_s=timeout_s)["compiled"])

    def parameters(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the parameters before the first step and now, float64[n]."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "parameters.npy")
            self._child.ask("parameters", path=path)
            before, now = np.load(path)
        return before, now

    def close(self) -> int:
        """Ends the process."""
        return self._child.close()


def one_line(error: Exception) -> str:
    """Returns an exception's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


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
            answer = {"error": str(error), "kind": type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    """What the child can be asked to do: one method per command."""

    def __init__(self, program: str, variant: str, steps: int) -> None:
        self.runner = make_runner(program, variant, steps)

    def do_ready(self) -> dict[str, Any]:
        """Answers once the program is built."""
        return {"rss_bytes": resident_bytes(), "pid": os.getpid()}

    def do_turn(self, steps: int) -> dict[str, Any]:
        """Runs `steps` steps; answers with each one's loss and seconds, and the failure that ended them, if any."""
        done: list[tuple[float, float]] = []
        try:
            done.extend(self.runner.run_steps(steps))  # keeps what was yielded before a failure
        except Exception as error:
            return {"steps": done, "failure": one_line(error)}
        return {"steps": done, "failure": ""}

    def do_wait_native(self, timeout_s: float) -> dict[str, Any]:
        """Waits for coexec's native core."""
        self.runner.wait_native(timeout_s)
        return {}

    def do_wait_compiled(self, timeout_s: float) -> dict[str, Any]:
        """Waits for background compilation."""
        return {"compiled": self.runner.wait_compiled(timeout_s)}

    def do_parameters(self, path: str) -> dict[str, Any]:
        """Writes the parameters before the first step and now to a file."""
        np.save(path, np.stack(self.runner.parameters()))
        return {}

    def do_warm(self, steps: int, timeout_s: float) -> dict[str, Any]:
        """Runs `steps` steps, waits for background compilation, and runs `steps` more, so that it is adopted."""
        self._run(3)
        self.runner.wait_native(timeout_s)
        self._run(steps)
        compiled = self.runner.wait_compiled(timeout_s)
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
        stats = self.runner.stats()
        return {} if stats is None else {"stats": asdict(stats), "explain": self.runner.explain()}

    def _run(self, steps: int, losses: list[float] | None = None) -> list[float]:
        times_s = []
        for _ in range(steps):
            loss, duration_s = self.runner.run_step(time.perf_counter)
            times_s.append(duration_s)
            if losses is not None:
                losses.append(loss)
        return times_s

    def _phase(self) -> str:
        stats = self.runner.stats()
        return "eager" if stats is None else str(stats.phase)


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
    serve(lambda program, variant: Worker(program, variant, int(sys.argv[3])))
