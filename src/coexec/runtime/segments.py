"""The plan's segments and their executors."""

from __future__ import annotations

from typing import Any

from coexec.config import Options
from coexec.graph.tracegraph import TraceGraph


class SegmentManager:
    """Keeps the plan of one step and adopts compiled artifacts."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def after_iteration(self, native: Any, graph: TraceGraph) -> None:
        """One iteration ran wholly in co-execution."""

    def graph_changed(self) -> None:
        """The TraceGraph grew: the plan is out of date."""

    def by_executor(self) -> dict[str, int]:
        """Returns how many segments each executor has."""
        return {}

    def switches(self) -> int:
        """Returns how many Switch-Cases have more than one case."""
        return 0
