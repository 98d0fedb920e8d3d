"""coexec: run any PyTorch program as it was written, at the speed of one compiled graph."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from coexec.torch_import import after_import, after_torch_is_imported

if TYPE_CHECKING:
    from coexec.api import CoExecModule, CoExecutable, compile, materialize, reset, step

__all__ = ["CoExecModule", "CoExecutable", "compile", "materialize", "reset", "step"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The public names on first use (PEP 562): the command line and a store's tools start without importing torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("coexec.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _install_wrappers() -> None:
    from coexec.intercept.wrappers import install_wrappers

    install_wrappers()


DYNAMO_REGISTRY = "torch._dynamo.backends.registry"


def _register_backend() -> None:
    """`torch.compile(backend="coexec")` from a checkout on PYTHONPATH, which has no entry point installed."""
    from importlib.metadata import EntryPoint

    known: dict[str, EntryPoint | None] = getattr(sys.modules[DYNAMO_REGISTRY], "_BACKENDS", {})
    known.setdefault("coexec", EntryPoint("coexec", "coexec.dynamo_backend:coexec_backend", "torch_dynamo_backends"))


# Not when the first step runs: programs capture functions (`from torch import tensor`) right after their imports.
after_torch_is_imported(_install_wrappers)
after_import(DYNAMO_REGISTRY, _register_backend)
