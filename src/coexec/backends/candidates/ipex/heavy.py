"""A trace frozen with IPEX's passes, which its import registers with TorchScript."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import intel_extension_for_pytorch  # noqa: F401  (registers its passes and kernels)

from coexec.backends.candidates.candidate import Runner
from coexec.backends.candidates.program import Program
from coexec.backends.candidates.torchscript import heavy as torchscript

NAME = "ipex"


def build(program: Program, folder: Path) -> Mapping[str, object]:
    """As TorchScript's; the passes run at load, when the graph is frozen and first called."""
    return torchscript.build(NAME, program, folder)


def load(folder: Path, program: Program) -> Runner:
    """The stored trace, frozen: IPEX prepacks its weights and fuses operators while it is called the first times."""
    run = torchscript.load(NAME, folder, program)
    for _ in range(2):  # TorchScript profiles the first call and optimizes in the second
        run(*program.inputs)
    return run
