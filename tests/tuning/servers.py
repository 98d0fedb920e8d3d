"""Serving processes: small models under `torch.compile(backend="coexec")`, every answer compared with eager.

`main(["live", SIZES, STOP])` serves round after round until the file STOP is there; `main(["fresh", SIZES])` serves
every model once in a new process for each line on stdin. SIZES is how many sizes each model has.

Each round prints one line of JSON, what coexec counted. A wrong answer or an error ends the process with a status.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from coexec import choose
from coexec.dynamo_backend import coexec_backend

STEPS = 30
ONCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x * 0.9 + 0.3,
    "tanh": lambda x: torch.tanh(x + 0.1) + x,
    "clamp": lambda x: (x - 0.2).clamp(-2.0, 2.0) * 1.1,
    "mean": lambda x: x - x.mean(1, keepdim=True) + 0.5,
}


def models(sizes: int) -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]]:
    """(name, model, input): small ops, slow one by one; no two are the same graph."""
    for name, once in ONCE.items():
        for size in range(8, 8 + 4 * sizes, 4):
            yield f"{name} {size}", chain(once), torch.randn(size, size)


def chain(once: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`once`, STEPS times."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(STEPS):
            x = once(x)
        return x

    return run


def serve_all(sizes: int, pause_s: float = 0.0) -> None:
    """Every model once more from the beginning: traced, looked up, called three times and compared."""
    for name, model, x in models(sizes):
        torch._dynamo.reset()
        run = torch.compile(model, backend=coexec_backend)
        for _ in range(3):
            torch.testing.assert_close(
                run(x), model(x), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        time.sleep(pause_s)


def live(sizes: int, stop: Path) -> None:
    """One process with one store, for long."""
    while not stop.exists():
        serve_all(sizes, pause_s=0.1)
        print(json.dumps(choose.counters()), flush=True)


def fresh(sizes: int) -> None:
    """A process for each line of stdin, forked from one that has imported torch and run nothing."""
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            serve_all(sizes)
            print(json.dumps(choose.counters()), flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"a serving process ended with {os.waitstatus_to_exitcode(status)}")


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if arguments[0] == "live":
        live(int(arguments[1]), Path(arguments[2]))
    else:
        fresh(int(arguments[1]))
