"""The compile worker of this process, which steps share, and what it has finished and no step has looked at."""

from __future__ import annotations

from collections.abc import Iterable

from coexec import choose
from coexec.backends.worker import CompileWorker, Finished

_worker: CompileWorker | None = None


def compile_worker() -> CompileWorker:
    """Returns the compile worker of this process; steps share it."""
    global _worker
    if _worker is None:
        _worker = CompileWorker(choose.segment_cache())
    return _worker


class Mailbox:
    """Finished jobs by number: several steps share one worker."""

    def __init__(self) -> None:
        self._finished: dict[int, Finished] = {}

    def collect(self) -> None:
        """Takes what the worker has finished."""
        if _worker is not None:
            self._finished.update((done.job, done) for done in _worker.poll())

    def take(self, job: int) -> Finished | None:
        """Returns and forgets the end of a job, or None if it runs."""
        return self._finished.pop(job, None)

    def drop(self, jobs: Iterable[int]) -> None:
        """Stops jobs whose end nobody will take."""
        for job in jobs:
            if _worker is not None and not _worker.cancel(job):
                self.collect()
                self._finished.pop(job, None)

    def has(self, job: int) -> bool:
        """Whether the job's end is waiting to be taken."""
        return job in self._finished


mailbox = Mailbox()
