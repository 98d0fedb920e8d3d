"""Takes a Program. Returns it run by ONNX Runtime on its CPU provider.
Next: heavy.py exports the model and runs sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coexec.backends.candidates.candidate import Availability, Runner
from coexec.backends.candidates.installed import needs, version_of
from coexec.backends.candidates.program import Program

OPSET = 20


class OnnxRuntime:
    """The stored model names its weights and holds none; a session takes them from the program and prepacks them."""

    name = "onnxruntime"
    bakes_constants = False
    captures_constants = True

    def availability(self) -> Availability:
        return needs({"onnxruntime": "", "onnx": "", "onnxscript": ""}, extra="onnxruntime")

    def options_in_key(self) -> Mapping[str, object]:
        return {"opset": OPSET, "version": version_of("onnxruntime")}

    def build(self, program: Program, folder: Path, *, threads: int, budget_s: float) -> Mapping[str, object]:
        from coexec.backends.candidates.onnxruntime.heavy import build

        return build(program, folder, opset=OPSET, threads=threads)

    def load(self, folder: Path, metadata: Mapping[str, object], program: Program, *, threads: int) -> Runner:
        from coexec.backends.candidates.onnxruntime.heavy import load

        return load(folder, program, threads=threads)


CANDIDATES = (OnnxRuntime(),)
