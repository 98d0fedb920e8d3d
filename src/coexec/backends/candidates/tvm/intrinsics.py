"""Makes TVM's search start in a third of a second instead of twenty, in this process and in its workers.

`import tvm.s_tir.tensor_intrin` parses the instructions of every GPU, of ARM and of RISC-V: 18 s alone, 30 to 50 s
beside torch, in each worker process, whose time limit is 30 s: every trial fails. Only x86's are wanted here.
"""

from __future__ import annotations

import importlib
import os
import sys
import types

PACKAGE = "tvm.s_tir.tensor_intrin"


def preload() -> None:
    """Import the x86 intrinsics alone, under the package's name. Also the initializer of TVM's workers."""
    if PACKAGE in sys.modules:
        return
    parent = importlib.import_module("tvm.s_tir")
    package = types.ModuleType(PACKAGE)
    package.__path__ = [os.path.join(os.path.dirname(str(parent.__file__)), "tensor_intrin")]
    sys.modules[PACKAGE] = package
    parent.tensor_intrin = package  # type: ignore[attr-defined]
    importlib.import_module(f"{PACKAGE}.x86")
