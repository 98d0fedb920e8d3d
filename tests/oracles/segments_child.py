"""The processes of segments.py: one runs random programs and keeps their segments, one judges what was kept."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from coexec.backends.cache import Failure
from coexec.backends.expressions import NotExpressibleError
from coexec.backends.fed import NotLowerableError
from coexec.backends.inductor import compile_segment, compile_symbolic
from coexec.backends.key import artifact_key
from coexec.backends.lower import Symbolic, lower
from coexec.backends.publish import place_publishes, register_publish
from coexec.backends.snapshot import delete_snapshot, read_snapshot
from coexec.backends.spec import SegmentSpec
from coexec.backends.spec_json import dumps, from_json
from coexec.backends.symbolic import SymbolicSpec, unify
from coexec.backends.verify import check, load
from coexec.backends.worker import Finished
from tests.oracles.processes import begin, end
from tests.oracles.verdict import SAME, WRONG, Verdict

REFUSED = "refused"  # it cannot be lowered, and says why


class Collector:
    """A compile worker that keeps its jobs in a folder, each once, and fails them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = self
        self.program = 0  # whose segments come now
        self._finished: list[Finished] = []
        self._jobs = 0

    def get(self, key: str) -> None:
        """As a cache: nothing is known."""

    def submit(self, spec: SegmentSpec, snapshot: Path, timed: bool, note: str) -> int:
        return self._keep(artifact_key(spec), dumps(spec), [snapshot])

    def submit_symbolic(self, spec: SymbolicSpec, snapshots: Sequence[Path], timed: bool, note: str) -> int:
        return self._keep(artifact_key(spec), f"[{','.join(dumps(one) for one in spec.observed)}]", snapshots)

    def poll(self) -> list[Finished]:
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, job: int) -> bool:
        """As a worker: every job has ended when it is submitted."""
        return False

    def _keep(self, key: str, text: str, snapshots: Sequence[Path]) -> int:
        self._jobs += 1
        place = self.folder / key[:16]
        if place.exists():
            for snapshot in snapshots:
                delete_snapshot(snapshot)
        else:
            place.mkdir()
            for number, snapshot in enumerate(snapshots):
                for suffix in (".bin", ".json"):
                    snapshot.with_suffix(suffix).rename(place / f"live{number}{suffix}")
            (place / "program").write_text(str(self.program))
            (place / "spec.json").write_text(text)
        self._finished.append(Finished(self._jobs, key, None, Failure(key, "not lowerable", "kept"), None))
        return self._jobs


def collect(folder: Path, seeds: range, iterations: int) -> None:
    """Runs the programs of `seeds` with default options."""
    import coexec
    from coexec.runtime import compile_jobs
    from tests.coexec.harness import run
    from tests.oracles.fuzz_child import prepare
    from tests.oracles.programs import maker, source_of

    prepare()
    worker: Any = Collector(folder)
    compile_jobs._worker = worker
    for seed in seeds:
        begin(str(seed))
        worker.program = seed
        run(maker(source_of(seed), seed), iterations, coexec.compile)
        end(Verdict(str(seed), SAME))
        coexec.reset()


def judge(folder: Path, after: str, compiled: bool) -> None:
    """Judges every segment of `folder` behind `after`."""
    register_publish()
    for place in sorted(folder.iterdir()):
        if place.name > after and (place / "spec.json").exists():
            begin(place.name)
            end(judge_one(place, compiled))


def judge_one(place: Path, compiled: bool) -> Verdict:
    """Compares one segment, run on its live inputs, with the ops as recorded."""
    form = json.loads((place / "spec.json").read_text())
    observed = [from_json(one) for one in form] if isinstance(form, list) else [from_json(form)]
    spec = unify(observed) if isinstance(form, list) else observed[0]
    sample = f"{place.name} of program {(place / 'program').read_text()}"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run = _artifact(spec, Path(scratch)) if compiled else _graph(spec)
        except (NotLowerableError, NotExpressibleError) as error:
            return Verdict(sample, REFUSED, str(error))
        problems: list[str] = []
        for number, one in enumerate(observed):
            inputs, state = read_snapshot(place / f"live{number}.json")
            problems += check(one, run, inputs, state, timed=False).problems
    return Verdict(sample, WRONG if problems else SAME, "; ".join(problems))


def _graph(spec: SegmentSpec | SymbolicSpec) -> Any:
    """The lowered graph as a function."""
    one, symbolic = (spec.observed[0], Symbolic(spec)) if isinstance(spec, SymbolicSpec) else (spec, None)
    return graph_of(lower(one, torch._inductor.decomposition.select_decomp_table(), symbolic))


def graph_of(graph: GraphModule) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """A lowered graph as a function that publishes as an artifact does."""
    place_publishes(graph.graph)
    graph.recompile()

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(graph(*inputs))

    return run


def _artifact(spec: SegmentSpec | SymbolicSpec, folder: Path) -> Any:
    build: Any = compile_symbolic if isinstance(spec, SymbolicSpec) else compile_segment
    return load(build(spec, folder).library)


def main() -> None:
    """One of the two processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("collect", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=0, help="the seed after the last one")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--after", default="")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    if given.what == "collect":
        collect(given.folder, range(given.first, given.last), given.iterations)
    else:
        judge(given.folder, given.after, given.compile)


if __name__ == "__main__":
    main()
