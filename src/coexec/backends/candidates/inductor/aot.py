"""AOTInductor: the core as one shared library, weights prepacked inside (frozen) or taken at each call."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coexec.backends.candidates.candidate import CandidateError, Runner
from coexec.backends.candidates.core import Core, split
from coexec.backends.candidates.frame import framed
from coexec.backends.candidates.inductor.compiled import compile_aot, compiling, example_inputs, with_weights
from coexec.backends.candidates.inductor.handles import Library
from coexec.backends.candidates.program import Program

FILE = "model.so"


def build(
    name: str, program: Program, folder: Path, options: Mapping[str, Any], *, threads: int, frozen: bool
) -> Mapping[str, object]:
    """Compile, and keep only what is loaded again."""
    core = _core(name, program, frozen)
    module = with_weights(core) if frozen else core.module
    with tempfile.TemporaryDirectory() as scratch, compiling(name, core, options, threads):
        library = Path(scratch) / FILE
        compile_aot(module, example_inputs(core, core.live), str(library))
        _refuse_custom_ops(name, Path(scratch))
        _refuse_loose_weights(name, Path(scratch))
        shutil.copyfile(library, folder / FILE)
    return {}


def load(name: str, program: Program, folder: Path, *, frozen: bool) -> Runner:
    """The library behind the program's signature."""
    core = _core(name, program, frozen)
    return framed(name, core, Library(folder / FILE, len(core.outputs), dynamic=core.dynamic).run)


def _core(name: str, program: Program, frozen: bool) -> Core:
    core = split(program, bind_static=frozen)
    if not core.live:
        raise CandidateError(name, "the graph has no input that changes between calls")
    if frozen and not core.static:
        raise CandidateError(name, "there are no static inputs to freeze: the unfrozen candidate is the same")
    return core


def _refuse_custom_ops(name: str, folder: Path) -> None:
    for listing in folder.rglob("*.json"):
        content = json.loads(listing.read_text())
        if isinstance(content, dict) and content.get("nodes"):
            ops = sorted({str(node.get("node", {}).get("target", node.get("name"))) for node in content["nodes"]})
            raise CandidateError(name, f"the library would call back into torch for {', '.join(ops)[:200]}")


def _refuse_loose_weights(name: str, folder: Path) -> None:
    """Above 2 GB Inductor writes weights beside the library, where only its own loader looks for them."""
    if any(path.suffix == ".blob" or path.name.endswith("_weights.bin") for path in folder.rglob("*")):
        raise CandidateError(name, "the weights do not fit into the library")
