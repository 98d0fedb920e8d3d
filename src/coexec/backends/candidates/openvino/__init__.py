"""Takes a Program. Returns it run by OpenVINO's CPU plugin, in float32.
Next: heavy.py converts, compiles and runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coexec.backends.candidates.candidate import Availability, Runner
from coexec.backends.candidates.installed import needs, version_of
from coexec.backends.candidates.program import Program


class OpenVino:
    """The stored model has no weights; they become constants over the program's memory when it is loaded."""

    name = "openvino"
    bakes_constants = False
    captures_constants = True

    def availability(self) -> Availability:
        return needs({"openvino": ""}, extra="openvino")

    def options_in_key(self) -> Mapping[str, object]:
        return {"precision": "f32", "version": version_of("openvino")}

    def build(self, program: Program, folder: Path, *, threads: int, budget_s: float) -> Mapping[str, object]:
        from coexec.backends.candidates.openvino.heavy import build

        return build(program, folder, threads=threads)

    def load(self, folder: Path, metadata: Mapping[str, object], program: Program, *, threads: int) -> Runner:
        from coexec.backends.candidates.openvino.heavy import load

        return load(folder, program, threads=threads)


CANDIDATES = (OpenVino(),)
