"""What one iteration did, as the native core described it: what segments are built from."""

from __future__ import annotations

import functools
from typing import Any

from coexec.runtime.spec_builder import DescribedOp
from coexec.runtime.versions import ManagedSegment


class Description:
    """What the latest iteration did, as the native core described it."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.path = tuple(native.path)
        self._index = {node: index for index, node in enumerate(self.path)}

    @functools.cached_property
    def ops(self) -> list[DescribedOp]:
        """Every op of it. Only where a segment is built: a large step has thousands."""
        return [DescribedOp(*entry) for entry in self.native.description()]

    @functools.cached_property
    def externals(self) -> Any:
        """Memory from outside that it used."""
        return self.native.externals()

    @functools.cached_property
    def survivors(self) -> Any:
        """Values that Python was seen to hold beyond their segment."""
        return self.native.survivors()

    def covers(self, segment: ManagedSegment) -> bool:
        """Whether the iteration went through the whole segment, without a way round that is in no plan."""
        first = self._index.get(segment.nodes[0], len(self.path))
        return self.path[first : first + len(segment.nodes)] == segment.nodes
