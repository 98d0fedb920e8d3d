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
    from coexec.backends.candidates.candidate import Runner
    from coexec.backends.candidates.program import Program

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
        self._program: Program | None = None
        self._run: Runner | None = None

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
        from coexec.tuning.identity import constants_digests, shape_class_of
        from coexec.tuning.program_file import load_program

        program = load_program(Path(question["program"]))
        inside, baked = constants_digests(program)
        return {"shape_class": shape_class_of(program.inputs), "inside": inside, "baked": baked}

    def build(self, question: dict[str, Any]) -> dict[str, Any]:
        """Compile into files."""
        candidate, program = self._prepare(question)
        folder, threads = Path(question["folder"]), int(question["threads"])
        start_s = time.perf_counter()
        metadata = candidate.build(program, folder, threads=threads, budget_s=float(question["budget_s"]))
        return {"metadata": dict(metadata), "seconds": time.perf_counter() - start_s}

    def load(self, question: dict[str, Any]) -> dict[str, Any]:
        """Load from files, as a serving process will; eager as a user has it."""
        from coexec.tuning.fast_eager import fast_program

        candidate, program = self._prepare(question)
        folder, threads = Path(question["folder"]), int(question["threads"])
        start_s = time.perf_counter()
        if candidate.name == "eager":
            self._run = fast_program(program)
        else:
            self._run = candidate.load(folder, question["metadata"], program, threads=threads)
        self._program = program
        return {"seconds": time.perf_counter() - start_s, "static_inputs": len(program.static_inputs)}

    def verify(self, _question: dict[str, Any]) -> dict[str, Any]:
        """Compare with eager on several inputs and repeated calls."""
        from coexec.tuning.inputs import input_sets
        from coexec.tuning.verify import verify

        program, run = self._loaded()
        return verify(program, run, input_sets(program)).to_json()

    def time(self, question: dict[str, Any]) -> dict[str, Any]:
        """Seconds per call."""
        import torch

        program, run = self._loaded()
        inputs = program.inputs
        with torch.no_grad():
            for _ in range(question["lead_in"]):
                run(*inputs)
            if question["one_by_one"]:
                return {"seconds": median(_call_s(run, inputs) for _ in range(question["calls"]))}
            start_s = time.perf_counter()
            for _ in range(question["calls"]):
                run(*inputs)
            return {"seconds": (time.perf_counter() - start_s) / question["calls"]}

    def _prepare(self, question: dict[str, Any]) -> tuple[Any, Program]:
        import torch

        from coexec.backends.candidates.registry import get
        from coexec.tuning.program_file import load_program

        torch.set_num_threads(int(question["threads"]))
        return get(question["candidate"]), load_program(Path(question["program"]))

    def _loaded(self) -> tuple[Program, Runner]:
        if self._program is None or self._run is None:
            raise RuntimeError("nothing is loaded; ask for load first")
        return self._program, self._run


def _call_s(run: Runner, inputs: tuple[Any, ...]) -> float:
    start_s = time.perf_counter()
    run(*inputs)
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
