"""`coexec db`: what the store holds, and looking after it.

Only what asks about this environment imports torch: `show --why`, `list --undecided`, and `stats` where something could
wait for the tuner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from coexec.cli import quantities
from coexec.cli.output import print_entries, print_json, print_line, print_table
from coexec.cli.parameters import ByteSize, Duration, json_option

if TYPE_CHECKING:
    from coexec.subgraphs.entries import Decision, SubgraphInfo
    from coexec.subgraphs.store import Store
    from coexec.subgraphs.transfer import TransferReport
    from coexec.subgraphs.verify import VerifyReport

SHOWN = 16  # digits of a digest: enough to be unique, and what `db show` takes


@click.group()
def db() -> None:
    """List, check, shrink and exchange what was compiled and tuned.

    The store is that of COEXEC_STORE, or an SQLite file in the cache folder.

    \b
    Example:
      coexec db list
    """


def strict_store() -> Store:
    """The store of the settings; a tool wants its errors."""
    from coexec.subgraphs.store import open_store

    return open_store(strict=True)


def serving_store() -> Store:
    """The same one: damaged and untrusted entries are left out, and one warning on stderr says so."""
    from coexec.subgraphs.store import open_store

    return open_store()


def readable_decisions(subgraph: str | None = None) -> tuple[Decision, ...]:
    """Decisions that are intact and trusted."""
    return serving_store().decisions(subgraph)


def no_such_subgraph(beginning: str) -> click.UsageError:
    """The error where no stored digest begins so."""
    return click.UsageError(f"no subgraph begins with {beginning!r}; `coexec db list` names them")


# Reading -------------------------------------------------------------------------------------------------------------


@db.command("list")
@click.option("--undecided", is_flag=True, help="Only what `coexec tune` would work on here, in its order.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many.")
@json_option
def list_(undecided: bool, limit: int | None, as_json: bool) -> None:
    """List subgraphs, last used first, with the backend that was chosen for each.

    A segment of co-execution that nobody has tuned has the backend coexec-segment and no speedup.

    \b
    Example:
      coexec db list --undecided
    """
    from coexec.report.store_report import tuning_queue

    found = strict_store().subgraphs()
    chosen: dict[str, list[Decision]] = {}
    for decision in readable_decisions():
        chosen.setdefault(decision.subgraph, []).append(decision)
    if undecided:
        known = {info.digest: info for info in found}
        found = tuple(known[digest] for digest in tuning_queue(serving_store())[0] if digest in known)
    infos = found[:limit]
    if as_json:
        print_json([_listed(info, chosen.get(info.digest, [])) for info in infos])
        return
    columns = ("subgraph", "ops", "backend", "speedup", "used", "note")
    rows = [_list_row(info, chosen.get(info.digest, [])) for info in infos]
    print_table(columns, rows, right=("ops", "speedup"))


def _listed(info: SubgraphInfo, decisions: Iterable[Decision]) -> dict[str, object]:
    return {
        "digest": info.digest,
        "n_ops": info.n_ops,
        "note": info.note,
        "has_program": bool(info.program),
        "created_s": info.created_s,
        "used_s": info.used_s,
        "run_s": info.run_s,
        "runs": info.runs,
        "decisions": list(decisions),
    }


def _list_row(info: SubgraphInfo, decisions: list[Decision]) -> tuple[object, ...]:
    """With several decisions (environments, size classes) the backends are named and the speedups are a range."""
    backends = ", ".join(sorted({decision.backend for decision in decisions}))
    speedups = sorted({f"{decision.speedup:.2f}x" for decision in decisions if decision.speedup is not None})
    shown = f"{speedups[0]}..{speedups[-1]}" if len(speedups) > 1 else "".join(speedups)
    return info.digest[:SHOWN], info.n_ops, backends or None, shown or None, quantities.age(info.used_s), info.note


@db.command()
@json_option
def stats(as_json: bool) -> None:
    """Count what is in the store.

    \b
    Example:
      coexec db stats --json
    """
    from coexec.report.store_report import is_tuned, tuning_queue

    found = strict_store().stats()
    assert found is not None, "a strict store raises instead"
    waiting, tuned = len(tuning_queue(serving_store())[0]), {d.subgraph for d in readable_decisions() if is_tuned(d)}
    if as_json:
        print_json({**asdict(found), "tuned": len(tuned), "waiting": waiting})
        return
    print_entries(
        {
            "store": found.url,
            "schema": found.schema,
            "subgraphs": f"{found.subgraphs}, {len(tuned)} tuned, {waiting} wait for `coexec tune` here",
            "environments": found.environments,
            "measurements": found.measurements,
            "decisions": ", ".join(f"{name} {number}" for name, number in found.backends.items()) or found.decisions,
            "artifacts": f"{found.artifacts}, {quantities.size(found.artifact_bytes)}",
            "database": quantities.size(found.database_bytes),
        }
    )


# Looking after it ----------------------------------------------------------------------------------------------------


@db.command()
@click.option("--unused", "unused_s", type=Duration(), help="Delete what was not used for so long, as in 30d.")
@click.option("--max-bytes", type=ByteSize(), help="Then delete the longest unused artifacts above this size.")
@json_option
def prune(unused_s: float | None, max_bytes: int | None, as_json: bool) -> None:
    """Make the store smaller.

    Without options only what nothing refers to goes. A decision whose artifacts go keeps its backend and options, from
    which they are built anew.

    \b
    Example:
      coexec db prune --unused 90d --max-bytes 2G
    """
    report = strict_store().prune(unused_s=unused_s, max_bytes=max_bytes)
    assert report is not None, "a strict store raises instead"
    if as_json:
        print_json(report)
        return
    print_line(
        f"Deleted {report.subgraphs} subgraphs, {report.decisions} decisions, {report.measurements} measurements, "
        f"{report.artifacts} artifacts ({quantities.size(report.artifact_bytes)}) and {report.leftovers} leftovers."
    )


@db.command()
@click.option("--repair", is_flag=True, help="Remove what is damaged; a broken database file is set aside.")
@json_option
def verify(repair: bool, as_json: bool) -> int:
    """Check every row, checksum and signature.

    Exit status 1 if something is wrong and was not repaired. What is removed is compiled and tuned anew when it is
    needed again.

    \b
    Example:
      coexec db verify --repair
    """
    report = strict_store().verify(repair=repair)
    assert report is not None, "a strict store raises instead"
    if as_json:
        print_json({"ok": report.ok, "checked": report.checked, "problems": report.problems})
    else:
        _print_verified(report)
    return 0 if all(problem.repaired for problem in report.problems) else 1


def _print_verified(report: VerifyReport) -> None:
    if report.problems:
        columns = ("kind", "what", "problem", "repaired")
        rows = [
            (problem.kind, problem.identity[:64], problem.message, "yes" if problem.repaired else "no")
            for problem in report.problems
        ]
        print_table(columns, rows)
    print_line(f"Checked {report.checked}, found {len(report.problems)} problems.")
    if any(not problem.repaired for problem in report.problems):
        print_line("`coexec db verify --repair` removes what is damaged.")


# Exchange ------------------------------------------------------------------------------------------------------------


@db.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--environment", metavar="PREFIX", help="Only what belongs to this environment (see `db show`).")
@click.option("--no-artifacts", is_flag=True, help="Decisions only; whoever imports builds the artifacts anew.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@json_option
def export(file: Path, environment: str | None, no_artifacts: bool, force: bool, as_json: bool) -> None:
    """Write the store into one signed FILE, from which a fleet starts warm.

    It is signed with your key, which is made if there is none. Those who import must trust that key: give them what
    `coexec db key` prints.

    \b
    Example:
      coexec db export tuned.coexec
    """
    from coexec.subgraphs.transfer import export_store

    if file.exists() and not force:
        raise click.UsageError(f"{file} exists; --force overwrites it")
    store = strict_store()
    chosen = None if environment is None else _environment_of(store, environment)
    report = export_store(store, file, environment=chosen, artifacts=not no_artifacts)
    _print_transfer("Exported", report, as_json)


@db.command("import")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--overwrite", is_flag=True, help="Replace decisions that this store has already.")
@json_option
def import_(file: Path, overwrite: bool, as_json: bool) -> None:
    """Take over a FILE written by `coexec db export`.

    Nothing is taken unless a trusted key has signed the file and every checksum is right; trust a key with
    `coexec db key --trust`.

    \b
    Example:
      coexec db import tuned.coexec
    """
    from coexec.subgraphs.transfer import import_store

    _print_transfer("Imported", import_store(strict_store(), file, overwrite=overwrite), as_json)


def _environment_of(store: Store, prefix: str) -> str:
    found = [digest for digest in store.environments() if digest.startswith(prefix)]
    if len(found) != 1:
        raise click.UsageError(f"{len(found)} environments begin with {prefix!r}; `coexec db show` names them")
    return found[0]


def _print_transfer(verb: str, report: TransferReport, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    kept = f"; kept {report.kept} decisions that were here already" if report.kept else ""
    print_line(
        f"{verb} {report.subgraphs} subgraphs, {report.decisions} decisions, {report.measurements} measurements and "
        f"{report.artifacts} artifacts ({quantities.size(report.artifact_bytes)}){kept}."
    )
