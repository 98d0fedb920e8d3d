"""What a child of the tuner does: it answers one question per line on stdin, until stdin ends or its parent is gone.

    {"do": "describe", "program": path}                           its classes of sizes and weights: see Facts
    {"do": "build", "program": path, "candidate": name, "folder": path, "threads": n, "budget_s": s}
    {"do": "load", "program": path, "candidate": name, "folder": path, "metadata": {...}, "threads": n}
    {"do": "verify"}                                              the loaded one, against eager and float64
    {"do": "time", "lead_in": n, "calls": n, "one_by_one": bool}  the loaded one: {"seconds": per call}

An answer is `{"ok": true, ...}` or `{"ok": false, "refused": bool, "reason": text}`. Whatever backends print goes to
stderr, which the parent keeps for last words.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from coexec.tuning.subject import Subject

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 0.5
REASON_CHARS = 1000


def serve(parent: int) -> None:
    """Answer questions; called in a fresh copy of the nursery, which is `parent`."""
    die_with(parent)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()  # for systems without that signal
    _die_first()
    faulthandler.enable(all_threads=False)
    answers = _take_stdout()
    server = Server()
    with os.fdopen(0, "rb", closefd=False) as questions:
        for line in questions:
            answers.write(json.dumps(server.answer(json.loads(line))) + "\n")
            answers.flush()


class Server:
    """What this child has loaded."""

    def __init__(self) -> None:
        self._subject: Subject | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked. Every Python error is an answer."""
        from coexec.backends.candidates.candidate import CandidateError

        handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "describe": self.describe,
            "build": self.build,
            "load": self.load,
            "verify": self.verify,
            "time": self.time,
        }
        try:
            return {"ok": True, **handlers[question["do"]](question)}
        except CandidateError as error:
            return {"ok": False, "refused": True, "reason": error.reason[:REASON_CHARS]}
        except MemoryError:
            return {"ok": False, "refused": False, "reason": "MemoryError"}
        except Exception as error:
            return {"ok": False, "refused": False, "reason": f"{type(error).__name__}: {error}"[:REASON_CHARS]}

    def describe(self, question: dict[str, Any]) -> dict[str, Any]:
        """What decisions about the program are keyed by, besides its graph."""
        return self._opened(question).describe()

    def build(self, question: dict[str, Any]) -> dict[str, Any]:
        """Compile into files."""
        subject = self._opened(question)
        folder, threads = Path(question["folder"]), int(question["threads"])
        start_s = time.perf_counter()
        metadata = subject.build(question["candidate"], folder, threads, float(question["budget_s"]))
        return {"metadata": dict(metadata), "seconds": time.perf_counter() - start_s}

    def load(self, question: dict[str, Any]) -> dict[str, Any]:
        """Load from files, as a serving process will."""
        subject = self._opened(question)
        folder, threads = Path(question["folder"]), int(question["threads"])
        start_s = time.perf_counter()
        facts = subject.load(question["candidate"], folder, question["metadata"], threads)
        self._subject = subject
        return {"seconds": time.perf_counter() - start_s, **facts}

    def verify(self, _question: dict[str, Any]) -> dict[str, Any]:
        """Compare with the ops as recorded."""
        return self._loaded().verify()

    def time(self, question: dict[str, Any]) -> dict[str, Any]:
        """Seconds per call."""
        import torch

        subject = self._loaded()
        with torch.no_grad():
            subject.begin()
            for _ in range(question["lead_in"]):
                subject.call()
            if question["one_by_one"]:
                return {"seconds": median(_call_s(subject) for _ in range(question["calls"]))}
            start_s = time.perf_counter()
            for _ in range(question["calls"]):
                subject.call()
            return {"seconds": (time.perf_counter() - start_s) / question["calls"]}

    def _opened(self, question: dict[str, Any]) -> Subject:
        from coexec.tuning.subject import open_subject

        return open_subject(Path(question["program"]))

    def _loaded(self) -> Subject:
        if self._subject is None:
            raise RuntimeError("nothing is loaded; ask for load first")
        return self._subject


def _call_s(subject: Subject) -> float:
    start_s = time.perf_counter()
    subject.call()
    return time.perf_counter() - start_s


def die_with(parent: int) -> None:
    """Let the kernel end this process when `parent` ends, even if that is killed while we are stopped.

    The signal comes when the *thread* that started us ends. SIGKILL, because nothing else reaches a stopped process;
    compilers that we started then end by themselves when they are done.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before we asked for the signal


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _die_first() -> None:
    """When the machine runs out of memory, the kernel takes this process and not the tuner or somebody's work."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _take_stdout() -> TextIO:
    """Keep stdout's pipe for answers and send everything that is printed to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
