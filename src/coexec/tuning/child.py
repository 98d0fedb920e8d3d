"""One child process of the tuner, seen from the parent: questions go in, answers come out, or it is clear who failed.

The child leads a process group of its own, so that its compilers end with it. Whatever happens to it (signal, hang,
too much memory) comes back as a :class:`ChildError` with an outcome; nothing of it reaches the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from coexec.errors import CoexecError
from coexec.subgraphs.entries import Outcome
from coexec.tuning.nursery import Nursery
from coexec.tuning.process_tree import resident_bytes, tree

MEMORY_POLL_S = 0.05
LAST_WORDS_BYTES = 1500


class ChildError(CoexecError):
    """The child did not answer. `outcome` blames it: crash, timeout or memory."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


class Child:
    """A running child. Use it as a context manager: leaving the block kills it with everything it started.

    Args:
        nursery: starts it.
        memory_bytes: limit of the resident memory of the child and what it starts.
        name: for error texts.
    """

    def __init__(self, nursery: Nursery, *, memory_bytes: int, name: str) -> None:
        self.name, self._memory_bytes = name, memory_bytes
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self._stopped_s, self._stopped_at = 0.0, None  # type: float, float | None
        self._pausing = threading.Lock()  # another worker's thread pauses this child while it times
        self._partial = b""
        try:
            self._process = nursery.start(self._log.fileno())
        except BaseException:
            self._log.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, question: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send one question and wait for its answer. Errors: ChildError; the child is dead then."""
        try:
            self._process.questions.write(json.dumps(dict(question)).encode() + b"\n")
        except OSError:
            raise self._died() from None
        return self._answer(timeout_s, str(question.get("do")))

    def pause(self) -> None:
        """Stop the child and what it started: while another is timed, not even an idle thread of it may spin."""
        with self._pausing:
            if self._stopped_at is None:
                self._signal(signal.SIGSTOP)
                self._stopped_at = time.monotonic()

    def resume(self) -> None:
        """Let it run again. The time it stood still does not count against its timeout."""
        with self._pausing:
            if self._stopped_at is not None:
                self._stopped_s += time.monotonic() - self._stopped_at
                self._stopped_at = None
                self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it and what it started; whoever waits for an answer learns that the child died."""
        strays = tree(self.pid)[1:]  # some search in sessions of their own, out of the group's reach
        self._signal(signal.SIGKILL)
        for stray in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stray, signal.SIGKILL)

    def end(self) -> None:
        """Kill the whole group and reap the child."""
        self.kill()
        self._process.wait()
        self._process.close()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _answer(self, timeout_s: float, what: str) -> dict[str, Any]:
        start_s, stopped_before_s = time.monotonic(), self._stopped_s
        descriptor = self._process.answers.fileno()
        while b"\n" not in self._partial:
            if select.select([descriptor], [], [], MEMORY_POLL_S)[0]:
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    raise self._died()
                self._partial += chunk
                continue
            self._check_memory(what)
            waited_s = time.monotonic() - start_s - (self._stopped_s - stopped_before_s)
            if self._stopped_at is None and waited_s > timeout_s:
                self.kill()
                raise ChildError(Outcome.TIMEOUT, f"{what} took more than {timeout_s:.0f} s")
        line, _, self._partial = self._partial.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            self._signal(signal.SIGKILL)
            raise ChildError(Outcome.CRASH, f"{what}: the child answered {line[:80]!r}") from error
        return answer

    def _check_memory(self, what: str) -> None:
        used = resident_bytes(self.pid)
        if used > self._memory_bytes:
            self.kill()
            limit, took = self._memory_bytes / 2**30, used / 2**30
            raise ChildError(Outcome.MEMORY, f"{what} took {took:.1f} GiB of memory, {limit:.1f} GiB are allowed")

    def _died(self) -> ChildError:
        status = self._process.wait()
        cause = f"exit status {status}" if status >= 0 else _signal_name(-status)
        return ChildError(Outcome.CRASH, f"its process ended ({cause}): {self._last_words()}")

    def _last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LAST_WORDS_BYTES))
        words = self._log.read().decode(errors="replace").strip()
        return words.partition("\nExtension modules:")[0].strip()  # a page of names behind faulthandler's stack

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = ", perhaps by the kernel for lack of memory" if number == signal.SIGKILL else ""
    return f"{name}{hint}"
