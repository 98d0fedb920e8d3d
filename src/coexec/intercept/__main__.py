"""`python -m coexec.intercept` builds the native core now and prints the result as one JSON line.

Run it while building a container image, so that no process has to build later. It is also the child process of
`start_background_build`, which passes `--parent`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from coexec.errors import CacheFolderError, NativeBuildError
from coexec.intercept.guard import stand_guard


def main(arguments: list[str] | None = None) -> int:
    """Builds in this process; ends early when the parent is gone. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m coexec.intercept", description="Builds coexec's native core.")
    parser.add_argument("--sources", type=Path, help="folder of the C++ files")
    parser.add_argument("--parent", type=int, help="end when this is no longer the parent, and say nothing on stderr")
    options = parser.parse_args(arguments)
    parent = options.parent or os.getppid()
    if options.parent is not None:
        stand_guard(parent)
    from coexec.intercept.compile_core import SOURCES, build  # imports torch: the guard need not be so large

    # As an exception, so that the compiler is ended too. SIGHUP: the kernel sends it to a stopped group without parent.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _give_up)
    try:
        path = build(options.parent is None, options.sources or SOURCES, should_stop=lambda: os.getppid() != parent)
    except NativeBuildError as error:
        return _print_result({"error": str(error), "missing": error.missing, "log": error.log})
    except CacheFolderError as error:
        return _print_result({"error": str(error)})
    return _print_result({"path": str(path)})


def _give_up(number: int, _frame: object) -> None:
    for other in (signal.SIGTERM, signal.SIGHUP):  # the guard and the kernel may both say so: once is enough
        signal.signal(other, signal.SIG_IGN)
    sys.exit(1)


def _print_result(result: dict[str, str]) -> int:
    print(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
