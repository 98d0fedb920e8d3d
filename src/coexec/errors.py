"""What coexec raises: the user's mistakes, what the machine lacks, and our own bugs are three different branches.

A user's mistake also derives from the built-in class that plain Python would raise there (TypeError, ValueError), so
existing `except` clauses keep working. Every message names the value and the next thing to try.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ISSUE_HINT = "This is a bug in coexec, not in your program. COEXEC_DISABLE=1 runs the program without it."


class CoexecError(Exception):
    """Base of everything that coexec raises on its own account (a step's own exceptions pass through unchanged)."""


# The user's mistakes ------------------------------------------------------------------------------------------------


class UsageError(CoexecError):
    """The caller asked for something that has no meaning; nothing was changed."""


class NotCallableError(UsageError, TypeError):
    """`coexec.compile()` got something that cannot be called."""

    def __init__(self, value: object) -> None:
        hint = ""
        if value is not None and not isinstance(value, (str, bytes, int, float)):
            hint = " If it is the result of a call, pass the function itself: coexec.compile(step), not (step())."
        super().__init__(
            f"coexec.compile() needs a function, a method or an nn.Module, got {type(value).__name__}: {value!r:.80}."
            f"{hint} For a loop body that is no function use `with coexec.step():`."
        )


class NotAStepError(UsageError, TypeError):
    """`coexec.compile()` got a callable whose work is not done when its call returns; `kind` says what it is."""

    def __init__(self, value: object, kind: str) -> None:
        name = getattr(value, "__qualname__", repr(value))
        super().__init__(f"coexec.compile() cannot make a step of the {kind} {name!r}: {_NO_STEP[kind]}")
        self.kind = kind


_NO_STEP = {
    "class": "calling it only makes an object. Compile an object, coexec.compile(Model()), or decorate a method.",
    "async function": "its body runs after the call has returned. Compile the plain function that does the tensor work "
    "and call it from there, or put `with coexec.step():` around a part that awaits nothing.",
    "generator function": "its body runs after the call has returned. Compile the plain function that does the work "
    "between two yields, or put `with coexec.step():` around the loop body that takes the values.",
}


class NotANameError(UsageError, TypeError):
    """`coexec.step()` got something else than text as its name."""

    def __init__(self, value: object) -> None:
        super().__init__(
            f"coexec.step() takes a name for reports, got {type(value).__name__}: {value!r:.80}. It goes around a loop "
            f"body, `with coexec.step():`; a function is compiled by `@coexec.compile`."
        )


class NotATensorError(UsageError, TypeError):
    """`coexec.materialize()` got something else than a tensor."""

    def __init__(self, value: object) -> None:
        super().__init__(
            f"coexec.materialize() takes a tensor, got {type(value).__name__}: {value!r:.80}. Call it for each tensor "
            f"that native code is to read."
        )


class UnknownOptionError(UsageError, TypeError):
    """An option name that does not exist."""

    def __init__(self, name: str, valid: Iterable[str]) -> None:
        names = sorted(valid)
        super().__init__(f"Unknown option {name!r}.{did_you_mean(name, names)} Valid options: {', '.join(names)}.")
        self.name = name


class OptionValueError(UsageError, ValueError):
    """An option or an environment variable has a value outside its domain."""

    def __init__(self, option: str, value: object, valid: Iterable[object]) -> None:
        choices = [repr(choice) if isinstance(choice, str) else str(choice) for choice in valid]
        plain = [choice.strip("'") for choice in choices]
        guess = did_you_mean(value, plain) if isinstance(value, str) else ""
        super().__init__(f"{option}={value!r} is not valid.{guess} Valid: {', '.join(choices)}.")
        self.option, self.value = option, value


class ConflictingOptionsError(UsageError, ValueError):
    """Two options that exclude each other."""


class ReentrantStepError(UsageError, RuntimeError):
    """A step was called while the same step is running on the same thread."""

    def __init__(self, step: str) -> None:
        super().__init__(
            f"Step {step!r} was called from inside itself. A step is one iteration and has one graph: decorate the "
            f"outermost function only, or move the recursion into an undecorated function that the step calls."
        )


class NothingRecordedError(UsageError, RuntimeError):
    """`step.timeline()` before a call was co-executed."""

    def __init__(self, step: str, phase: str) -> None:
        super().__init__(
            f"Step {step!r} has no co-executed call to draw yet (its phase: {phase}). Call it a few times more; "
            f"explain() says what keeps it from co-execution."
        )


# What the machine or the environment lacks --------------------------------------------------------------------------


class MachineError(CoexecError):
    """Something is missing here, so coexec cannot run; the user's step still runs as plain eager PyTorch."""


class UnsupportedTorchError(MachineError, RuntimeError):
    """This torch cannot be intercepted: another version, or the dispatch key is taken."""


class CacheFolderError(MachineError, OSError):
    """The cache folder cannot be used, or is not private enough to load native code from."""

    def __init__(self, folder: object, reason: str) -> None:
        super().__init__(f"The cache folder {folder} {reason}. Set COEXEC_CACHE_DIR to a private, writable folder.")


class NativeBuildError(MachineError, RuntimeError):
    """The native core could not be built. `missing` names the tool (`g++`, `Python.h`), or is empty."""

    def __init__(self, message: str, *, missing: str = "", log: str = "") -> None:
        super().__init__(message)
        self.missing = missing
        self.log = log  # path of the compiler's output, or empty


# Our bugs -----------------------------------------------------------------------------------------------------------


class InternalError(CoexecError, AssertionError):
    """An invariant of coexec does not hold."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} {ISSUE_HINT}")


def did_you_mean(value: object, valid: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the nearest valid name, or "" if none is near."""
    near = difflib.get_close_matches(str(value), list(valid), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
