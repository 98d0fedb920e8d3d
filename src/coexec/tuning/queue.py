"""Which stored graphs and segments the tuner works on here, in which order, and which ones still wait for it.

One truth for `coexec tune`, `coexec db list --undecided`, `coexec db stats` and `coexec report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from coexec.backends import variants
from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import Candidate
from coexec.backends.key import is_of_here, is_segment
from coexec.backends.variants import Variant
from coexec.subgraphs.entries import Decision, SubgraphInfo
from coexec.subgraphs.errors import UnkeyableGraphError
from coexec.subgraphs.segment_cache import environment_of_segments
from coexec.subgraphs.store import Store
from coexec.tuning.identity import custom_ops_of_text, environment_of
from coexec.tuning.settings import TuneSettings
from coexec.tuning.standing import Facts, Tried, known_facts, read_standing
from coexec.tuning.timing import EAGER

SHORT_RUN_S = 10e-6
"""A call from Python costs a segment at least as much as this, in the tuner and not in a step: of one whose whole run
is shorter, a difference between two libraries is less than the noise of what it is measured with."""

GUESSED_OP_S = 10e-6
"""What an op takes where nobody has timed the whole. Only for the order: a guess leaves nothing out."""

Decisions = Mapping[str, Sequence[Decision]]
"""By digest of the subgraph."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the tuner can try here."""

    candidates: tuple[Candidate, ...]  # for graphs, without eager: it is what they are measured against
    variants: tuple[Variant, ...]  # for co-execution's segments
    threads: int  # intra-op, that graphs will be served with
    unavailable: Mapping[str, str] = field(default_factory=dict)  # of those asked for: why they cannot be used
    only_eager: bool = False  # nothing else was asked for


def tools_here(settings: TuneSettings | None = None) -> Tools:
    """Those that `settings` name, all by default, as far as they can be used. Errors: CandidateError for a name."""
    settings = settings or TuneSettings()
    graphs, segments = _candidates(settings.candidates), _variants(settings.candidates)
    everything: list[Candidate | Variant] = [*graphs, *segments]
    states = [(one.name, one.availability()) for one in everything]
    unavailable = {name: state.reason for name, state in states if not state.usable}
    return Tools(
        candidates=tuple(c for c in graphs if c.name not in unavailable and c.name != EAGER),
        variants=tuple(v for v in segments if v.name not in unavailable),
        threads=settings.threads or torch.get_num_threads(),
        unavailable=unavailable,
        only_eager=bool(graphs) and all(c.name == EAGER for c in graphs),
    )


def _candidates(names: Sequence[str] | None) -> list[Candidate]:
    """For graphs."""
    if names is None:
        return list(registry.candidates().values())
    return [registry.get(name) for name in names if name not in variants.variants()]


def _variants(names: Sequence[str] | None) -> list[Variant]:
    """For segments."""
    return [variant for name, variant in variants.variants().items() if names is None or name in names]


# What there is to do --------------------------------------------------------------------------------------------------


def selected(store: Store, settings: TuneSettings) -> list[SubgraphInfo]:
    """Stored graphs and segments with a program for which one of the candidates is meant: most to gain first.

    A segment's key names its environment: one of another environment is nothing to be tuned here, unless it is asked
    for and so is to be heard of.
    """
    names, prefixes = settings.candidates, settings.subgraphs
    for_segments = bool(_variants(names))
    for_graphs = names is None or not for_segments or bool(_candidates(names))
    found = [info for info in store.subgraphs() if info.program]
    found = [info for info in found if (for_segments if is_segment(info.text) else for_graphs)]
    if prefixes is not None:
        return in_order([info for info in found if any(info.digest.startswith(prefix) for prefix in prefixes)])
    return in_order([info for info in found if not is_segment(info.text) or is_of_here(info.text)])


def in_order(infos: Sequence[SubgraphInfo]) -> list[SubgraphInfo]:
    """By the time that the program spends in them; equals stay as they were, last used first."""
    known = [info for info in infos if info.run_s is not None]
    runs = median(info.runs for info in known) if known else 1

    def spent_s(info: SubgraphInfo) -> float:
        return info.n_ops * GUESSED_OP_S * runs if info.run_s is None else info.run_s * info.runs

    return sorted(infos, key=spent_s, reverse=True)


@dataclass(frozen=True, slots=True)
class Queue:
    """What `coexec tune` without arguments has before it here."""

    waiting: tuple[SubgraphInfo, ...] = ()  # in its order
    passed_over: Mapping[str, str] = field(default_factory=dict)  # by digest: why


def queue_here(store: Store, tools: Callable[[], Tools] = tools_here) -> Queue:
    """The graphs and segments that wait for the tuner on this machine. Errors: StoreError from a strict store.

    A graph whose custom ops are not loaded has no environment here, and so does not wait. `tools` is asked if anything
    could wait.
    """
    infos = selected(store, TuneSettings())
    if not infos:
        return Queue()
    decisions, at_hand = by_subgraph(store.decisions()), tools()
    pending = [info for info in infos if _is_pending(info, decisions, at_hand)]
    reasons = {info.digest: reason for info in pending if (reason := passed_over(info))}
    return Queue(tuple(info for info in pending if info.digest not in reasons), reasons)


def by_subgraph(decisions: Iterable[Decision]) -> dict[str, list[Decision]]:
    """The decisions of each subgraph."""
    found: dict[str, list[Decision]] = {}
    for decision in decisions:
        found.setdefault(decision.subgraph, []).append(decision)
    return found


def passed_over(info: SubgraphInfo) -> str:
    """Why nothing is to be gained from it, in words; "" where something may be."""
    if not is_segment(info.text) or info.run_s is None or info.run_s >= SHORT_RUN_S:
        return ""
    return (
        f"passed over: one run takes {info.run_s * 1e6:.1f} us, too short to tell two libraries apart "
        f"(`coexec tune {info.digest[:16]}` tries all the same)"
    )


def _is_pending(info: SubgraphInfo, decisions: Decisions, tools: Tools) -> bool:
    """A graph that is not decided here, or one of the candidates has not been tried."""
    own = decisions.get(info.digest, ())
    tried: Sequence[Tried] = tools.candidates
    if is_segment(info.text):
        facts: Facts | None = segment_facts(info, tools.threads)
        tried = tools.variants
    else:
        try:
            environment = environment_of(custom_ops_of_text(info.text), tools.threads)
        except UnkeyableGraphError:
            return False
        facts = known_facts(own, info.digest, info.program, environment, tools.threads)
    return facts is None or bool(read_standing(own, facts).pending(tried))


def segment_facts(info: SubgraphInfo, threads: int) -> Facts:
    """A segment's key says everything: sizes, threads; and its parameters are inputs."""
    return Facts(info.digest, info.program, environment_of_segments(), "", "", "", threads)
