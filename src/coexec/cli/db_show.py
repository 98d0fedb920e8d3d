"""`coexec db show`: all that is known about one subgraph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from coexec.cli import quantities
from coexec.cli.db import SHOWN, no_such_subgraph, readable_decisions, strict_store
from coexec.cli.output import print_entries, print_json, print_line, print_table
from coexec.cli.parameters import json_option

if TYPE_CHECKING:
    from coexec.subgraphs.entries import Decision, Measurement, SubgraphInfo
    from coexec.subgraphs.store import Store


@click.command()
@click.argument("subgraph")
@click.option("--text", "with_text", is_flag=True, help="Print the canonical text, which the key is the hash of.")
@click.option("--why", is_flag=True, help="Say what a lookup finds on this machine, and what differs if nothing.")
@json_option
def show(subgraph: str, with_text: bool, why: bool, as_json: bool) -> None:
    """Show one SUBGRAPH: decisions, measurements of every attempt, environments.

    SUBGRAPH is the beginning of its digest as `coexec db list` prints it.

    \b
    Example:
      coexec db show 3f9c2ab81d04 --why
    """
    store = strict_store()
    info = _found(store, subgraph)
    decisions, measurements = readable_decisions(info.digest), store.measurements(info.digest)
    named = {decision.environment for decision in decisions} | {attempt.environment for attempt in measurements}
    environments = {digest: text for digest, text in store.environments().items() if digest in named}
    reason = _lookup_here(store, info) if why else None
    if as_json:
        print_json(_document(info, decisions, measurements, environments, reason, with_text))
        return
    _print_info(info, reason)
    _print_decisions(decisions)
    _print_measurements(measurements)
    _print_environments(environments)
    if with_text:
        print_line()
        print_line(info.text.rstrip("\n"))


def _found(store: Store, prefix: str) -> SubgraphInfo:
    info = store.subgraph(prefix)
    if info is not None:
        return info
    similar = sum(other.digest.startswith(prefix) for other in store.subgraphs())
    if similar > 1:
        raise click.UsageError(f"{similar} subgraphs begin with {prefix!r}; give more digits")
    raise no_such_subgraph(prefix)


def _lookup_here(store: Store, info: SubgraphInfo) -> str:
    """What serving would find in this environment, whatever the weights. A graph's custom ops must be loaded."""
    import torch

    from coexec.backends.key import is_segment
    from coexec.subgraphs.errors import UnkeyableGraphError
    from coexec.subgraphs.key import SubgraphKey
    from coexec.subgraphs.segment_cache import environment_of_segments
    from coexec.tuning.identity import custom_ops_of_text, environment_of

    try:
        if is_segment(info.text):
            environment = environment_of_segments()
        else:
            environment = environment_of(custom_ops_of_text(info.text), torch.get_num_threads())
    except UnkeyableGraphError as error:
        return f"not known here: {error}"
    for decision in readable_decisions(info.digest):
        if decision.environment == environment.digest:
            return f"{decision.backend}: {decision.reason or 'no reason was noted'}"
    return store.explain_miss(SubgraphKey(info.digest, info.text, "", info.n_ops), environment)


def _document(
    info: SubgraphInfo,
    decisions: tuple[Decision, ...],
    measurements: tuple[Measurement, ...],
    environments: dict[str, str],
    reason: str | None,
    with_text: bool,
) -> dict[str, Any]:
    from coexec.subgraphs.environment import environment_of_text

    document: dict[str, Any] = {
        name: getattr(info, name)
        for name in ("digest", "n_ops", "note", "program", "created_s", "used_s", "run_s", "runs")
    }
    document |= {"decisions": decisions, "measurements": measurements}
    document["environments"] = {digest: environment_of_text(text).entries() for digest, text in environments.items()}
    if reason is not None:
        document["lookup_here"] = reason
    if with_text:
        document["text"] = info.text
    return document


def _print_info(info: SubgraphInfo, reason: str | None) -> None:
    entries: dict[str, object] = {
        "subgraph": info.digest,
        "ops": info.n_ops,
        "note": info.note or None,
        "program": "stored" if info.program else "not stored, so it cannot be tuned",
        "met": quantities.age(info.created_s),
        "used": quantities.age(info.used_s),
    }
    if info.run_s is not None:
        entries["one run"] = f"{quantities.duration(info.run_s)}, of {info.runs} that were told"
    if reason is not None:
        entries["lookup here"] = reason
    print_entries(entries)


def _print_decisions(decisions: tuple[Decision, ...]) -> None:
    if not decisions:
        return
    print_line()
    columns = ("decision", "speedup", "environment", "sizes", "weights", "artifacts", "decided", "reason")
    rows = [
        (
            decision.backend,
            None if decision.speedup is None else f"{decision.speedup:.2f}x",
            decision.environment[:SHOWN],
            decision.shape_class or "static",
            decision.constants[:8] or "any",
            quantities.size(sum(ref.size_bytes for ref in decision.artifacts)) if decision.artifacts else None,
            quantities.age(decision.decided_s),
            decision.reason,
        )
        for decision in decisions
    ]
    print_table(columns, rows, right=("speedup", "artifacts"))


def _print_measurements(measurements: tuple[Measurement, ...]) -> None:
    if not measurements:
        return
    print_line()
    columns = ("attempt", "outcome", "median", "spread", "eager", "compile", "environment", "detail")
    rows = [
        (
            attempt.backend,
            attempt.outcome,
            quantities.duration(attempt.median_s),
            quantities.duration(attempt.spread_s),
            quantities.duration(attempt.eager_s),
            quantities.duration(attempt.compile_s),
            attempt.environment[:SHOWN],
            attempt.detail,
        )
        for attempt in measurements
    ]
    print_table(columns, rows, right=("median", "spread", "eager", "compile"))


def _print_environments(environments: dict[str, str]) -> None:
    from coexec.subgraphs.environment import environment_of_text

    for digest, text in environments.items():
        print_line()
        print_entries({"environment": digest, **environment_of_text(text).entries()})
