"""`coexec bench`: the repository's fifteen training programs under eager, torch.compile and coexec.

The programs are in the repository, not in the package: the command finds a checkout, and runs its `benchmarks.contest`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from coexec.cli.parameters import Duration, Names, json_option

MODULE = "benchmarks.contest"


@click.command()
@click.argument("programs", nargs=-1)
@click.option("--contenders", type=Names(), help="Only these, separated by commas; eager is always one.")
@click.option("--rounds", type=click.IntRange(min=2), help="Rounds of turns; default 10.")
@click.option("--turn-steps", type=click.IntRange(min=1), help="Steps of a turn; default 10.")
@click.option("--warm-steps", type=click.IntRange(min=1), help="Steps before the first turn; default 100.")
@click.option("--settle", type=Duration(), help="How long coexec may compile beside its steps; default 5m.")
@click.option("--budget", type=Duration(), help="For all of it: what there is no time for is left out.")
@click.option("--resume", is_flag=True, help="Go on with the programs that --out lacks, if nothing has changed since.")
@click.option("--no-convert", is_flag=True, help="Leave out fullgraph=True, torch.export and TorchScript.")
@click.option("--tiny", is_flag=True, help="The tests' sizes: to try the command, not to measure.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where the JSON goes.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Also render this Markdown page.")
@click.option("--profile", metavar="PROGRAM", help="Only write a Chrome trace of this program's steps.")
@json_option
def bench(programs: tuple[str, ...], as_json: bool, **options: object) -> int:
    """Train fifteen programs under eager, every way of torch.compile, and coexec; compare speed, memory and results.

    Runs in a checkout of the repository, from anywhere in it. PROGRAMS are names as in benchmarks/programs; default:
    all, which takes hours. Exit status 1 if a program does not run even eagerly.

    \b
    Examples:
      coexec bench gpt2 bert_qa --page docs/programs.md
      coexec bench --budget 40m --rounds 6
      coexec bench --resume --out out/programs.json
      coexec bench --profile gpt2
    """
    root = checkout()
    if root is None:
        raise click.ClickException(
            f"no checkout of the repository above {Path.cwd()}: the programs are not in the installed package; "
            "clone the repository and run the command in it"
        )
    words = [*programs, *_words(options), *(["--json"] if as_json else [])]
    path = os.pathsep.join([str(root), str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-m", MODULE, *words], env={**os.environ, "PYTHONPATH": path}).returncode


def checkout() -> Path | None:
    """Returns the repository that the current folder is in, or else the one that this file is in; None if neither."""
    here = [Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents]
    return next((folder for folder in here if (folder / "benchmarks" / "contest" / "__main__.py").exists()), None)


def _words(options: dict[str, object]) -> Iterator[str]:
    """The options that were given, as the module's command line has them."""
    for name, value in options.items():
        word = "--" + name.replace("_", "-")
        if value is True:
            yield word
        elif value not in (None, False):
            yield f"{word}={','.join(value) if isinstance(value, tuple) else value}"
