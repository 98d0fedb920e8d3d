"""Why a lookup found nothing: told apart by kind for the counters, and in words with the entries that differ."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select

from coexec.subgraphs import tables
from coexec.subgraphs.environment import Environment
from coexec.subgraphs.key import SubgraphKey
from coexec.subgraphs.near_miss import Difference, explain_difference

_COMPARED = 8  # how many stored neighbours are compared
_SHOWN = 6  # how many differing entries are named


@dataclass(frozen=True, slots=True)
class Miss:
    """One miss."""

    kind: str  # "unknown_graph", "near_graph", "undecided", "other_shape", "other_environment"
    text: str  # for people


def explain(connection: Connection, key: SubgraphKey, environment: Environment) -> Miss:
    """Classify a miss. Reads a few rows; it is asked on misses only, when a graph is about to run eagerly anyway."""
    d = tables.decision.c
    decided = connection.execute(select(d.environment, d.shape_class).where(d.subgraph == key.digest)).all()
    if not decided:
        return _undecided(connection, key)
    shapes = sorted({row.shape_class for row in decided if row.environment == environment.digest})
    if shapes:
        return Miss("other_shape", f"tuned for sizes {shapes}, these are {key.shape_class!r}")
    return _other_environment(connection, environment, {row.environment for row in decided})


def _undecided(connection: Connection, key: SubgraphKey) -> Miss:
    s = tables.subgraph.c
    if connection.scalar(select(s.digest).where(s.digest == key.digest)) is not None:
        return Miss("undecided", "the graph is stored and waits for `coexec tune`")
    query = select(s.digest, s.text).where(s.outline == key.outline).order_by(s.used_s.desc()).limit(_COMPARED)
    nearest = _nearest({row.digest: row.text for row in connection.execute(query)}, key.text)
    if nearest is None:
        return Miss("unknown_graph", "no stored graph has the same ops")
    digest, differences = nearest
    return Miss("near_graph", f"nearest graph {digest[:16]} differs in {_words(differences)}")


def _other_environment(connection: Connection, environment: Environment, digests: set[str]) -> Miss:
    e = tables.environment.c
    query = select(e.digest, e.text).where(e.digest.in_(digests)).order_by(e.created_s.desc()).limit(_COMPARED)
    nearest = _nearest({row.digest: row.text for row in connection.execute(query)}, environment.text)
    words = "one that is no longer described" if nearest is None else _words(nearest[1])
    return Miss("other_environment", f"tuned in another environment: {words}")


def _nearest(texts: dict[str, str], text: str) -> tuple[str, tuple[Difference, ...]] | None:
    """The text with the fewest differing entries, which read from the stored one to the one at hand."""
    compared = [(digest, explain_difference(stored, text)) for digest, stored in texts.items()]
    return min(compared, key=lambda pair: len(pair[1]), default=None)


def _words(differences: tuple[Difference, ...]) -> str:
    shown = "; ".join(str(difference) for difference in differences[:_SHOWN])
    rest = len(differences) - _SHOWN
    return shown if rest <= 0 else f"{shown}; and {rest} more"
