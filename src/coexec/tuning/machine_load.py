"""Was the machine ours while we timed? Foreign load is the processor time that others took, in cores."""

from __future__ import annotations

import os
import time

from coexec.tuning.process_tree import cpu_seconds, machine_busy_seconds


class ForeignLoad:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._start = self._sample()

    def cores(self) -> float:
        """Mean number of cores that processes outside this tuner kept busy since then; 0.0 if nothing can be known."""
        start, now = self._start, self._sample()
        wall_s = now[0] - start[0]
        if wall_s <= 0 or now[1] == 0.0:
            return 0.0
        return max(0.0, (now[1] - start[1]) - (now[2] - start[2])) / wall_s

    def _sample(self) -> tuple[float, float, float]:
        return time.monotonic(), machine_busy_seconds(), cpu_seconds(os.getpid())
