"""The fifteen programs under eager, every way of torch.compile, and coexec; what `coexec bench` runs.

python -m benchmarks.contest gpt2 bert_qa --out out/bench/programs.json --page docs/programs.md
python -m benchmarks.contest --profile gpt2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.contest.budget import CONVERSIONS, UNLIMITED, Budget
from benchmarks.contest.contenders import COEXEC_KEPT, CONTENDERS, DISTURBED, EAGER
from benchmarks.contest.converting import WAYS
from benchmarks.contest.measure import Plan, measure, start
from benchmarks.contest.page import ratio, write_page
from benchmarks.machine import describe_machine, digest_of_code
from benchmarks.programs import catalog
from examples.demo.child import Child, ChildFailed

OUT = Path("out/bench/programs.json")
PROFILED_STEPS = 5


def main(words: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; the exit status is 1 if a program's own eager run failed."""
    options = checked(parser(), words)
    if options.profile:
        return profile(options.profile, options)
    result = run(options)
    say(f"wrote {options.out}")
    if options.page:
        write_page(result, options.page)
        say(f"wrote {options.page}")
    if options.json:
        print(json.dumps(result))
    else:
        summarise(result)
    return int(any("failed" in entry for entry in result["programs"].values()))


def checked(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed command line; a name that does not exist is wrong usage."""
    options = parser.parse_args(words)
    for names, known in (([*options.programs, options.profile], catalog.PROGRAMS), (options.contenders, CONTENDERS)):
        unknown = [name for name in names if name is not None and name not in known]
        if unknown:
            parser.error(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
    return options


class Parser(argparse.ArgumentParser):
    """Says what is wrong as `coexec` does, which passes its own command line on."""

    def error(self, message: str) -> NoReturn:
        """In one line. Errors: SystemExit."""
        self.exit(2, f"Error: {message}. `coexec bench --help` lists the options.\n")


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in CONTENDERS if name not in (EAGER, DISTURBED)]
    default = Plan()
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"default: all of {', '.join(catalog.PROGRAMS)}")
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="rounds of turns")
    parser.add_argument("--turn-steps", type=int, default=default.turn_steps, help="steps of a turn")
    parser.add_argument("--warm-steps", type=int, default=default.warm_steps, help="steps before the first turn")
    parser.add_argument("--settle", type=float, default=default.settle_s, help="seconds for background compilation")
    parser.add_argument("--budget", type=float, help="seconds for all of it: what there is no time for is left out")
    parser.add_argument("--resume", action="store_true", help="go on with what --out has, if nothing has changed")
    parser.add_argument("--no-convert", action="store_true", help="leave out the conversions")
    parser.add_argument("--tiny", action="store_true", help="the tests' sizes: to try the command, not to measure")
    parser.add_argument("--out", type=Path, default=OUT, help="where the JSON goes")
    parser.add_argument("--page", type=Path, help="also render this Markdown page, with its charts beside it")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.add_argument("--profile", metavar="PROGRAM", help="only write a Chrome trace of this program's steps")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the run's result: environment, plan, and an entry per program; each is on disk as soon as it is known."""
    plan = Plan(
        *(options.warm_steps, options.rounds, options.turn_steps, 2 * options.turn_steps),
        *(options.settle, options.tiny, options.budget),
    )
    until_s = time.monotonic() + (options.budget or math.inf)
    names = options.programs or list(catalog.PROGRAMS)
    result = begun(options, plan)
    programs: dict[str, Any] = result["programs"]
    lacking = [name for name in names if lacks(programs.get(name), options)]
    for index, name in enumerate(lacking):
        budget = Budget(max(0.0, until_s - time.monotonic()) / (len(lacking) - index))
        programs[name] = entry_of(name, options, plan, budget, programs.get(name))
        keep(result, options.out)
        if not options.json:
            announce(name, programs[name])
    result["programs"] = {name: programs[name] for name in catalog.PROGRAMS if name in programs}
    keep(result, options.out)
    return result


def lacks(entry: dict[str, Any] | None, options: argparse.Namespace) -> bool:
    """Whether something of a program is to be found out: one measured without conversions can have them later."""
    return entry is None or not (options.no_convert or "conversions" in entry or "missing" in entry)


def begun(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Returns a result without programs; or, to resume, what the file has of the same plan, machine and code."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    result: dict[str, Any] = {
        "began": now,
        "resumed": [],
        "code": digest_of_code(),
        "contenders": [*options.contenders],
        "machine": describe_machine(),
        "plan": asdict(plan),
        "programs": {},
    }
    if not options.resume or not options.out.exists():
        return result
    before: dict[str, Any] = json.loads(options.out.read_text())
    if changed := what_changed(before, result):
        say(f"{options.out} is begun anew: {', '.join(changed)} changed since")
        return result
    say(f"{options.out} has {', '.join(before['programs'])} already")
    return before | {"resumed": [*before["resumed"], now]}


def what_changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns why figures of two runs do not belong on one page; the budget and the load may differ."""

    def compared(result: dict[str, Any]) -> dict[str, Any]:
        machine = {key: value for key, value in result["machine"].items() if key != "load_average"}
        plan = {key: value for key, value in result["plan"].items() if key != "budget_s"}
        kept = {key: result.get(key) for key in ("code", "contenders")}
        return json.loads(json.dumps(kept | {"machine": machine, "plan": plan}))  # type: ignore[no-any-return]

    old, new = compared(before), compared(now)
    return [key for key in new if old[key] != new[key]]


def keep(result: dict[str, Any], path: Path) -> None:
    """Writes the result in one move: a run that is interrupted leaves what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def entry_of(
    name: str,
    options: argparse.Namespace,
    plan: Plan,
    budget: Budget = UNLIMITED,
    known: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns what was found about one program; what is missing or fails says so instead."""
    if problem := catalog.missing(name):
        return {"missing": problem}
    entry: dict[str, Any] = {} if options.no_convert else {"conversions": convert(name, budget)}
    if known is not None:
        return known | entry
    try:
        return entry | measure(name, options.contenders, plan, say, budget)
    except ChildFailed as error:
        return entry | {"failed": str(error)}


def convert(name: str, budget: Budget = UNLIMITED) -> dict[str, dict[str, str]]:
    """Returns a verdict per way of converting, each found out in a process of its own; fewer if the time is up."""
    verdicts: dict[str, dict[str, str]] = {}
    for way in WAYS:
        if budget.left_s(CONVERSIONS) == 0.0:
            break
        say(f"{name}: does it convert? {way}")
        try:
            with Child(name, way, module="benchmarks.contest.converting") as child:
                child.timeout_s = min(child.timeout_s, max(1.0, budget.left_s(CONVERSIONS)))
                verdicts[way] = child.ask("verdict")
        except ChildFailed as error:
            late = budget.left_s(CONVERSIONS) == 0.0
            verdicts[way] = {"verdict": "unknown" if late else "no", "why": error.words or str(error)}
    return verdicts


def profile(name: str, options: argparse.Namespace) -> int:
    """Writes the Chrome trace of a settled, co-executed program."""
    plan = Plan(warm_steps=options.warm_steps, settle_s=options.settle, tiny=options.tiny)
    path = options.out.with_name(f"{name}.trace.json").absolute()
    with start(name, COEXEC_KEPT, plan) as child:
        child.ask("warm", steps=plan.warm_steps)
        child.ask("settle", limit_s=plan.settle_s)
        seen = child.ask("timeline", steps=PROFILED_STEPS, path=str(path))
    say(f"wrote {path}: open it in ui.perfetto.dev or chrome://tracing")
    with contextlib.nullcontext() if options.json else contextlib.redirect_stdout(sys.stderr):
        print(json.dumps({"trace": str(path), **seen}))
    return 0


def announce(name: str, entry: dict[str, Any]) -> None:
    """Prints one program's speedups as soon as they are known."""
    if "contenders" not in entry:
        print(f"{name}: {entry.get('missing') or entry.get('failed')}", flush=True)
        return
    print(f"{name}: eager {entry['contenders'][EAGER]['median_ms']:.1f} ms", flush=True)
    for other in entry["contenders"]:
        if other != EAGER:
            print(f"  {other:<18} {ratio(entry, other)}", flush=True)


def summarise(result: dict[str, Any]) -> None:
    """Prints what failed, at the end, where it is seen."""
    for entry in result["programs"].values():
        for problem in entry.get("problems", {}).values():
            print(f"  {problem}")


def say(text: str) -> None:
    """Progress goes to stderr: stdout holds the result alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
