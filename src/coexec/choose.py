"""The policy: which backend runs this graph here. Unknown: stored, and eager. Tuned: the winner, without compiling.

An artifact is checked against eager on live inputs when it is installed. Whatever goes wrong (no such artifact, a
damaged or wrong one, a store that does not answer) ends in eager: counted in `counters()`, in words in `explain()`.
"""

from __future__ import annotations

import logging
import operator
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from coexec.backends.cache import ArtifactCache
from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import (
    Candidate,
    CandidateError,
    Runner,
    binds_static,
    captures_constants,
)
from coexec.backends.candidates.program import Program, ProgramError
from coexec.backends.graph_indices import GraphIndices
from coexec.config import private_cache_dir
from coexec.errors import CoexecError
from coexec.subgraphs.entries import Decision
from coexec.subgraphs.environment import Environment
from coexec.subgraphs.key import SubgraphKey
from coexec.subgraphs.store import Store, open_store
from coexec.tuning.identity import baked_digest, environment_of, inside_digest, shape_class_of
from coexec.tuning.program_file import save_program
from coexec.tuning.verify import verify_quickly

log = logging.getLogger("coexec.choose")

EAGER = "eager"
WRONG = "wrong on live inputs"
EVENTS = 200


@dataclass(frozen=True, slots=True)
class Graph:
    """One AOTAutograd graph as the chooser sees it: what a program is, without inputs."""

    key: SubgraphKey  # without a class of sizes
    module: torch.fx.GraphModule
    static_inputs: tuple[int, ...]
    training: bool
    dynamic: bool
    note: str  # where it was met: "model.py:31"

    def program(self, inputs: Sequence[Any]) -> Program:
        """The program with live inputs."""
        return Program(self.module, tuple(inputs), self.static_inputs, self.training, self.dynamic)

    def key_for(self, inputs: Sequence[Any]) -> SubgraphKey:
        """The key at the sizes of `inputs`."""
        return replace(self.key, shape_class=shape_class_of(inputs))


class NotInstalledError(CoexecError):
    """A decision could not be carried out; `reason` is the short name under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


_pointer_of = torch.Tensor.data_ptr
_version_of = operator.attrgetter("_version")


@dataclass(slots=True)
class Installed:
    """A candidate that serves one graph."""

    backend: str
    run: Runner
    static_inputs: tuple[int, ...]  # those that it keeps
    values_matter: bool  # the artifact holds values of static inputs: a write to one of them makes it stale
    indices: GraphIndices = field(default_factory=GraphIndices)  # to be looked at before a call: it may not raise
    identity: tuple[Any, ...] = field(default=())

    def bind(self, inputs: Sequence[Any]) -> None:
        """Remember the static inputs that it was loaded with."""
        self.identity = self._identity(inputs)

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether the static inputs are still those, unchanged as far as that matters.

        By version counter: a write through `.data` from Python goes unseen, as it does for autograd.
        """
        return not self.static_inputs or self._identity(inputs) == self.identity

    def _identity(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        static = [inputs[position] for position in self.static_inputs]
        pointers = tuple(map(_pointer_of, static))  # of its memory: `.data = other` keeps the object
        return (pointers, tuple(map(_version_of, static))) if self.values_matter else pointers


# What happened --------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_events: deque[str] = deque(maxlen=EVENTS)


def count(name: str, text: str = "") -> None:
    """One more `name`; `text` says it to people."""
    with _lock:
        _counts[name] += 1
        if text:
            _events.append(f"{name}: {text}")
    if text:
        log.info("coexec: %s: %s", name, text)


def counters() -> dict[str, int]:
    """How often what happened in this process: "serve.<backend>", "eager.<reason>", "stored", "stale" ..."""
    with _lock:
        return dict(_counts)


def explain() -> str:
    """The last decisions of this process, one line each: which graph, which backend, why."""
    with _lock:
        return "\n".join(_events)


def reset_counters() -> None:
    """Begin counting anew."""
    with _lock:
        _counts.clear()
        _events.clear()


# Choosing -------------------------------------------------------------------------------------------------------------


def find(store: Store, graph: Graph, inputs: Sequence[Any], *, baked: bool = True) -> Decision | None:
    """The decision for `graph` on these live inputs, None if it waits for tuning.

    `baked=False`: not one whose artifact holds values of static inputs. Errors: UnkeyableGraphError.
    """
    key, environment = graph.key_for(inputs), environment_here(graph)
    rows = {
        decision.constants
        for decision in store.decisions(key.digest)
        if (decision.environment, decision.shape_class) == (environment.digest, key.shape_class)
    }
    inside = inside_digest(graph.module) if rows else ""
    if baked and rows - {inside}:  # hashing the weights costs a second per gigabyte: only where it can find something
        digest = baked_digest(inside, [inputs[position] for position in graph.static_inputs])
        if digest in rows:
            return store.lookup(key, environment, digest)
    return store.lookup(key, environment, inside) if inside in rows or not rows else None


def environment_here(graph: Graph) -> Environment:
    """The environment of this process and thread count. Errors: UnkeyableGraphError."""
    return environment_of(graph.key.custom_ops, torch.get_num_threads())


def install(store: Store, graph: Graph, decision: Decision, inputs: Sequence[Any], indices: GraphIndices) -> Installed:
    """Load the decision's artifact and check it on `inputs`; nothing is compiled. Errors: NotInstalledError.

    Args:
        indices: those of the graph; the inputs keep their ranges.
    """
    candidate = _candidate(decision)
    try:
        needed = indices.needed_by(candidate)
    except CandidateError as error:
        raise NotInstalledError("index unknown", f"{error}; `coexec tune` finds another backend") from error
    run = _loaded(store, decision, candidate, graph.program(inputs))
    kept = graph.static_inputs if binds_static(candidate) else ()
    installed = Installed(decision.backend, run, kept, captures_constants(candidate), needed)
    try:
        check_at(graph, installed, inputs)
    except NotInstalledError as error:
        if error.reason == WRONG:
            store.forget_decision(decision)  # a wrong answer is not to be tried again by every process that starts
        raise
    installed.bind(inputs)
    return installed


def check_at(graph: Graph, installed: Installed, inputs: Sequence[Any]) -> None:
    """Compare one call with eager on live inputs, which are left alone. Errors: NotInstalledError."""
    try:
        report = verify_quickly(graph.program(inputs), installed.run, inputs)
    except Exception as error:
        raise NotInstalledError("fails on live inputs", f"{installed.backend}: {error!r:.300}") from error
    if not report.accepted:
        raise NotInstalledError(WRONG, f"{installed.backend}: {'; '.join(report.problems[:3])}")


def remember(store: Store, graph: Graph, inputs: Sequence[Any]) -> bool:
    """Store an unknown graph with these inputs as a sample, for the tuner; returns whether it is stored now."""
    try:
        with tempfile.TemporaryDirectory(prefix="program-", dir=private_cache_dir("tuning")) as folder:
            path = Path(folder) / "program"
            save_program(graph.program(inputs), path)
            return store.put_subgraph(graph.key, program=path, note=graph.note)
    except (ProgramError, OSError, CoexecError) as error:
        count("not stored", f"{graph.note}: {error}")
        return False


def segment_cache() -> ArtifactCache:
    """The cache of co-execution's compiled segments, with the store behind it."""
    from coexec.subgraphs.segment_cache import SegmentCache

    return SegmentCache(open_store())


def _candidate(decision: Decision) -> Candidate:
    try:
        return registry.get(decision.backend)
    except CandidateError as error:
        raise NotInstalledError("refused", f"{decision.backend}: {error.reason}") from error


def _loaded(store: Store, decision: Decision, candidate: Candidate, program: Program) -> Runner:
    needs_files = bool(decision.options.get("metadata")) or bool(decision.artifacts)
    if needs_files and not decision.artifacts:
        raise NotInstalledError("artifact missing", f"{decision.backend}: its files were pruned; `coexec tune` again")
    folder = store.checkout(decision) if decision.artifacts else private_cache_dir("tuning")
    if folder is None:
        raise NotInstalledError("artifact missing", f"{decision.backend}: a file is missing, damaged or not trusted")
    try:
        availability = candidate.availability()
        if not availability.usable:
            raise NotInstalledError("backend unavailable", f"{decision.backend}: {availability.reason}")
        threads = int(decision.options.get("threads", torch.get_num_threads()))
        return candidate.load(folder, decision.options.get("metadata", {}), program, threads=threads)
    except NotInstalledError:
        raise
    except CandidateError as error:
        raise NotInstalledError("refused", f"{decision.backend}: {error.reason}") from error
    except Exception as error:
        raise NotInstalledError("load error", f"{decision.backend}: {error!r:.300}") from error
