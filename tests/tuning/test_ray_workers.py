"""The parts of tuning over Ray that need no cluster, and the whole on a local one where Ray is installed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from coexec.subgraphs.entries import Outcome
from coexec.subgraphs.location import private_location, shared_location
from coexec.subgraphs.store import Store
from coexec.subgraphs.trust import Keyring, default_keys_folder
from coexec.tuning import AttemptReport, GraphReport, TuneReport, TuneSettings, ray_workers
from coexec.tuning.program_file import save_program
from tests.tuning.graphs import climbing, key_of

SETTINGS = TuneSettings(threads=1, rounds=(3, 4), busy_retries=0, candidates=("planted-fast", "planted-refuses"))


def shared_store(folder: Path, keys: Path | None = None) -> Store:
    """A store that other machines could reach, with two graphs."""
    location = shared_location(f"sqlite:///{folder}/team.sqlite", folder / "mine")
    store = Store(location, strict=True, keyring=Keyring(keys or folder / "keys"))
    for size in (16, 24):
        save_program(climbing(size), folder / "program")
        store.put_subgraph(key_of(climbing(size)), program=folder / "program")
    return store


def test_every_graph_is_a_task_of_plain_data(tmp_path: Path) -> None:
    shares = json.loads(json.dumps(ray_workers.shares_of(shared_store(tmp_path), SETTINGS)))
    settings = [ray_workers.settings_from(share["settings"]) for share in shares]
    assert sorted(s.subgraphs[0] for s in settings if s.subgraphs) == sorted(
        key_of(climbing(size)).digest for size in (16, 24)
    )
    assert all(s.candidates == SETTINGS.candidates and s.rounds == SETTINGS.rounds for s in settings)


def test_reports_come_back_as_they_were() -> None:
    attempt = AttemptReport("planted-fast", Outcome.OK, "fine", speedup=2.0)
    decided = GraphReport("a", "x.py:1", (attempt,), "planted-fast", 2.0, True)
    left = GraphReport("b", "x.py:2", reason="the budget was spent before its turn", out_of_budget=True)
    reports = [TuneReport((graph,), {"tvm": "no"}, 1.0) for graph in (decided, left)]
    merged = ray_workers.merged([json.loads(json.dumps(r.as_json())) for r in reports], 3.0)
    assert merged.graphs == (*reports[0].graphs, *reports[1].graphs)
    assert merged.unavailable == {"tvm": "no"}
    assert merged.elapsed_s == 3.0


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ray_workers.RayUnavailableError, match=r"in a checkout of coexec: pip install '\.\[ray\]'"):
        ray_workers.tune_with_ray(SETTINGS)


def test_a_store_of_one_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(ray_workers.RayUnavailableError, match="COEXEC_STORE"):
        ray_workers.tune_with_ray(SETTINGS, store=Store(private_location(tmp_path), strict=True))


@pytest.mark.slow
def test_a_local_cluster_tunes_every_graph(
    tmp_path: Path, planted_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray; pip install '.[ray]'")
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("COEXEC_STORE", f"sqlite:///{tmp_path}/team.sqlite")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(planted_folder), *sys.path]))  # Ray's workers inherit it
    monkeypatch.setenv("HOME", str(tmp_path))  # one user's keys, here and on the nodes
    store = shared_store(tmp_path, default_keys_folder())
    try:
        report = ray_workers.tune_with_ray(SETTINGS, store=store)
    finally:
        ray.shutdown()
    assert [graph.winner for graph in report.graphs] == ["planted-fast"] * 2
