"""Decisions as the tuner makes them, without its processes: built here, with a made-up measurement."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from coexec.backends.candidates import registry
from coexec.subgraphs.entries import Outcome
from coexec.subgraphs.store import Store
from coexec.tuning.attempt import Attempt
from coexec.tuning.identity import constants_digests, custom_ops_of_text, environment_of, shape_class_of
from coexec.tuning.program_file import load_program
from coexec.tuning.standing import Facts, Standing
from coexec.tuning.turns import timing_of


def decide(store: Store, digest: str, candidate_name: str, threads: int | None = None) -> None:
    """Build the candidate for a stored graph and decide for it; planted-slow is measured as slower than eager."""
    info, path = store.subgraph(digest), store.program(digest)
    assert info is not None
    assert path is not None
    program, candidate = load_program(path), registry.get(candidate_name)
    threads = threads or torch.get_num_threads()
    environment = environment_of(custom_ops_of_text(info.text), threads)
    facts = Facts(
        digest, info.program, environment, shape_class_of(program.inputs), *constants_digests(program), threads
    )
    timing = timing_of([1.0] * 3, [2.0 if candidate_name == "planted-slow" else 0.5] * 3)
    with tempfile.TemporaryDirectory() as folder:
        metadata = candidate.build(program, Path(folder), threads=threads, budget_s=10.0)
        attempt = Attempt(candidate_name, Outcome.OK, "made up", timing, 0.1, metadata)
        Standing(facts).commit(store, candidate, attempt, Path(folder))
