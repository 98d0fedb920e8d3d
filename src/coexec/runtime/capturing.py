"""The live inputs of one version of a segment while they are being captured, for the check of its artifact."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from coexec.backends.expressions import NotExpressibleError
from coexec.backends.key import artifact_key
from coexec.runtime.dynamic_segment import unify_segments
from coexec.runtime.spec_builder import BuiltSegment
from coexec.runtime.versions import ManagedSegment, Version


@dataclass(slots=True)
class Capturing:
    """What is being captured: one pass, or, of a version for many sizes, two."""

    segment: ManagedSegment
    version: Version
    path: Path
    done: list[tuple[BuiltSegment, int, Path]] = field(default_factory=list)  # of a version for many sizes: the first
    tries: int = 0

    def passes(self) -> list[BuiltSegment]:
        """Those that have been captured."""
        return [built for built, _, _ in self.done]

    def takes(self, built: BuiltSegment) -> bool:
        """Whether one version for many sizes can be made from this pass and the others: a size of one is never one."""
        try:
            for other in (self.version.built, *self.passes()):
                if artifact_key(other.spec) != artifact_key(built.spec):
                    unify_segments([other, built])
        except NotExpressibleError:
            return False
        return True
