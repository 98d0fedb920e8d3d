"""A stored graph of `torch.compile`, and a candidate backend for it, in a child of the tuner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coexec.backends.candidates.candidate import Runner
from coexec.backends.candidates.program import Program
from coexec.backends.candidates.registry import get
from coexec.backends.graph_indices import GraphIndices, graph_indices


class GraphSubject:
    """See :class:`coexec.tuning.subject.Subject`."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._run: Runner | None = None
        self._indices = GraphIndices()  # looked at before each call, as where it serves

    def describe(self) -> dict[str, Any]:
        """Classes of sizes and weights: see :class:`coexec.tuning.standing.Facts`."""
        from coexec.tuning.identity import constants_digests, shape_class_of

        inside, baked = constants_digests(self._program)
        return {"shape_class": shape_class_of(self._program.inputs), "inside": inside, "baked": baked}

    def build(self, candidate: str, folder: Path, threads: int, budget_s: float) -> Mapping[str, Any]:
        """Compile into files, if serving could look at all indices. Errors: CandidateError."""
        torch.set_num_threads(threads)
        found = get(candidate)
        graph_indices(self._program.module).needed_by(found)
        return found.build(self._program, folder, threads=threads, budget_s=budget_s)

    def load(self, candidate: str, folder: Path, metadata: Mapping[str, Any], threads: int) -> dict[str, Any]:
        """Load from files, as a serving process will; eager as a user has it."""
        from coexec.tuning.fast_eager import fast_program

        torch.set_num_threads(threads)
        found = get(candidate)
        self._indices = graph_indices(self._program.module).needed_by(found)
        if found.name == "eager":
            self._run = fast_program(self._program)
        else:
            self._run = found.load(folder, metadata, self._program, threads=threads)
        return {"static_inputs": len(self._program.static_inputs)}

    def verify(self) -> dict[str, Any]:
        """Compare with eager on several inputs and repeated calls."""
        from coexec.tuning.inputs import input_sets
        from coexec.tuning.verify import verify

        return verify(self._program, self._loaded(), input_sets(self._program)).to_json()

    def begin(self) -> None:
        """Its inputs are never written."""
        self._loaded()

    def call(self) -> None:
        """One call with the recorded inputs, and what serving does before it."""
        assert self._run is not None
        self._indices.outside(self._program.inputs)
        self._run(*self._program.inputs)

    def _loaded(self) -> Runner:
        if self._run is None:
            raise RuntimeError("nothing is loaded; ask for load first")
        return self._run
