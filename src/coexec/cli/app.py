"""The command's root: what there is to run, and how each way of ending becomes an exit status.

The libraries behind a command are imported inside it: `coexec --help` and `coexec db list` start without torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence

import click

from coexec import __version__
from coexec.cli.bench import bench
from coexec.cli.db import db
from coexec.cli.db_key import key
from coexec.cli.db_show import show
from coexec.cli.doctor import doctor
from coexec.cli.recheck import recheck
from coexec.cli.report import report
from coexec.cli.tune import tune
from coexec.errors import CoexecError, UsageError

OK, PROBLEM, USAGE = 0, 1, 2
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="coexec")
def coexec() -> None:
    """Imperative-symbolic co-execution for PyTorch: look after its database and its tuner.

    Every command takes --json. Exit status: 0 fine, 1 a problem was found, 2 wrong usage.

    \b
    Examples:
      coexec doctor
      coexec db list
      coexec tune --budget 30m
    """


for part in (show, key):
    db.add_command(part)
for command in (doctor, db, tune, recheck, report, bench):
    coexec.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status (128 + the signal's number after Ctrl-C and for a closed pipe)."""
    _write_what_the_terminal_cannot()
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        return _pipe_closed()
    return status


def _run(arguments: Sequence[str] | None) -> int:
    """Not through click's own `main`: that one turns a closed pipe into status 1, which says "a problem was found"."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with coexec.make_context("coexec", words) as context:
            result = coexec.invoke(context)
    except click.exceptions.Exit as exit_:
        return int(exit_.exit_code)
    except (click.Abort, KeyboardInterrupt, EOFError):
        return INTERRUPTED
    except click.ClickException as error:
        error.show(sys.stderr)
        return USAGE if isinstance(error, click.UsageError) else PROBLEM
    except CoexecError as error:
        _complain(error)
        return USAGE if isinstance(error, UsageError) else PROBLEM
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        _complain(error)
        return PROBLEM
    return result if isinstance(result, int) else OK


def _complain(error: Exception) -> None:
    click.echo(f"Error: {error}", err=True)


def _write_what_the_terminal_cannot() -> None:
    """Notes and paths hold any character; an ASCII terminal or pipe gets an escape in its place, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _pipe_closed() -> int:
    """The reader (`| head`) has seen enough. Python would complain once more when it flushes stdout at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
