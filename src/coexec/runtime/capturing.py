"""Capturing the live inputs of a segment, for the check of its artifact in the compile process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coexec.backends.expressions import NotExpressibleError
from coexec.backends.key import artifact_key
from coexec.backends.leftovers import own_prefix
from coexec.backends.snapshot import delete_snapshot
from coexec.config import Options, private_cache_dir
from coexec.errors import CacheFolderError
from coexec.graph.tracegraph import TraceGraph
from coexec.intercept.native import loaded_core
from coexec.runtime.compile_jobs import compile_worker
from coexec.runtime.description import Description
from coexec.runtime.dynamic_segment import unify_segments
from coexec.runtime.spec_builder import BuiltSegment, NotDescribableError, capture_plan, snapshot_index
from coexec.runtime.versions import ManagedSegment, State, Version

MAX_TRIES = 64
"""Iterations that were captured in vain before a version is given up."""

_snapshot_numbers = itertools.count()


@dataclass(slots=True)
class Capturing:
    """What is being captured: one pass, or, of a version for many sizes, two."""

    segment: ManagedSegment
    version: Version
    path: Path
    done: list[tuple[BuiltSegment, int, Path]] = field(default_factory=list)  # of a version for many sizes: the first
    tries: int = 0

    @property
    def of_many_sizes(self) -> bool:
        """Whether the version is one for many sizes."""
        return self.version.symbolic is not None

    @property
    def complete(self) -> bool:
        """Whether all passes that the version needs have been captured."""
        return len(self.done) == 1 + self.of_many_sizes

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

    def is_new(self, described: Description) -> bool:
        """Whether the described iteration went through the segment with shapes that have not been captured."""
        known = {signature for _, signature, _ in self.done}
        return described.covers(self.segment) and self.segment.native.last_signature not in known

    def delete(self) -> None:
        """Deletes what has been written."""
        for path in (self.path, *(path for _, _, path in self.done)):
            delete_snapshot(path)


class Captures:
    """Captures for one version of a step at a time, and hands the version to the compile worker."""

    def __init__(
        self,
        options: Options,
        where: str,
        build: Callable[[ManagedSegment, Description, TraceGraph], BuiltSegment | None],
        stay: Callable[[ManagedSegment, Version, str], None],
    ) -> None:
        """Args:
        options: of the step.
        where: name and place of the step, for people.
        build: describes a segment as the latest iteration shows it; None if it cannot.
        stay: leaves a version on replay, for a reason.
        """
        self.options, self.where = options, where
        self.current: Capturing | None = None
        self._build, self._stay = build, stay

    @property
    def of_many_sizes(self) -> bool:
        """Whether a version for many sizes is being captured: each iteration must be described, too."""
        return self.current is not None and self.current.of_many_sizes

    # ------------------------------------------------------------------------------------------ which version is next

    def start(self, native: Any, segments: Sequence[ManagedSegment]) -> None:
        """The next iteration is captured for a version that waits for it, if there is one and none is under way."""
        if self.current is not None:
            return
        waiting = [(s, v) for s in segments for v in s.versions if self._awaits(s, v)]
        if not waiting:
            return
        segment, version = max(waiting, key=lambda pair: pair[1].symbolic is not None)
        try:
            folder = private_cache_dir("compile")
        except CacheFolderError as error:
            self._stay(segment, version, f"no cache folder: {error}")
            return
        self.current = Capturing(segment, version, folder)
        self._capture_next(native, self.current, folder)

    def _awaits(self, segment: ManagedSegment, version: Version) -> bool:
        """One for many sizes comes first; one for shapes that have not come again may never be needed."""
        if version.state is not State.DESCRIBED or version.symbolic is not None:
            return version.state is State.DESCRIBED
        if self.options.dynamic is True and len(segment.native.signatures) > 1 and not segment.not_dynamic:
            return segment.dynamic is not None and segment.dynamic.state is State.REPLAY
        return any(signature == version.signature and count > 1 for signature, count in segment.native.signatures)

    # ------------------------------------------------------------------------------------------------- one iteration

    def _capture_next(self, native: Any, capturing: Capturing, folder: Path) -> None:
        """The next iteration is captured, into files of its own."""
        version = capturing.version
        capturing.path = folder / f"{own_prefix('live')}{next(_snapshot_numbers)}.json"
        native.capture = loaded_core().Capture(
            capturing.segment.native.id,
            None if capturing.of_many_sizes else version.native,
            str(capturing.path.with_suffix(".bin")),
            version.built.spec.random,
            capture_plan(version.built, any_size=capturing.of_many_sizes),
        )

    def finish(self, native: Any, described: Description | None, graph: TraceGraph) -> None:
        """An iteration has ended: keep what was captured of it, or try the next one.

        Args:
            native: the step; the latest iteration is its last.
            described: that iteration; None if it was not described.
            graph: which it went through.
        """
        capturing, capture = self.current, native.capture
        if capturing is None or capture is None:
            return
        if not self._kept(capturing, capture, described, graph):
            self._again(native, capturing, touched=capture.failed or any(start >= 0 for start, _, _ in capture.pieces))
        elif capturing.complete:
            self._submit(native, capturing)
        else:
            self._capture_next(native, capturing, capturing.path.parent)

    def _kept(self, capturing: Capturing, capture: Any, described: Description | None, graph: TraceGraph) -> bool:
        """Whether the iteration went through the segment as it should, and what was captured is of use."""
        built = capturing.version.built
        if any(start < 0 for start, _, _ in capture.pieces):
            return False
        if built.spec.random and capture.generator_start < 0:
            return False
        if capturing.of_many_sizes:
            if described is None or not capturing.is_new(described):
                return False
            again = self._build(capturing.segment, described, graph)
            if again is None or not capturing.takes(again):
                return False
            built = again
        return _write_index(capturing, capture, built)

    def _again(self, native: Any, capturing: Capturing, touched: bool) -> None:
        """The iteration did not pass through the segment, or with other shapes."""
        capturing.tries += 1
        if capturing.tries > MAX_TRIES:
            self.abandon(native)
            self._stay(capturing.segment, capturing.version, "its live inputs could not be captured")
        elif touched:  # what has been written is of no use
            delete_snapshot(capturing.path)
            self._capture_next(native, capturing, capturing.path.parent)

    def abandon(self, native: Any) -> None:
        """Nobody waits for what is being captured."""
        if self.current is not None:
            self.current.delete()
        native.capture = self.current = None

    # ------------------------------------------------------------------------------------------------- what comes of it

    def _submit(self, native: Any, capturing: Capturing) -> None:
        native.capture = self.current = None
        version, paths = capturing.version, [path for _, _, path in capturing.done]
        if version.symbolic is None:
            version.job = compile_worker().submit(version.spec, paths[0], timed=False, note=self.where)
        else:
            passes = capturing.passes()
            try:
                version.symbolic, patterns = unify_segments(passes)
            except NotExpressibleError as error:
                capturing.delete()
                return self._stay(capturing.segment, version, f"not lowerable: {error}")
            version.built = passes[-1]
            version.native = native.make_segment(version.built.native)  # the latest iteration was the last pass
            version.native.make_dynamic(patterns)
            version.job = compile_worker().submit_symbolic(version.symbolic, paths, timed=False, note=self.where)
        version.state = State.COMPILING


def _write_index(capturing: Capturing, capture: Any, built: BuiltSegment) -> bool:
    """Says beside what was captured where in it each input lies. False if the segment cannot be told from it."""
    generator = (capture.generator_start, capture.generator_nbytes) if built.spec.random else None
    try:
        index = snapshot_index(built, capture.pieces, generator)
    except NotDescribableError:
        return False
    capturing.path.write_text(json.dumps(index))
    capturing.done.append((built, capturing.segment.native.last_signature, capturing.path))
    return True
