"""Child processes that judge one sample after another: a crash or a hang is a verdict, not the end of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.oracles.verdict import CRASH, HANG, Verdict

ROOT = Path(__file__).resolve().parents[2]


def run_child(module: str, arguments: list[str], tell: Callable[[Verdict], None]) -> str:
    """Runs `python -m module` and passes on what it judges.

    Returns:
        the sample during which the child died (its verdict was told too), or "" if it came to its end.

    Raises:
        RuntimeError: it failed between two samples: a mistake in the oracle itself.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    running = ""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment) as child,
    ):
        for line in child.stdout or ():
            word, _, text = line.rstrip("\n").partition(" ")
            if word == "begin":
                running = text
            elif word == "end":
                tell(Verdict(**json.loads(text)))
                running = ""
        code = child.wait()
        errors.seek(0)
        said = errors.read()
    if code and not running:
        raise RuntimeError(f"{module} {' '.join(arguments[:4])} failed with {code}:\n{said[-3000:]}")
    if running:
        tell(Verdict(running, HANG if "Timeout (" in said else CRASH, f"exit code {code}: {said[-1500:]}"))
    return running


def begin(sample: str) -> None:
    """The child's side: the sample that is judged from now on."""
    print("begin", sample.replace("\n", " "), flush=True)


def end(verdict: Verdict) -> None:
    """The child's side: what became of it."""
    print("end", json.dumps(verdict.as_dict()), flush=True)
