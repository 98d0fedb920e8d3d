"""A segment of co-execution, and a variant of its library, in a child of the tuner.

A call is one run on each set of sizes that was recorded. It goes through Python (10 to 100 us more than in a step, for
every variant alike), so that small segments look more alike here than they are: a tie, and the usual library stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coexec.backends import publish, variants
from coexec.backends.reference import copy_memory
from coexec.backends.segment_program import SegmentProgram
from coexec.backends.verify import check

SEEDS = (0, 1)
"""Of the inputs that a variant is checked on."""


class SegmentSubject:
    """See :class:`coexec.tuning.subject.Subject`."""

    def __init__(self, program: SegmentProgram) -> None:
        publish.register_publish()
        self._program = program
        self._recorded: list[list[torch.Tensor]] = []
        self._inputs: list[list[torch.Tensor]] = []
        self._runs: list[variants.Run] = []
        self._is_replay = False

    def describe(self) -> dict[str, Any]:
        """A segment's key says everything."""
        return {"shape_class": "", "inside": "", "baked": ""}

    def build(self, candidate: str, folder: Path, threads: int, budget_s: float) -> Mapping[str, Any]:
        """Compile into files, for the segment's own number of threads."""
        return variants.get(candidate).build(self._program, folder)

    def load(self, candidate: str, folder: Path, metadata: Mapping[str, Any], threads: int) -> dict[str, Any]:
        """Load it; every call will have the segment's own number of threads."""
        torch.set_num_threads(self._program.threads)
        variant, numbers = variants.get(candidate), range(len(self._program.observed))
        self._runs = [variant.load(self._program, number, folder) for number in numbers]
        self._is_replay = candidate == variants.REPLAY
        self._recorded = [observation.inputs(SEEDS[0]) for observation in self._program.observed]
        return {"static_inputs": 0}

    def verify(self) -> dict[str, Any]:
        """As the compile worker checks a library, on inputs like the recorded ones; replay is what they are checked by.

        The report of the first check that finds a problem, or else of the one with the largest error.
        """
        if self._is_replay:
            return {"accepted": True, "problems": [], "worst": 0.0, "wide": True}
        worst: dict[str, Any] = {}
        for seed in SEEDS:
            for observation, run in zip(self._program.observed, self._runs, strict=True):
                state = torch.Generator().manual_seed(seed).get_state()
                found = check(observation.spec, run, observation.inputs(seed), state, timed=False).to_json()
                if not found["accepted"]:
                    return found
                worst = max(worst, found, key=lambda report: report.get("worst", -1.0))
        return worst

    def begin(self) -> None:
        """Inputs as recorded: a segment that writes has changed them."""
        if not self._runs:
            raise RuntimeError("nothing is loaded; ask for load first")
        torch.manual_seed(SEEDS[0])
        self._inputs = [
            copy_memory(observation.spec, inputs)
            for observation, inputs in zip(self._program.observed, self._recorded, strict=True)
        ]

    def call(self) -> None:
        """One run at each of the recorded sizes."""
        with torch.no_grad():
            for run, inputs in zip(self._runs, self._inputs, strict=True):
                run(list(inputs))
        publish.received.clear()
