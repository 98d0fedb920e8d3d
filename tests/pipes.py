"""A command whose reader goes away, as `| head` does."""

from __future__ import annotations

import subprocess


def abandoned(process: subprocess.Popen[str]) -> str:
    """Closes the reading end of a process that waits for a line (`input()`), lets it go on, and returns its stderr.

    Args:
        process: with stdin, stdout and stderr as pipes; it has ended afterwards.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stderr.read()
