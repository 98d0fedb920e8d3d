"""Runs a piece of Python in a process of its own: as another user, with limits, or to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

PRELUDE = """
import json, os, sys, time, types
package = sys.modules["coexec"] = types.ModuleType("coexec")  # without the package's own imports, torch among them
package.__path__ = [os.environ["COEXEC_SOURCE"]]
from pathlib import Path
from coexec.subgraphs.entries import *
from coexec.subgraphs.location import private_location, shared_location
from coexec.subgraphs.store import Store
from coexec.subgraphs.trust import Keyring
from tests.subgraphs.samples import *
"""


def start(code: str, *arguments: object, before: str = "") -> subprocess.Popen[str]:
    """Start `code` with `sys.argv[1:] == arguments`; `before` runs ahead of all imports of coexec."""
    program = textwrap.dedent(before) + PRELUDE + textwrap.dedent(code)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "COEXEC_SOURCE": str(ROOT / "src" / "coexec"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, *(str(argument) for argument in arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(code: str, *arguments: object, before: str = "") -> str:
    """Run `code` to its end; returns stdout. A failure shows the child's stderr."""
    child = start(code, *arguments, before=before)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    return out
