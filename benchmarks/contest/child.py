"""One program under one contender in a process: `python -m benchmarks.contest.child PROGRAM CONTENDER`.

PROGRAM is a name of the catalog, with ":tiny" after it for the small size. See `examples.demo.child.serve` for how the
process is asked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contest.contenders import CONTENDERS, KEPT
from benchmarks.programs import catalog
from benchmarks.programs.program import Program
from examples.demo.child import serve, status_bytes

SEED, FRESH_SEED = 0, 1
QUIET_STEPS = 128
"""Steps without a change of phase or executors after which a co-executed step has settled, its trial included."""
QUIET_STEPS_KEPT = 48
"""The same for a step that is kept in co-execution, where only segments have trials."""
ASK_EVERY = 16


class Worker:
    """What the child can be asked to do: one method per command."""

    def __init__(self, program: str, contender: str) -> None:
        self.name, _, size = program.partition(":")
        self.tiny = size == "tiny"
        self.program = catalog.make(self.name, SEED, self.tiny)
        self.batches: Iterator[Any] = self.program.batches
        self.initial = parameters_of(self.program)
        self.step = CONTENDERS[contender].apply(self.program)
        self.ours = hasattr(self.step, "wait_compiled")
        self.quiet_steps = QUIET_STEPS_KEPT if contender in KEPT else QUIET_STEPS
        self.started_s = time.perf_counter()

    def do_ready(self) -> dict[str, Any]:
        """Answers once the program is built."""
        return {"pid": os.getpid(), "threads": torch.get_num_threads()}

    def do_warm(self, steps: int) -> dict[str, Any]:
        """Runs the first steps; answers with when each ended, how long it took, and its loss."""
        self.started_s = time.perf_counter()
        losses: list[float] = []
        ends_s, times_s = self._run(steps, losses)
        return {"ends_s": ends_s, "times_s": times_s, "losses": losses}

    def do_settle(self, limit_s: float) -> dict[str, Any]:
        """Goes on until nothing changes any more (coexec compiles in the background); after `limit_s` it is waited for.

        The others have nothing to wait for: they compile when they are called.
        """
        ends_s: list[float] = []
        times_s: list[float] = []
        if self.ours and not self._quiet_by(time.perf_counter() + limit_s, ends_s, times_s):
            self.step.wait_compiled(limit_s)  # type: ignore[attr-defined]
            self._quiet_by(time.perf_counter() + limit_s, ends_s, times_s)
        return {"ends_s": ends_s, "times_s": times_s}

    def do_fresh(self) -> dict[str, Any]:
        """From now on all contenders get the same batches, however long they took to settle: new ones, same draws."""
        self.batches = catalog.make(self.name, FRESH_SEED, self.tiny).batches
        return {}

    def do_turn(self, steps: int) -> dict[str, Any]:
        """Runs `steps` steps; answers with their seconds, loading excluded."""
        return {"seconds": sum(self._run(steps)[1])}

    def do_peak(self, steps: int) -> dict[str, Any]:
        """Runs `steps` steps; answers with the highest resident memory while they ran, and of the whole life."""
        whole = status_bytes("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._run(steps)
        return {"peak_bytes": status_bytes("VmHWM"), "life_peak_bytes": whole}

    def do_parameters(self, path: str) -> dict[str, Any]:
        """Writes the parameters before the first step and now to a file, float64[2, n]."""
        np.save(path, np.stack([self.initial, parameters_of(self.program)]))
        return {}

    def do_account(self) -> dict[str, Any]:
        """Answers with what the contender says about itself."""
        if self.ours:
            return {"coexec": coexec_account(self.step)}
        return {"dynamo": dynamo_account()} if "torch._dynamo" in sys.modules else {}

    def do_timeline(self, steps: int, path: str) -> dict[str, Any]:
        """Runs `steps` steps under torch's profiler and writes a Chrome trace."""
        from benchmarks.contest.timeline import record

        return record(self.step, self.batches, steps, Path(path))

    def _run(self, steps: int, losses: list[float] | None = None) -> tuple[list[float], list[float]]:
        ends_s, times_s = [], []
        for _ in range(steps):
            batch = next(self.batches)
            start_s = time.perf_counter()
            loss = self.step(batch)
            end_s = time.perf_counter()
            ends_s.append(end_s - self.started_s)
            times_s.append(end_s - start_s)
            if losses is not None:
                losses.append(float(loss))
        return ends_s, times_s

    def _quiet_by(self, deadline_s: float, ends_s: list[float], times_s: list[float]) -> bool:
        """Runs steps until nothing has changed for a while; False if the time was over before."""
        last, quiet = self._settings(), 0
        while quiet < self.quiet_steps and time.perf_counter() < deadline_s:
            for whole, part in zip((ends_s, times_s), self._run(ASK_EVERY), strict=True):
                whole.extend(part)
            now = self._settings()
            quiet = quiet + ASK_EVERY if now == last and self.step.wait_compiled(0.0) else 0  # type: ignore[attr-defined]
            last = now
        return quiet >= self.quiet_steps

    def _settings(self) -> tuple[Any, ...]:
        stats = self.step.stats()  # type: ignore[attr-defined]
        return stats.phase, stats.segments, stats.switches


def parameters_of(program: Program) -> np.ndarray:
    """Returns all parameters as one float64[n]."""
    flat = [p.detach().flatten().double() for model in program.models.values() for p in model.parameters()]
    return torch.cat(flat).numpy()


def coexec_account(step: Any) -> dict[str, Any]:
    """Returns statistics, waits by reason, and the explanation."""
    return {"stats": asdict(step.stats()), "waits": waits_by_reason(step._runner.waits()), "explain": step.explain()}


def waits_by_reason(waits: Any) -> dict[str, dict[str, float]]:
    """Returns how often Python waited, and for how many seconds where that is known, by reason.

    Args:
        waits: numbers by reason, or entries with `reason`, `count` and `seconds`, one per place of the program.
    """
    if isinstance(waits, dict):
        return {reason: {"count": count} for reason, count in waits.items()}
    totals: dict[str, dict[str, float]] = {}
    for wait in waits:
        total = totals.setdefault(wait.reason, {"count": 0, "seconds": 0.0})
        total["count"] += wait.count
        total["seconds"] += wait.seconds
    return totals


def dynamo_account() -> dict[str, Any]:
    """Returns graphs, graph breaks, and frames that were compiled again, with the first reasons."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "break_reasons": [str(reason).splitlines()[0] for reason in list(counters["graph_break"])[:5]],
        "recompiles": len(reasons),
        "recompile_reasons": [str(reason).splitlines()[0] for reason in reasons[:5]],
    }


def die_with_parent() -> None:
    """Ends this process when the benchmark is killed: it may be asleep then, and nobody else would wake it."""
    set_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    serve(Worker)
