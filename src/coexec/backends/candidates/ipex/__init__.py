"""Takes a Program. Returns it run by Intel Extension for PyTorch, where its torch is installed.
Next: heavy.py, the only place that imports it (it may end the process when its torch is another one).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coexec.backends.candidates.candidate import Availability, CandidateError, Runner
from coexec.backends.candidates.installed import version_of
from coexec.backends.candidates.program import Program
from coexec.backends.candidates.torch_version import torch_release, torch_version

DISTRIBUTION = "intel-extension-for-pytorch"
LAST = (2, 8)  # development ended with it
WORKS_WITH = "intel-extension-for-pytorch 2.8.0 with torch 2.8.0, the last release; each needs torch of its own minor"
INSTALL = f"pip install '{DISTRIBUTION}==2.8.*'"  # coexec's own extra would put a newer torch in the place of 2.8


class Ipex:
    """Traced, and frozen at load with the passes that the import of IPEX registers."""

    name = "ipex"
    bakes_constants = False
    captures_constants = True

    def availability(self) -> Availability:
        version = version_of(DISTRIBUTION)
        if torch_release() > LAST:
            reason = f"its library misses symbols of torch {torch_version()}: releases end with torch 2.8"
            return Availability(False, reason, version, WORKS_WITH)
        if not version:
            return Availability(False, f"not installed; {INSTALL}", "", WORKS_WITH)
        if torch_release() != tuple(int(part) for part in version.split(".")[:2]):
            return Availability(False, f"{version} is for another torch than {torch_version()}", version, WORKS_WITH)
        return Availability(True, version=version)

    def options_in_key(self) -> Mapping[str, object]:
        return {"version": version_of(DISTRIBUTION)}

    def build(self, program: Program, folder: Path, *, threads: int, budget_s: float) -> Mapping[str, object]:
        self._check()
        from coexec.backends.candidates.ipex.heavy import build

        return build(program, folder)

    def load(self, folder: Path, metadata: Mapping[str, object], program: Program, *, threads: int) -> Runner:
        self._check()
        from coexec.backends.candidates.ipex.heavy import load

        return load(folder, program)

    def _check(self) -> None:
        """Before the import: beside another torch it ends the process (its own os.exit)."""
        available = self.availability()
        if not available.usable:
            raise CandidateError(self.name, f"{available.reason}; works with {available.works_with}")


CANDIDATES = (Ipex(),)
