"""`import coexec` must not import torch (the command line starts without it), but has something to do once torch is
there, before the program's next line captures one of its functions (`from torch import tensor`); and once TorchDynamo's
list of backends is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def after_torch_is_imported(action: Callable[[], object]) -> None:
    """Calls `action` now if torch is there, otherwise right after its import."""
    after_import("torch", action)


def after_import(name: str, action: Callable[[], object]) -> None:
    """Calls `action` now if the module `name` is there, otherwise right after its import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Looks out for the import of a module, once, and leaves it to the other finders."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._action)
        return spec


class _Then(Loader):
    """A loader that calls `action` after the module has been executed."""

    def __init__(self, loader: Any, action: Callable[[], object]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # As if we had never been there: torch's own code asks the loader of its module for files.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action()
