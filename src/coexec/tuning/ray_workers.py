"""Tuning over the machines of a Ray cluster: every node tunes its share of the graphs of one shared store.

A decision belongs to an environment (processor, versions, thread count), so each kind of node decides for its own kind.
The nodes must be able to reach the store: `COEXEC_STORE` names a database server. Ray is an optional extra; a task
takes a node whole, since a timing beside another task of Ray's would be worth nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import time
from collections.abc import Sequence
from typing import Any

from coexec.advice import how_to_install
from coexec.errors import MachineError
from coexec.subgraphs.entries import Outcome
from coexec.subgraphs.store import Store, open_store
from coexec.tuning.report import AttemptReport, GraphReport, TuneReport
from coexec.tuning.settings import TuneSettings


class RayUnavailableError(MachineError, RuntimeError):
    """Ray is not installed, or the store cannot be reached from other machines."""


def tune_with_ray(settings: TuneSettings, *, store: Store | None = None, address: str | None = None) -> TuneReport:
    """Tune as :func:`coexec.tuning.tune` does, with one task per graph, spread over the cluster.

    `address`: of the cluster, as for `ray.init` (default: the environment's, or a local one).
    Errors: RayUnavailableError; StoreError.
    """
    if importlib.util.find_spec("ray") is None:
        raise RayUnavailableError(f"--ray needs Ray; {how_to_install('ray')}")
    store = store or open_store(strict=True)
    if not store.location.shared:
        raise RayUnavailableError(
            "the store is a file of this machine; set COEXEC_STORE to a database server that every node can reach"
        )
    ray: Any = importlib.import_module("ray")
    ray.init(address=address, ignore_reinit_error=True)
    remote = ray.remote(num_cpus=_cpus_of_a_node(ray))(tune_share)
    start_s = time.monotonic()
    shares = shares_of(store, settings)
    answers = ray.get([remote.remote({**share, "store": store.location.url}) for share in shares])
    return merged(answers, time.monotonic() - start_s)


def shares_of(store: Store, settings: TuneSettings) -> list[dict[str, Any]]:
    """One task per stored graph with a program: plain data, so that any version of Ray can carry it."""
    from coexec.tuning.queue import selected

    digests = [info.digest for info in selected(store, settings)]
    limits = dataclasses.asdict(settings)
    return [{"settings": {**limits, "subgraphs": [digest], "workers": 1}} for digest in digests]


def tune_share(share: dict[str, Any]) -> dict[str, Any]:
    """Runs on a node: tune one graph of the shared store; the report as plain data."""
    from coexec.tuning.tuner import tune

    os.environ["COEXEC_STORE"] = share["store"]
    return tune(None, settings_from(share["settings"])).as_json()


def settings_from(data: dict[str, Any]) -> TuneSettings:
    """Settings from plain data, where tuples have become lists."""
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in data.items()}
    return TuneSettings(**values)


def merged(answers: Sequence[dict[str, Any]], elapsed_s: float) -> TuneReport:
    """One report of all tasks' reports."""
    graphs = [graph_from(graph) for answer in answers for graph in answer["graphs"]]
    unavailable = {name: reason for answer in answers for name, reason in answer["unavailable"].items()}
    return TuneReport(tuple(graphs), unavailable, elapsed_s, any(answer["out_of_budget"] for answer in answers))


def graph_from(data: dict[str, Any]) -> GraphReport:
    """The report of one graph from plain data."""
    attempts = [AttemptReport(**{**entry, "outcome": Outcome(entry["outcome"])}) for entry in data["attempts"]]
    return GraphReport(**{**data, "attempts": tuple(attempts), "prepared": tuple(data["prepared"])})


def _cpus_of_a_node(ray: Any) -> float:
    """As many as the smallest node has: one task then fills any node, and none waits for a node that does not exist."""
    return min((node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["Alive"]), default=1.0)
