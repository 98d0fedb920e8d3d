"""What a tuning run may spend, and what it tries. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

PREPARE, TIME = "prepare", "time"
PHASES = ("", PREPARE, TIME)


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """Limits of one run of :func:`coexec.tuning.tune`."""

    budget_s: float | None = None  # for the whole run; None: until everything is tuned
    per_graph_s: float = 900.0  # for one graph; what does not fit is tried by the next run
    attempt_s: float = 240.0  # one candidate on one graph: building, or one question to a loaded one
    memory_bytes: int = 16 << 30  # resident memory of one child and the compilers it starts
    candidates: tuple[str, ...] | None = None  # names; None: all that are usable here
    subgraphs: tuple[str, ...] | None = None  # prefixes of digests; None: all that are not decided yet
    threads: int | None = None  # intra-op threads that will serve; None: torch's default here
    workers: int = 1  # graphs worked on at once; timings of all of them take turns
    only: str = ""  # "prepare": build and verify, beside other work; "time": what is prepared, on a quiet machine
    retune: bool = False  # begin anew with graphs that are decided already
    rounds: tuple[int, int] = (9, 27)  # fewest and most rounds of a timing
    busy_cores: float = 0.3  # a timing during which others took more than this is repeated
    busy_retries: int = 2  # how often; then it counts, and the decision says that the machine was busy

    def __post_init__(self) -> None:
        for name in ("per_graph_s", "attempt_s", "memory_bytes", "workers"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} leaves nothing to tune with; give a positive number")
        if self.only not in PHASES:
            raise ValueError(f"only={self.only!r} is no part of tuning; give 'prepare', 'time', or '' for both")
        if self.budget_s is not None and self.budget_s < 0:
            raise ValueError(f"budget_s={self.budget_s} is negative; None means no limit")
        if not 2 <= self.rounds[0] <= self.rounds[1]:
            raise ValueError(f"rounds={self.rounds}: expected (fewest, most) with 2 <= fewest <= most")
