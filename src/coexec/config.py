"""Every option and every environment variable of coexec, declared once; nothing else reads `os.environ`.

`Options` holds what `coexec.compile()` and `coexec.step()` take. `Settings` holds what belongs to the process; it is
read from the environment at each use, so that a test or a notebook may change a variable at any time.

`python -m coexec.config` prints the list.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coexec.errors import CacheFolderError, ConflictingOptionsError, OptionValueError, UnknownOptionError

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("", "0", "false", "no", "off")


def _declare(default: Any, help_text: str, *, choices: tuple[Any, ...] = (), env: str = "") -> Any:
    """Declares one dataclass field as an option.

    Args:
        default: the value if nobody says anything.
        help_text: one line for `python -m coexec.config` and the docs.
        choices: the valid values; empty if any value of the type is valid.
        env: the environment variable that replaces the default.
    """
    metadata = {"help": help_text, "choices": choices, "env": env}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one step. Build it with :func:`make_options`, which validates."""

    backend: str = _declare(
        "auto",
        "executor of the compiled segments; 'auto' compiles with Inductor and keeps whatever is right and fastest",
        choices=("auto", "replay", "inductor"),
        env="COEXEC_BACKEND",
    )
    numerics: str = _declare(
        "fast",
        "'fast' may differ from eager by rounding; 'exact' is bit-identical and uses 'replay' only",
        choices=("fast", "exact"),
        env="COEXEC_NUMERICS",
    )
    dynamic: bool | None = _declare(
        None,
        "compile with symbolic sizes: None once a second size is seen, True also instead of code for one size, False "
        "never (code for the most frequent sizes instead)",
        choices=(None, True, False),
    )
    mode: str = _declare(
        "coexec",
        "'coexec' runs graph and Python at once; 'lazy' starts the graph when Python needs a value; 'eager' is plain",
        choices=("coexec", "lazy", "eager"),
        env="COEXEC_MODE",
    )
    overlap: bool = _declare(
        False,
        "True: a call may return while its graph still runs; what needs one of its results waits, and its errors come "
        "there",
        choices=(True, False),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the process, one environment variable each."""

    disable: bool = _declare(
        False,
        "1 turns coexec off: every step is the plain function, and `backend='coexec'` runs Dynamo's graphs as they are",
        env="COEXEC_DISABLE",
    )
    cache_dir: Path = _declare(
        Path("~/.cache/coexec"),
        "folder of the native core, of compiled artifacts and of the database; it is created with mode 0700. With "
        "XDG_CACHE_HOME its default lies there",
        env="COEXEC_CACHE_DIR",
    )
    store: str = _declare(
        "",
        "SQLAlchemy URL of the subgraph database; empty: an SQLite file in the cache folder",
        env="COEXEC_STORE",
    )
    debug: int = _declare(
        0,
        "0 quiet; 1 phase changes and fallbacks on stderr; 2 also checks every trace, TraceGraph and plan, to look for "
        "bugs in coexec",
        choices=(0, 1, 2),
        env="COEXEC_DEBUG",
    )
    cxx: str = _declare("", "the C++ compiler; empty: the first of g++, c++, clang++", env="CXX")
    keep: bool = _declare(
        False,
        "1 keeps a step in co-execution, and a module on what was chosen for it, even where plain eager was "
        "measured to be faster",
        env="COEXEC_KEEP",
    )
    quiet: bool = _declare(False, "1 leaves out the line that says the native core is being built", env="COEXEC_QUIET")
    sanitize: str = _declare(
        "",
        "builds the native core with sanitizers, to look for bugs in it; such a core loads only where the sanitizer's "
        "runtime is preloaded (`make asan` does that)",
        choices=("", "address", "undefined", "address,undefined"),
        env="COEXEC_SANITIZE",
    )


_DISABLE = next(field for field in dataclasses.fields(Settings) if field.name == "disable")


def make_options(**given: Any) -> Options:
    """Returns validated options.

    A value equal to the option's default is replaced by the option's environment variable, so that
    `COEXEC_MODE=eager python train.py` needs no edit; a value that differs from the default wins.

    Raises:
        UnknownOptionError: a name that is no option; the message lists the valid ones.
        OptionValueError: a value outside the option's domain.
        ConflictingOptionsError: `numerics="exact"` with a backend that compiles.
    """
    fields = {field.name: field for field in dataclasses.fields(Options)}
    for name in given:
        if name not in fields:
            raise UnknownOptionError(name, fields)
    values = {name: _option_value(field, given) for name, field in fields.items()}
    options = Options(**values)
    if options.numerics == "exact" and options.backend not in ("auto", "replay"):
        raise ConflictingOptionsError(
            f"numerics='exact' is bit-identical to eager, which backend={options.backend!r} is not: leave backend at "
            f"'auto' (it will use 'replay'), or use numerics='fast'."
        )
    return options


def settings() -> Settings:
    """Returns the settings of the process as the environment says now.

    Raises:
        OptionValueError: a variable has a value outside its domain.
    """
    values = {field.name: _from_environment(field) for field in dataclasses.fields(Settings)}
    return Settings(**{name: value for name, value in values.items() if value is not None})


def disabled() -> bool:
    """Returns whether COEXEC_DISABLE turns everything off. Asked at each call of a step, so only this one is read."""
    return bool(_from_environment(_DISABLE))


def debug_level() -> int:
    """Returns COEXEC_DEBUG, 0 to 2."""
    return settings().debug


def cache_dir() -> Path:
    """Returns the cache folder, expanded and absolute; it may not exist yet.

    `COEXEC_CACHE_DIR` first, then `$XDG_CACHE_HOME/coexec`, then `~/.cache/coexec`.
    """
    if not os.environ.get("COEXEC_CACHE_DIR") and (base := os.environ.get("XDG_CACHE_HOME")):
        return Path(base, "coexec").expanduser().absolute()
    return settings().cache_dir.expanduser().absolute()


def private_cache_dir(name: str) -> Path:
    """Returns the folder `name` of the cache, created with mode 0700: what lies in it is loaded as native code.

    Raises:
        CacheFolderError: it or the cache folder itself cannot be created, belongs to somebody else, or can be written
            by others.
    """
    folder = cache_dir() / name
    for private in (folder.parent, folder):  # who may write to the outer one can put another in the place of the inner
        _make_private(private)
    return folder


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise CacheFolderError(folder, f"cannot be used ({error.strerror})") from error
    if facts.st_uid not in (os.geteuid(), 0):
        raise CacheFolderError(folder, f"belongs to user id {facts.st_uid}, not to you ({os.geteuid()})")
    if facts.st_mode & 0o022:
        reason = f"can be written by others (mode {facts.st_mode & 0o777:o}; `chmod go-w {folder}` makes it private)"
        raise CacheFolderError(folder, reason)


def describe() -> str:
    """Returns one paragraph per option and variable: name, default, domain, help."""
    lines = ["Options of coexec.compile() and coexec.step():"]
    lines += [_describe_field(field, field.name) for field in dataclasses.fields(Options)]
    lines += ["", "Environment variables, read at each use:"]
    lines += [_describe_field(field, field.metadata["env"]) for field in dataclasses.fields(Settings)]
    return "\n".join(lines)


def _option_value(field: dataclasses.Field[Any], given: Mapping[str, Any]) -> Any:
    value = given.get(field.name, field.default)
    _check_choice(field.name, value, field.metadata["choices"])
    if value == field.default and (from_env := _from_environment(field)) is not None:
        return from_env
    return value


def _from_environment(field: dataclasses.Field[Any]) -> Any:
    """The parsed value of the field's variable, or None if it has no variable or the variable is unset."""
    env = field.metadata["env"]
    text = os.environ.get(env) if env else None
    if text is None:
        return None
    value = _parse(env, text.strip(), type(field.default))
    if value is not None:
        _check_choice(env, value, field.metadata["choices"])
    return value


def _parse(env: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() in TRUE_WORDS:
            return True
        if text.lower() in FALSE_WORDS:
            return False
        raise OptionValueError(env, text, (*TRUE_WORDS, *FALSE_WORDS[1:]))
    if not text:
        return None  # `VARIABLE= command` means unset, as for most programs
    if kind is int:
        if not text.isdecimal():
            raise OptionValueError(env, text, ("a whole number",))
        return int(text)
    return kind(text)


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    # Types are compared too: 1 == True, and overlap=1 would make a second key for the same artifact.
    if choices and not any(value == choice and type(value) is type(choice) for choice in choices):
        raise OptionValueError(name, value, choices)


def _describe_field(field: dataclasses.Field[Any], title: str) -> str:
    meta = field.metadata
    facts = [f"default {str(field.default)!r}" if isinstance(field.default, Path) else f"default {field.default!r}"]
    if meta["choices"]:
        facts.append("one of " + ", ".join(repr(choice) for choice in meta["choices"]))
    if meta["env"] and meta["env"] != title:
        facts.append(f"{meta['env']} replaces the default")
    return f"  {title}\n      {meta['help']}\n      ({'; '.join(facts)})"


def _print_described() -> None:
    """To stdout; a reader that has seen enough (`| head`) is no error, also not when Python flushes at exit."""
    try:
        print(describe(), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    _print_described()
