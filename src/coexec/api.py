"""The public functions: `compile`, `step`, `materialize`, `reset`. The only file a user reads."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MethodType, TracebackType
from typing import Any, TypeVar, overload

import torch

from coexec.config import Options, disabled, make_options, settings
from coexec.errors import ConflictingOptionsError, NotANameError, NotAStepError, NotATensorError, NotCallableError
from coexec.runtime.dynamo import stay_out_of_dynamo
from coexec.runtime.explain import explain
from coexec.runtime.place import name_of, place_of, short_place
from coexec.runtime.stats import StepStats
from coexec.runtime.step_runner import StepRunner
from coexec.runtime.timeline import write_timeline

F = TypeVar("F", bound=Callable[..., Any])

_live: weakref.WeakSet[CoExecutable] = weakref.WeakSet()


class CoExecutable:
    """A step under co-execution: call it as the function it wraps."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function = function
        self._options = options
        if "torch._dynamo" in sys.modules:
            stay_out_of_dynamo()
        self._runner = StepRunner(name_of(function), options, place_of(function))
        functools.update_wrapper(self, function, updated=())
        _live.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if disabled():
            return self._function(*args, **kwargs)
        return self._runner.call(self._function, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled method stays a method, with stats() and the rest: one program per function, `self` an argument."""
        return self if instance is None else MethodType(self, instance)

    # ------------------------------------------------------------------------------------------------------ asking

    def stats(self) -> StepStats:
        """Returns what the step has done so far, counted."""
        return self._runner.stats()

    def explain(self) -> str:
        """Returns, as text, why the step is in its phase: every fallback, wait and executor with the user's lines."""
        return explain(self._runner)

    def wait_compiled(self, timeout_s: float = 600.0) -> bool:
        """Waits for what is under way in the background: the native core's build, then this step's compilations.

        It calls nothing and starts nothing: a step is compiled a few calls after it has settled, so True also comes
        when there is nothing to wait for (yet). Call the step until `stats().phase` is "co-execution" and a few times
        more, then this; the next call adopts what was compiled. Code that turns out wrong or slower is not used.

        Args:
            timeout_s: seconds.

        Returns:
            Whether nothing is under way any more. False: `timeout_s` passed first, or there will be no native core
            (`explain()` says why).
        """
        return self._runner.wait_compiled(timeout_s)

    @property
    def trace_graph(self) -> Any:
        """The TraceGraph so far: printable, with `.to_dot()`."""
        return self._runner.graph_view()

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes what both runners did when in the latest co-executed calls, up to 10, as a Chrome trace.

        For chrome://tracing or https://ui.perfetto.dev. The waits of the PythonRunner are named by the user's line, the
        work of the GraphRunner by operation or segment (`stats()` has their sums, as in Terra's figure 6).

        Raises:
            NothingRecordedError: no call has been co-executed yet; no file is written.
            OSError: the file cannot be written.
        """
        write_timeline(self._runner, Path(path))

    def reset(self) -> None:
        """Forgets everything learned; the next call starts with tracing."""
        runner, self._runner = self._runner, StepRunner(self._runner.name, self._options, self._runner.place)
        runner.retire()

    # ------------------------------------------------------------------------------- behaving like what is wrapped

    def __getattr__(self, name: str) -> Any:
        if name in ("_function", "_options", "_runner"):  # while unpickling
            raise AttributeError(name)
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return f"<coexec.compile({self._function!r}), {self._runner.phase().value}>"

    def __reduce__(self) -> Any:
        """By name, as functions are, where the name leads here: the name of what is wrapped does too."""
        if _found_by_name(self):
            return self._function.__qualname__
        return (_rebuild, (self._function, self._options))

    def __copy__(self) -> CoExecutable:
        return CoExecutable(self._function, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> CoExecutable:
        return CoExecutable(copy.deepcopy(self._function, memo), self._options)


def _found_by_name(step: CoExecutable) -> bool:
    """Whether importing the module of a decorated function, and looking its name up, finds `step`."""
    found: Any = sys.modules.get(getattr(step._function, "__module__", None) or "")
    for name in getattr(step._function, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is step


def _rebuild(function: Callable[..., Any], options: Options) -> CoExecutable:
    return CoExecutable(function, options)


class CoExecModule(torch.nn.Module):
    """A module whose calls are co-executed; parameters, hooks, mode and state_dict are the wrapped module's."""

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        object.__setattr__(self, "_orig_mod", module)
        object.__setattr__(self, "_step", CoExecutable(module.__call__, options))

    _orig_mod: torch.nn.Module
    _step: CoExecutable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name in _MODULE_OWN or (name.startswith("__") and name not in ("__dict__",)):
            return object.__getattribute__(self, name)
        value = getattr(object.__getattribute__(self, "_orig_mod"), name)
        return _wrapper_for_itself(self, value) if name in _RETURN_THEMSELVES and inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._orig_mod, name)

    def __repr__(self) -> str:
        return repr(self._orig_mod)

    def __reduce__(self) -> Any:
        return (CoExecModule, (self._orig_mod, self._step._options))

    def __deepcopy__(self, memo: dict[int, Any]) -> CoExecModule:
        return CoExecModule(copy.deepcopy(self._orig_mod, memo), self._step._options)

    def __getitem__(self, index: Any) -> Any:
        container: Any = self._orig_mod  # ModuleList, Sequential ...: Python looks these methods up on the type
        return container[index]

    def __len__(self) -> int:
        container: Any = self._orig_mod
        return len(container)

    def __iter__(self) -> Any:
        container: Any = self._orig_mod
        return iter(container)

    def __contains__(self, item: Any) -> bool:
        container: Any = self._orig_mod
        return item in container

    def __bool__(self) -> bool:
        return bool(self._orig_mod)

    def stats(self) -> StepStats:
        """As CoExecutable.stats."""
        step: CoExecutable = self._step
        return step.stats()

    def explain(self) -> str:
        """As CoExecutable.explain."""
        step: CoExecutable = self._step
        return step.explain()

    def wait_compiled(self, timeout_s: float = 600.0) -> bool:
        """As CoExecutable.wait_compiled."""
        step: CoExecutable = self._step
        return step.wait_compiled(timeout_s)

    @property
    def trace_graph(self) -> Any:
        """As CoExecutable.trace_graph."""
        return self._step.trace_graph

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """As CoExecutable.timeline."""
        step: CoExecutable = self._step
        step.timeline(path)


_MODULE_OWN = frozenset({"_orig_mod", "_step", "stats", "explain", "wait_compiled", "trace_graph", "timeline"})

_RETURN_THEMSELVES = frozenset(
    {"apply", "bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "ipu", "mtia", "requires_grad_"}
    | {"share_memory", "to", "to_empty", "train", "type", "xpu"}
)
"""Methods of a module whose result is the module: `model = model.to(device)` must not lose the wrapper."""


def _wrapper_for_itself(wrapper: CoExecModule, method: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapped module's method, which returns the wrapper where it returned the module."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return wrapper if result is wrapper._orig_mod else result

    return call


@overload
def compile(fn_or_module: F, **options: Any) -> Any: ...
@overload
def compile(fn_or_module: None = None, **options: Any) -> Callable[[F], Any]: ...


def compile(fn_or_module: Any = None, **options: Any) -> Any:
    """Runs an unmodified training or inference step as one graph beside its own Python.

    Args:
        fn_or_module: a function, a bound method or an `nn.Module`; None to use it as a decorator with arguments.
        **options: `backend="auto"`, `numerics="fast"`, `dynamic=None`, `mode="coexec"`, `overlap=False`; see
            :class:`coexec.config.Options`. With `overlap=True` a call may return while its graph still runs: whatever
            needs a result waits, and a kernel's error comes there.

    Returns:
        A callable with the signature of the function, or a module-like wrapper; both have `stats()`, `explain()`,
        `wait_compiled()` and `trace_graph`.

    Raises:
        NotCallableError, UnknownOptionError, OptionValueError: as their names say; the latter also for an environment
            variable.
        NotAStepError: an async function, a generator function or a class.
        ConflictingOptionsError: options that exclude each other, or others than those of a step that is compiled
            already (which is returned as it is otherwise).

    Example:
        >>> @coexec.compile
        ... def train_step(x, y):
        ...     loss = loss_fn(model(x), y)
        ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
        ...     return loss.item()
    """
    checked = make_options(**options)
    settings()  # a variable that means nothing is an error here, and not when a step first asks for it
    if fn_or_module is None:
        return lambda f: compile(f, **options)
    compiled = getattr(fn_or_module, "__func__", fn_or_module)
    if isinstance(compiled, CoExecutable | CoExecModule):
        _refuse_other_options(compiled, checked if options else None)
        return fn_or_module
    if isinstance(fn_or_module, torch.nn.Module):
        return CoExecModule(fn_or_module, checked)
    if not callable(fn_or_module):
        raise NotCallableError(fn_or_module)
    if kind := _no_step(fn_or_module):
        raise NotAStepError(fn_or_module, kind)
    return CoExecutable(fn_or_module, checked)


def _refuse_other_options(compiled: CoExecutable | CoExecModule, wanted: Options | None) -> None:
    """A step that is compiled already keeps its options: others would be lost without a word."""
    step = compiled._step if isinstance(compiled, CoExecModule) else compiled
    if wanted is not None and wanted != step._options:
        raise ConflictingOptionsError(
            f"{step._runner.name!r} is compiled already, {_what_differs(step._options, wanted)}: give all options "
            f"where it is compiled first, or compile what it wraps (`__wrapped__` of a function, `_orig_mod` of a "
            f"module)."
        )


def _what_differs(has: Options, wanted: Options) -> str:
    """ "with backend='auto', not 'replay'"."""
    names = [field.name for field in dataclasses.fields(Options)]
    pairs = [(name, getattr(has, name), getattr(wanted, name)) for name in names]
    return "with " + ", ".join(f"{name}={old!r}, not {new!r}" for name, old, new in pairs if old != new)


def _no_step(function: Callable[..., Any]) -> str:
    """What `function` is, if the work of a call to it is done after the call has returned, or elsewhere; else ''."""
    if isinstance(function, type):
        return "class"
    for call in (function, type(function).__call__):
        if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
            return "async function"
        if inspect.isgeneratorfunction(call):
            return "generator function"
    return ""


_blocks: dict[tuple[str, Options], StepRunner] = {}
"""By name (or place) and options; empty again after `reset`."""


class step:  # noqa: N801  # a context manager reads as a verb, like torch.no_grad
    """`with coexec.step():` around a loop body that is no function: one pass is one step.

    Args:
        name: what the step is called in reports; by default its file and line, which also tell steps apart.
        **options: as for `compile`.

    Raises:
        NotANameError: `name` is no text, as where `@coexec.step` decorates a function.
        UnknownOptionError, OptionValueError, ConflictingOptionsError: as for `compile`.
    """

    def __init__(self, name: str | None = None, **options: Any) -> None:
        if name is not None and not isinstance(name, str):
            raise NotANameError(name)
        checked = make_options(**options)
        settings()  # as in `compile`
        frame = sys._getframe(1)
        self._key = (name or f"{frame.f_code.co_filename}:{frame.f_lineno}", checked)
        self._place = short_place(frame.f_code.co_filename, frame.f_lineno)
        self._entered: StepRunner | None = None

    @property
    def _runner(self) -> StepRunner:
        """Of all blocks with this name and these options: a new one after `reset`."""
        name, options = self._key
        return _blocks.get(self._key) or _blocks.setdefault(self._key, StepRunner(name, options, self._place))

    def __enter__(self) -> step:
        runner = self._runner
        self._entered = runner if not disabled() and runner.enter(1) else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        runner, self._entered = self._entered, None
        if runner is not None:
            runner.leave(completed=kind is None)

    def stats(self) -> StepStats:
        """Returns what the step has done so far, counted."""
        return self._runner.stats()

    def explain(self) -> str:
        """Returns why the step is in its phase, as text."""
        return explain(self._runner)

    def wait_compiled(self, timeout_s: float = 600.0) -> bool:
        """As CoExecutable.wait_compiled."""
        return self._runner.wait_compiled(timeout_s)

    @property
    def trace_graph(self) -> Any:
        """As CoExecutable.trace_graph."""
        return self._runner.graph_view()

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """As CoExecutable.timeline."""
        write_timeline(self._runner, Path(path))


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """Makes `tensor` ordinary now, for native code that reads its memory outside PyTorch. Returns the same tensor.

    Raises:
        NotATensorError: it is none.
    """
    if not isinstance(tensor, torch.Tensor):
        raise NotATensorError(tensor)
    tensor.data_ptr()
    return tensor


def reset() -> None:
    """Forgets what all compiled steps of this process have learned; graphs still running are waited for first."""
    with contextlib.ExitStack() as stack:  # all, even if one has an error to raise
        for compiled in list(_live):
            stack.callback(compiled.reset)
        for runner in _blocks.values():
            stack.callback(runner.retire)
        _blocks.clear()
