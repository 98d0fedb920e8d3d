"""Hashes of code: Python functions and classes (with what they call), and the code behind a custom op.

pytorch issue 144344 is the reason: a compiled graph was reused after the Python of a custom op in it had changed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from coexec.subgraphs.errors import UnkeyableGraphError

BUILTIN_NAMESPACES = frozenset(
    ("aten", "prims", "prim", "rngprims", "debugprims", "inductor", "profiler", "streams")
    + ("quantized", "quantized_decomposed", "mkldnn", "mkl", "onednn")
    + ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
)
"""Op namespaces that ship with torch: its version in the environment covers their code."""

_VERSIONED_ROOTS = frozenset({"torch", "numpy", "sympy", "scipy"})
_declared: dict[str, str] = {}
_REGISTERED_AT = re.compile(r"registered at (.+?):\d+")


def declare_op_code(op: str, version: str) -> None:
    """Vouch for the code of a custom op that cannot be found, for example C++ loaded by a Python extension module.

    `op` is "namespace::name"; change `version` whenever the op may compute something else.
    """
    _declared[op] = version


def is_custom(op: str) -> bool:
    """Whether "namespace::name" is code that does not come with torch."""
    return op.split("::")[0] not in BUILTIN_NAMESPACES


def callable_hash(target: Callable[..., Any]) -> str:
    """SHA-256 of a Python function, method, partial or class, and of the plain functions it refers to.

    Line numbers and file names do not count. Errors: UnkeyableGraphError for native code.
    """
    digest = hashlib.sha256()
    for part in _parts(target, seen=set()):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def op_code_hash(op: str) -> str:
    """SHA-256 of the code behind custom op "namespace::name".

    Looks at, in this order: :func:`declare_op_code`, `torch.library.custom_op` definitions, the Python files that
    registered kernels, libraries loaded by `torch.ops.load_library`, the installed distribution named like the
    namespace. Errors: UnkeyableGraphError if none knows the op: then nothing about the graph may be cached.
    """
    for source in (_declared_code, _custom_op_definition, _registered_code):
        found = source(op)
        if found:
            return hashlib.sha256(found.encode()).hexdigest()
    raise UnkeyableGraphError(
        f"cannot find the code of custom op {op}, so a change of it would go unseen; "
        f"call coexec.subgraphs.code_hash.declare_op_code({op!r}, version)"
    )


def _declared_code(op: str) -> str | None:
    version = _declared.get(op)
    return None if version is None else f"declared {version}"


def _custom_op_definition(op: str) -> str | None:
    from torch._library.custom_ops import OPDEFS  # private, but the only table of these; same place in 2.8 and 2.13

    definition = OPDEFS.get(op)
    if definition is None:
        return None
    hashes = [f"{name}={callable_hash(function)}" for name, function in _definition_functions(vars(definition))]
    return "\n".join([str(definition._schema), *sorted(hashes)])


def _definition_functions(attributes: dict[str, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in attributes.items():
        if isinstance(value, types.FunctionType):
            yield name, value
        elif isinstance(value, dict):
            for key, function in value.items():
                if isinstance(function, types.FunctionType) and not _is_versioned(function.__module__):
                    yield f"{name}[{key}]", function


def _registered_code(op: str) -> str | None:
    try:
        dump = torch._C._dispatch_dump(op)
    except RuntimeError:
        return None
    files = {path for path in _REGISTERED_AT.findall(dump) if not _is_torch_file(path)}
    python = sorted(path for path in files if path.endswith(".py") and Path(path).is_file())
    if files and len(python) == len(files):
        return "\n".join(_file_hash(path) for path in python)
    libraries = [_file_hash(str(path)) for path in sorted(torch.ops.loaded_libraries)]
    version = _distribution_version(op.split("::")[0])
    return "\n".join([*libraries, version]) if libraries or version else None


def _is_torch_file(path: str) -> bool:
    return path.startswith(str(Path(torch.__file__).parent)) or path == "/dev/null"


def _distribution_version(namespace: str) -> str:
    try:
        return f"{namespace} {importlib.metadata.version(namespace)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _file_hash(path: str) -> str:
    status = Path(path).stat()
    return _file_hash_of(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)
def _file_hash_of(path: str, _mtime_ns: int, _size: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _parts(target: object, seen: set[int]) -> Iterator[str]:
    """Text pieces that change when the code of `target`, or of something it calls, changes."""
    if id(target) in seen:
        return
    seen.add(id(target))
    if isinstance(target, functools.partial):
        yield f"partial {_constant(target.args)} {_constant(tuple(sorted(target.keywords.items())))}"
        yield from _parts(target.func, seen)
    elif isinstance(target, types.MethodType):
        yield from _parts(target.__func__, seen)
    elif isinstance(target, types.FunctionType):
        yield from _function_parts(target, seen)
    elif isinstance(target, type):
        yield from _class_parts(target, seen)
    else:
        raise UnkeyableGraphError(
            f"cannot hash the code of {target!r:.120}: it is no Python function; wrap it in a torch.library.custom_op"
        )


def _function_parts(function: types.FunctionType, seen: set[int]) -> Iterator[str]:
    yield from _code_parts(function.__code__)
    yield f"defaults {_constant(function.__defaults__)} {_constant(function.__kwdefaults__)}"
    yield from _referred_parts(_closure_values(function), seen)
    yield from _referred_parts(_global_values(function), seen)


def _code_parts(code: types.CodeType) -> Iterator[str]:
    yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_argcount} {code.co_flags}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_parts(constant)
        else:
            yield f"constant {_constant(constant)}"


def _closure_values(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell: the name is not bound yet
            yield name, None


def _global_values(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    names = _all_names(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType) and not _is_versioned(value.__name__):
            for attribute in sorted(names & vars(value).keys()):
                yield f"{name}.{attribute}", vars(value)[attribute]


def _all_names(code: types.CodeType) -> set[str]:
    nested = [_all_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*nested)


def _referred_parts(values: Iterator[tuple[str, object]], seen: set[int]) -> Iterator[str]:
    """Functions are followed, plain constants spelled; other objects count by type only (they are state, not code)."""
    for name, value in values:
        if isinstance(value, types.FunctionType | type | types.MethodType | functools.partial):
            if not _is_versioned(getattr(value, "__module__", None) or ""):
                yield f"refers {name}"
                yield from _parts(value, seen)
        elif not isinstance(value, types.ModuleType):
            yield f"value {name} {_constant(value)}"


def _class_parts(cls: type, seen: set[int]) -> Iterator[str]:
    for base in cls.__mro__:
        if _is_versioned(base.__module__):
            continue
        yield f"class {base.__qualname__}"
        for name, value in sorted(vars(base).items()):
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if isinstance(inner, types.FunctionType):
                yield f"method {name}"
                yield from _parts(inner, seen)


def _is_versioned(module: str) -> bool:
    """Whether the environment's versions (Python, torch, numpy) already cover the code of this module."""
    root = module.split(".")[0]
    return root in _VERSIONED_ROOTS or root in sys.stdlib_module_names


def _constant(value: object) -> str:
    """A spelling without addresses and without the order of sets, which changes with every process."""
    if isinstance(value, frozenset | set):
        return "{" + ", ".join(sorted(_constant(item) for item in value)) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_constant(item) for item in value) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_constant(k)}: {_constant(v)}" for k, v in value.items())) + "}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes) or value is Ellipsis:
        return repr(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
