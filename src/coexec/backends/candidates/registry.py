"""All candidates by name: those that come with coexec, and those that other packages register.

Another package adds its own with an entry point::

    [project.entry-points."coexec.backends"]
    mybackend = "mypackage.coexec_backend:candidates"    # () -> Iterable[Candidate], or one Candidate
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Iterable, Iterator

from coexec.backends.candidates.candidate import Candidate, CandidateError
from coexec.errors import did_you_mean

log = logging.getLogger("coexec.backends")

ENTRY_POINTS = "coexec.backends"

BUILT_IN = (
    "eager",
    "torchscript",
    "onnxruntime",
    "openvino",
    "ipex",
    "inductor",
    "tvm",
)
"""Folders of this package; each offers `CANDIDATES`. In the order in which the tuner tries them: cheap ones first."""


@functools.cache
def candidates() -> dict[str, Candidate]:
    """Every known candidate by name, usable here or not (ask `availability()`)."""
    found: dict[str, Candidate] = {}
    for candidate in [*_built_in(), *_registered()]:
        if candidate.name in found:
            log.warning("candidate %r is registered twice; the first one is kept", candidate.name)
        found.setdefault(candidate.name, candidate)
    return found


def get(name: str) -> Candidate:
    """The candidate called `name`. Errors: CandidateError names the nearest one."""
    known = candidates()
    if name not in known:
        reason = f"no such candidate.{did_you_mean(name, known)} Known: {', '.join(known)}."
        raise CandidateError(name, reason)
    return known[name]


def usable() -> dict[str, Candidate]:
    """Those that can be used beside this torch."""
    return {name: candidate for name, candidate in candidates().items() if candidate.availability().usable}


def _built_in() -> Iterator[Candidate]:
    for folder in BUILT_IN:
        yield from importlib.import_module(f"{__package__}.{folder}").CANDIDATES


def _registered() -> Iterator[Candidate]:
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            offered = point.load()
            offered = offered() if callable(offered) and not isinstance(offered, Candidate) else offered
            yield from offered if isinstance(offered, Iterable) else (offered,)
        except Exception as error:  # a broken third-party package must not take the others down
            log.warning("entry point %s of %s is skipped: %r", point.name, ENTRY_POINTS, error)
