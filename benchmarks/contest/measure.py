"""One program under all contenders: warm-up, agreement, turns, memory, and what each says about itself."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.contest.budget import STARTS, UNLIMITED, Budget
from benchmarks.contest.contenders import CONTENDERS, DISTURBED, EAGER, FIRST
from benchmarks.paired import Paired
from examples.demo.child import REQUEST_TIMEOUT_S, Child, ChildFailed

FAST = 1.1
"""A step is fast if it takes at most this many times the median step of the measured turns."""
FAST_WINDOW = 5
"""Steps from it on whose median has to be fast too: one lucky step among slow ones does not count."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long is measured."""

    warm_steps: int = 100  # the paper measures steps 100 to 200
    rounds: int = 10
    turn_steps: int = 10  # of each contender in each round
    peak_steps: int = 20
    settle_s: float = 300.0  # how long coexec may train until it has compiled; then it is waited for
    tiny: bool = False
    budget_s: float | None = None  # of all programs together; what there is no time for is left out


def measure(program: str, names: list[str], plan: Plan, say: Say, budget: Budget = UNLIMITED) -> dict[str, Any]:
    """Returns all figures of one program; contenders that fail are left out, with their reason."""
    with ExitStack() as stack:
        children, warm, problems = open_children(stack, program, names, plan, say, budget)
        racers = {name: child for name, child in children.items() if name != DISTURBED}
        paired = take_turns(racers, plan, say, problems, budget)
        ended = [name for name in racers if name in problems]
        facts = {name: facts_of(child, plan) for name, child in racers.items() if name not in ended}
    contenders = paired.as_json(EAGER)
    for name, entry in contenders.items():
        entry |= facts[name] | {"first_fast_s": first_fast_s(warm[name], paired.median_s(name))}
    distances = {name: result["distance"] for name, result in warm.items()}
    losses = {name: result["losses"] for name, result in warm.items()}
    return {"contenders": contenders, "distances": distances, "losses": losses, "problems": problems}


def open_children(
    stack: ExitStack, program: str, names: list[str], plan: Plan, say: Say, budget: Budget = UNLIMITED
) -> tuple[dict[str, Child], dict[str, Any], dict[str, str]]:
    """Starts and warms up the contenders one after the other; each sleeps when it is done.

    Those that matter most come first: with a budget, the others may find no time left.

    Raises:
        ChildFailed: eager itself does not run.
    """
    children: dict[str, Child] = {}
    warm: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name in by_importance(names):
        if name != EAGER and budget.left_s(STARTS) == 0.0:
            problems[name] = f"{program}, {name}: left out, the time was up"
            continue
        say(f"{program}: warming up {name}")
        try:
            child = stack.enter_context(start(program, name, plan))
            warm[name] = warm_up(child, plan, budget)
        except ChildFailed as error:
            if name == EAGER:
                raise
            problems[name] = str(error)
            continue
        stack.enter_context(asleep(child))
        children[name] = child
        reference = warm[EAGER]["parameters"]
        warm[name]["distance"] = distance(warm[name]["parameters"], reference)
    return children, warm, problems


def by_importance(names: list[str]) -> list[str]:
    """Returns the contenders in the order in which they start."""
    return [
        EAGER,
        DISTURBED,
        *(name for name in FIRST if name in names),
        *(name for name in names if name not in FIRST),
    ]


def start(program: str, name: str, plan: Plan) -> Child:
    """Returns the process of one contender."""
    assert name in CONTENDERS, name
    sized = f"{program}:tiny" if plan.tiny else program
    return Child(sized, name, f"{program}, {name}", module="benchmarks.contest.child")


def warm_up(child: Child, plan: Plan, budget: Budget = UNLIMITED) -> dict[str, Any]:
    """Runs the first steps, notes where they led, and goes on until the contender has settled.

    Raises:
        ChildFailed: also if the first steps take longer than the budget has.
    """
    if child.contender != EAGER:  # which everything is compared with
        child.timeout_s = min(REQUEST_TIMEOUT_S, max(1.0, budget.left_s(STARTS)))
    result = child.ask("warm", steps=plan.warm_steps)
    child.timeout_s = REQUEST_TIMEOUT_S
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "parameters.npy")
        child.ask("parameters", path=path)
        result["parameters"] = np.load(path)
    settled = child.ask("settle", limit_s=budget.settle_s(plan.settle_s))
    for key in ("ends_s", "times_s"):
        result[key] += settled[key]
    child.ask("fresh")
    return result


def asleep(child: Child) -> contextlib.AbstractContextManager[None]:
    """Within it the process and all that it has started are stopped: not even an idle thread of them spins."""
    return between(child.processes.stop, child.processes.go_on)


def awake(child: Child) -> contextlib.AbstractContextManager[None]:
    """Within it a sleeping process runs."""
    return between(child.processes.go_on, child.processes.stop)


@contextlib.contextmanager
def between(first: Callable[[], None], then: Callable[[], None]) -> Iterator[None]:
    """Calls one before, and the other after, whatever happens."""
    first()
    try:
        yield
    finally:
        then()


def take_turns(
    children: dict[str, Child], plan: Plan, say: Say, problems: dict[str, str], budget: Budget = UNLIMITED
) -> Paired:
    """Returns seconds per step of each contender in each round; who begins changes from round to round.

    All get the same batches in a round. One that fails loses all its rounds, and its reason is added to `problems`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in children}
    for number in range(plan.rounds):
        if not budget.allows_round(number):
            break
        order = [*children]
        first = number % len(order)
        for name in order[first:] + order[:first]:
            if name in problems:
                continue
            say(f"round {number + 1} of {plan.rounds}: {name}")
            try:
                with awake(children[name]):
                    seconds[name].append(children[name].ask("turn", steps=plan.turn_steps)["seconds"] / plan.turn_steps)
            except ChildFailed as error:
                if name == EAGER:
                    raise
                problems[name] = str(error)
                del seconds[name]
    return Paired(seconds, dict.fromkeys(seconds, plan.turn_steps))


def facts_of(child: Child, plan: Plan) -> dict[str, Any]:
    """Returns a contender's own account before and after some steps, and its memory meanwhile."""
    with awake(child):
        before = child.ask("account")
        facts = child.ask("peak", steps=plan.peak_steps)
        after = child.ask("account")
    if "coexec" in after:
        facts["per_step"] = per_step(before["coexec"], after["coexec"], plan.peak_steps)
    return facts | after


def per_step(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns what coexec counted between two accounts, per step: milliseconds, and numbers of waits and values."""
    old, new = before["stats"], after["stats"]
    times = ("python_exec_s", "python_stall_s", "graph_exec_s", "graph_stall_s")
    counted: dict[str, Any] = {name.removesuffix("_s") + "_ms": (new[name] - old[name]) / steps * 1e3 for name in times}
    counted |= {name: (new[name] - old[name]) / steps for name in ("feeds", "fetches", "co_executed")}
    counted["waits"] = {
        reason: {key: (value - before["waits"].get(reason, {}).get(key, 0)) / steps for key, value in total.items()}
        for reason, total in after["waits"].items()
    }
    return counted


def distance(found: np.ndarray, reference: np.ndarray) -> float:
    """Returns how far the trained parameters are from eager's, by how far eager's have come; float64[2, n] each."""
    travelled = float(np.linalg.norm(reference[1] - reference[0]))
    return float(np.linalg.norm(found[1] - reference[1])) / max(travelled, 1e-30)


def first_fast_s(warm: dict[str, Any], settled_s: float) -> float | None:
    """Returns the seconds from the first step's start to the end of the first fast one; None if there was none."""
    times_s, ends_s = warm["times_s"], warm["ends_s"]
    for index in range(len(times_s) - FAST_WINDOW + 1):
        if max(times_s[index], median(times_s[index : index + FAST_WINDOW])) <= FAST * settled_s:
            return float(ends_s[index])
    return None
