"""One model of the catalog in one variant in a process: `python -m benchmarks.inference_child MODEL VARIANT`.

Variants: "eager"; "collect" stores the graphs that Dynamo makes; "coexec" serves what the store knows; "inductor" is
torch.compile as it is. See `child.serve` for how it is asked.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.correctness import excess_of, noisy_runs
from benchmarks.models import catalog
from benchmarks.models.build import Missing
from examples.demo.child import resident_bytes, serve

EAGER, COLLECT, COEXEC, INDUCTOR = "eager", "collect", "coexec", "inductor"
WARM_CALLS = 5
DECIDING_S = 20.0
VERDICTS = {"eager.faster than compiled", "compiled is faster", "eager.nothing compiled"}
"""What coexec counts once it has compared what it serves with plain eager, on the module's own calls."""

CHECK_SEEDS = (1, 2)
COMPILERS = ("torch._inductor.compile_fx", "onnxscript")
"""Front ends of compilers: no process needs them to run what is compiled."""


class Worker:
    """What the child can be asked to do: one method per command."""

    def __init__(self, name: str, variant: str) -> None:
        torch.set_grad_enabled(False)
        self.variant = variant
        self.problem = ""
        try:
            self.model = catalog.build(name)
        except Missing as missing:
            self.problem = str(missing)
            return
        self.run: Callable[..., Any] = compiled(self.model.module, variant)
        self.inputs: tuple[Tensor, ...] = ()

    def do_ready(self) -> dict[str, Any]:
        """Answers once the model is built: with what it lacks, or ""."""
        return {"missing": self.problem, "pid": os.getpid(), "threads": torch.get_num_threads()}

    def do_collect(self, batches: list[int]) -> dict[str, Any]:
        """Runs the model once per batch size; answers with the digests of the graphs that it met, in order."""
        from coexec import choose

        graphs: dict[str, list[str]] = {}
        for batch in batches:
            with graphs_stored() as met:
                self.run(*self.model.inputs(batch))
            graphs[str(batch)] = met
        return {"graphs": graphs, "counters": choose.counters(), "explain": choose.explain()}

    def do_warm(self, batch: int) -> dict[str, Any]:
        """Fixes the batch size; compiles or installs, and runs a few times. Counts are of this batch size alone."""
        self._count_anew()
        self.inputs = self.model.inputs(batch)
        start_s = time.perf_counter()
        self.run(*self.inputs)
        first_s = time.perf_counter() - start_s
        for _ in range(WARM_CALLS):
            self.run(*self.inputs)
        self._until_decided()
        compilers = [name for name in COMPILERS if name in sys.modules]
        return {"first_s": first_s, "rss_bytes": resident_bytes(), "compilers": compilers, **self._account()}

    def do_check(self, batch: int) -> dict[str, Any]:
        """Compares with eager and with float64 on several inputs; `excess` above 1 is wrong (see correctness.py).

        `excess_of_one_run`: the same with one run of eager as the only measure.
        """
        reference = copy.deepcopy(self.model.module).double()
        worst = worst_of_one = 0.0
        for seed in CHECK_SEEDS:
            inputs = self.model.inputs(batch, seed)
            exact = reference(*(value.double() if value.is_floating_point() else value for value in inputs))
            answers = [catalog.outputs_of(x) for x in (self.run(*inputs), self.model.module(*inputs), exact)]
            excess = excess_of(*answers)
            worst_of_one = max(worst_of_one, excess)
            if 1.0 < excess < float("inf"):
                noisy = noisy_runs(partial(self._eager_answer, inputs))
                excess = excess_of(*answers, noisy=noisy)
            worst = max(worst, excess)
        return {"excess": worst, "excess_of_one_run": worst_of_one, "correct": worst <= 1.0}

    def _eager_answer(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        return catalog.outputs_of(self.model.module(*inputs))

    def do_block(self, lead_in: int, steps: int, one_by_one: bool) -> dict[str, Any]:
        """Runs one turn; see `paired.Contender`."""
        for _ in range(lead_in):
            self.run(*self.inputs)
        if one_by_one:
            return {"seconds": median(self._timed(1) for _ in range(steps))}
        return {"seconds": self._timed(steps) / steps}

    def _timed(self, steps: int) -> float:
        start_s = time.perf_counter()
        for _ in range(steps):
            self.run(*self.inputs)
        return time.perf_counter() - start_s

    def _until_decided(self) -> None:
        """More calls, until coexec knows whether plain eager is faster than what it serves, unless it is not to ask."""
        from coexec.config import settings

        end_s = time.monotonic() + (0.0 if self.variant != COEXEC or settings().keep else DECIDING_S)
        while time.monotonic() < end_s and not VERDICTS & self._account()["counters"].keys():
            self.run(*self.inputs)

    def _count_anew(self) -> None:
        if self.variant == COEXEC:
            from coexec import choose

            choose.reset_counters()

    def _account(self) -> dict[str, Any]:
        if self.variant != COEXEC:
            return {}
        from coexec import choose

        return {"counters": choose.counters(), "explain": choose.explain()}


def compiled(module: torch.nn.Module, variant: str) -> Callable[..., Any]:
    """The model as the variant runs it."""
    if variant == EAGER:
        return module
    # Without it Dynamo breaks the graph at each LSTM and GRU and gives up the call: there would be nothing to compare.
    torch._dynamo.config.allow_rnn = True
    if variant == INDUCTOR:
        return torch.compile(module, dynamic=False)
    mode = "collect" if variant == COLLECT else "serve"
    return torch.compile(module, backend=coexec_backend(), options={"mode": mode}, dynamic=False)


def coexec_backend() -> Any:
    """The name where the package is installed, the function where it runs from a checkout."""
    from torch._dynamo.backends.registry import list_backends

    if "coexec" in list_backends(exclude_tags=()):
        return "coexec"
    from coexec.dynamo_backend import coexec_backend as function

    return function


class graphs_stored:  # noqa: N801 - used as a statement
    """Within the block, notes the digest of each graph that is handed to the store, one entry per place of use."""

    def __enter__(self) -> list[str]:
        from coexec import choose

        met: list[str] = []
        self.original = original = choose.remember

        def remember(store: Any, graph: Any, inputs: Any) -> bool:
            met.append(graph.key.digest)
            return original(store, graph, inputs)

        choose.remember = remember
        return met

    def __exit__(self, *exception: object) -> None:
        from coexec import choose

        choose.remember = self.original


if __name__ == "__main__":
    serve(Worker)
