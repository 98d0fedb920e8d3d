"""Runs a folder of whole-step cases, one process per case and way of running it.

The folder is named by the environment variable COEXEC_CASES. It has one file per case (`NN_name.py` with
`make() -> (step, args, state)`) and `compare.py`, which runs a case eagerly and wrapped and prints
`RESULT {what differs}`.

    python -m tests.oracles.cases replay                 # bit for bit
    python -m tests.oracles.cases replay --late          # returned values are read after the last call only
    python -m tests.oracles.cases default -k loss        # compiled, within tolerance
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.oracles.processes import ROOT

CALLS = 30  # of each case
LIMIT_S = 900.0  # compiling takes seconds per segment, and a case may have dozens


@dataclass(frozen=True)
class CaseResult:
    """What one case did."""

    differences: dict[str, str]  # by what was compared; empty if all was the same
    failure: str = ""  # how the process failed, if it did not come to a result
    report: dict[str, Any] = field(default_factory=dict)  # see tests/coexec_cases.py

    @property
    def fallbacks(self) -> int:
        return sum(self.report["stats"]["fallbacks"].values()) if self.report else 0

    @property
    def phase(self) -> str:
        return self.report["stats"]["phase"] if self.report else "?"


def folder() -> Path | None:
    """Where the cases are, or None if COEXEC_CASES does not say."""
    named = os.environ.get("COEXEC_CASES")
    return Path(named).resolve() if named else None


def cases() -> list[Path]:
    """The case files, in order; none if COEXEC_CASES is not set."""
    place = folder()
    return sorted(place.glob("[0-9]*.py")) if place else []


def run_case(case: Path, wrapper: str, late: bool = False, calls: int = CALLS) -> CaseResult:
    """Runs one case under `tests/coexec_cases.py`'s `wrapper`; all but "default" must be bit-identical."""
    command = [sys.executable, "-W", "ignore", str(case.with_name("compare.py")), "--child", str(case)]
    command += ["--wrap", f"coexec_cases:{wrapper}", "-n", str(calls)]
    command += ["--late"] * late + ["--exact"] * (wrapper != "default")
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.json")
        paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COEXEC_CASES_REPORT": str(report)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
        except subprocess.TimeoutExpired:
            return CaseResult({}, f"over {LIMIT_S:.0f} s")
        facts = json.loads(report.read_text()) if report.exists() else {}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return CaseResult(json.loads(line[7:]), report=facts)
    return CaseResult({}, f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}", facts)


def describe(case: Path, result: CaseResult) -> str:
    """One line for the table."""
    verdict = "FAILED" if result.failure else "DIFFERS" if result.differences else "same"
    runs = result.report.get("compiled_runs_after_wait", 0)
    facts = f"{result.phase}, {result.fallbacks} fallbacks, {runs} compiled runs"
    why = result.failure or "; ".join(result.differences.values())
    return f"{verdict:8s} {case.name:42s} {facts} {why[:600]}"


def main() -> int:
    """The command; returns 1 if a case differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wrapper", choices=("replay", "lazy", "default"))
    parser.add_argument("-k", default="", help="only cases whose name contains this")
    parser.add_argument("-n", type=int, default=CALLS)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--explain", action="store_true", help="print the step's own explanation, too")
    given = parser.parse_args()
    bad = 0
    for case in cases():
        if given.k in case.name:
            result = run_case(case, given.wrapper, given.late, given.n)
            bad += bool(result.differences or result.failure)
            print(describe(case, result), flush=True)
            if given.explain:
                print(result.report.get("explain", ""), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
