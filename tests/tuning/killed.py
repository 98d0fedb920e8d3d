"""Tuners that run to be killed, and what must be left of their work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from coexec.subgraphs.store import Store

ROOT = Path(__file__).resolve().parents[2]

TUNER = """
import signal
import sys
from pathlib import Path
from coexec.subgraphs.location import private_location
from coexec.subgraphs.store import Store
from coexec.tuning import tune
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever is started in the background ignores it
report = tune(
    Store(private_location(Path(sys.argv[1]))), threads=1, rounds=(3, 4), busy_retries=0, attempt_s=20,
    candidates=sys.argv[2].split(), progress=lambda event: print(event.stage, flush=True),
)
print("complete" if all(graph.complete for graph in report.graphs) else "incomplete", flush=True)
"""


def start(code: str, *arguments: object, path: tuple[Path, ...] = (), **variables: str) -> subprocess.Popen[str]:
    """`code` in a process of its own, with this checkout and `path` to import from."""
    search = os.pathsep.join(str(folder) for folder in (*path, ROOT / "src", ROOT))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *(str(argument) for argument in arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search, **variables},
    )


def start_tuner(store: Store, names: tuple[str, ...], *path: Path) -> subprocess.Popen[str]:
    """A tuner that prints the stage of each of its events; at its end "complete" or "incomplete"."""
    return start(TUNER, store.location.folder, " ".join(names), path=path)


def committed(store: Store) -> tuple[dict[str, object], set[str]]:
    """What the store says has been tried (by graph, environment, candidate), and the ids of its measurements."""
    tried = {
        f"{decision.subgraph} {decision.environment} {name}": entry
        for decision in store.decisions()
        for name, entry in decision.options["tried"].items()
    }
    ids = {m.id for info in store.subgraphs() for m in store.measurements(info.digest)}
    return tried, ids


def assert_gone(processes: list[int]) -> None:
    """The children end with the tuner, also those that were stopped between their turns.

    One that still imports torch notices when it has: on a busy machine that takes a while.
    """
    deadline_s = time.monotonic() + 60
    while any(is_alive(pid) for pid in processes) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert [pid for pid in processes if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
