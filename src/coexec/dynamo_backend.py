"""`torch.compile(model, backend="coexec")`: Dynamo's graphs run on what the store knows to be fastest.

    torch.compile(model, backend="coexec")                                  # "serve": tuned graphs fast, others eager
    torch.compile(model, backend="coexec", options={"mode": "collect"})     # only store the graphs, for `coexec tune`
    torch.compile(model, backend="coexec", options={"mode": "tune"})        # tune what is unknown now, then serve

AOTAutograd makes functional graphs (inference; or forward and backward of a training step), and each is looked up on
its own. A region of which no graph has a faster backend runs as Dynamo's own graph from its second call on: as with
`backend="eager"`. A module that plain eager serves faster than all this, guards included, is left to it (`serving.py`).
Nothing is compiled in this process, and no trouble of the store or a backend reaches the user.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

from coexec import choose, serving
from coexec.backends.candidates import registry
from coexec.backends.graph_indices import GraphIndices, graph_indices
from coexec.choose import EAGER, Graph, Installed, NotInstalledError
from coexec.config import disabled, private_cache_dir
from coexec.errors import CacheFolderError, OptionValueError, UnknownOptionError
from coexec.subgraphs.errors import UnkeyableGraphError
from coexec.subgraphs.store import Store, open_store
from coexec.tuning.fast_eager import fast_eager
from coexec.tuning.identity import program_key
from coexec.tuning.settings import TuneSettings

MODES = ("serve", "collect", "tune")
OPTIONS = ("mode", "tune")

CALLS_WITHOUT_BACKWARD = 3
"""A forward graph that has run so often without a backward is not waited for any longer."""

CHECKED_SIZES = 16
"""At so many different sizes a candidate for a dynamic graph is compared with eager before it is trusted at all."""

MAX_CHANGES = 8
"""A graph whose weights are replaced more often stays eager: binding anew costs more than it gains."""

SHOWN_INPUTS = 2
"""Shapes of so many inputs are in a graph's note."""


def coexec_backend(
    module: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The function that `torch.compile` calls; see the module's docstring.

    Args:
        mode: the same as `options["mode"]`, one of MODES.
        options: "mode", and "tune": limits of :class:`coexec.tuning.TuneSettings` for mode "tune", as a dict.

    Raises:
        UnknownOptionError, OptionValueError: an option that is none.
    """
    given = _checked_options(mode, options)
    if disabled():
        return module.forward
    _report_unusable_cache()
    region = Region(module, given)
    _put_gate(region)
    try:
        return region.compiled(inputs)
    except Exception as error:  # AOTAutograd refuses some graphs that eager runs: never the user's problem
        choose.count("eager.not functional", f"{note_of(module)}: {error!r:.300}")
        return region.dynamo


def _put_gate(region: Region) -> None:
    """What is served is compared with plain eager from now on, guards and all."""
    if region.options["mode"] == "collect":
        return
    try:
        serving.put_gate(note_of(region.module), region)
    except Exception as error:  # Dynamo's insides are not the same in every release: then its guards are paid for
        choose.count("no gate", f"{note_of(region.module)}: {error!r:.300}")


class Region:
    """One graph of Dynamo's: its eager form, its functional graphs, and which of the two runs."""

    def __init__(self, module: GraphModule, options: dict[str, Any]) -> None:
        self.dynamo: Callable[..., Any] = module.forward
        self.module, self.options = module, options
        self.sites: list[Site] = []
        self.functional: Callable[..., Any] = self.dynamo
        self.calls = 0
        self.current: Callable[..., Any] = self._first_calls
        serving.changed()

    def compiled(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Trace with AOTAutograd; returns what Dynamo is to call. Errors: whatever AOTAutograd raises."""
        compiler = aot_autograd(
            fw_compiler=functools.partial(self._site, "forward"),
            bw_compiler=functools.partial(self._site, "backward"),
            inference_compiler=functools.partial(self._site, "inference"),
        )
        self.functional = compiler(self.module, inputs)
        if all(site.unkeyable for site in self.sites):
            return self.dynamo
        return self

    def __call__(self, *inputs: Any) -> Any:
        return self.current(*inputs)

    @property
    def faster(self) -> bool:
        """A candidate serves one of its graphs."""
        return any(site.installed for site in self.sites)

    def _site(self, kind: str, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        site = Site(module, inputs, kind, note_of(self.module), self.options)
        self.sites.append(site)

        def run(inputs: list[Any]) -> Any:  # Dynamo wraps it and copies its attributes
            return site(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _first_calls(self, *inputs: Any) -> Any:
        """Through the functional graphs, until each of them knows what it does."""
        self.calls += 1
        serving.changed()
        returned = self.functional(*inputs)
        if self.faster:
            self.current = self.functional
        elif self._settled():
            self.current = self.dynamo
        return returned

    def _settled(self) -> bool:
        """No site will ever be faster than eager, as far as can be known."""
        if not all(site.settled for site in self.sites):
            return False
        training = any(site.kind == "forward" for site in self.sites)
        seen = any(site.kind == "backward" for site in self.sites)
        return not training or seen or self.calls >= CALLS_WITHOUT_BACKWARD


class Site:
    """One functional graph: it is chosen for at its first call, with live inputs. AOTAutograd calls it with a list."""

    def __init__(
        self, module: GraphModule, inputs: Sequence[Any], kind: str, note: str, options: dict[str, Any]
    ) -> None:
        self.module, self.kind, self.options, self.place = module, kind, options, note
        self.note = note if kind == "inference" else f"{note} ({kind})"  # until the graph is known
        _LazyGraphModule.force_recompile(module)  # its lazy forward would cost three times the call of a small graph
        self.eager: Callable[..., Any] = module.forward
        self.installed: Installed | None = None
        self.settled = False  # chosen: no more looking up
        self.changes = 0  # how often its weights were replaced or written
        self.sizes: set[tuple[int, ...]] = set()  # of a dynamic graph, at which the candidate was compared with eager
        self.choosing = threading.Lock()
        self.indices: GraphIndices | None = None  # found at the first choice: none is made on inputs that eager rejects
        self.outside_calls = 0  # with an index that is out of range, while something other than eager might have run
        self.graph = self._graph(inputs)
        self.unkeyable = self.graph is None

    def __call__(self, inputs: list[Any]) -> Any:
        installed = self.installed
        if installed is not None and not installed.fits(inputs):
            installed = self._changed(inputs)
        elif installed is None and not self.settled:
            installed = self._choose(inputs)
        if installed is not None and (problem := installed.indices.outside(inputs)) is not None:
            self._count_outside(problem)
            installed = None  # eager raises, in its own words
        if installed is not None and self.graph is not None and self.graph.dynamic:
            installed = self._checked(installed, inputs)
        if installed is None:
            return self._eagerly(inputs)
        try:
            return installed.run(*inputs)
        except Exception as error:
            return self._failed(inputs, error)

    def _eagerly(self, inputs: list[Any]) -> Any:
        arguments = tuple(inputs)
        inputs.clear()  # saved activations may be freed while the graph runs
        return self.eager(*arguments)

    def _failed(self, inputs: list[Any], error: Exception) -> Any:
        """The candidate raised. Where eager raises too, the error is the user's, and eager's own words reach them."""
        returned = self._eagerly(inputs)
        self._uninstall("eager.failed while serving", f"{self.note}: {error!r:.300}")
        return returned

    def _checked(self, installed: Installed, inputs: Sequence[Any]) -> Installed | None:
        """Once more compared with eager at sizes that are new: it was tuned and installed at others."""
        assert self.graph is not None
        sizes = tuple(value for value in inputs if type(value) is int)
        if sizes in self.sizes or len(self.sizes) >= CHECKED_SIZES:
            return installed
        self.sizes.add(sizes)
        if len(self.sizes) == 1:
            return installed  # it has just been installed at these
        try:
            choose.check_at(self.graph, installed, inputs)
        except NotInstalledError as error:
            self._uninstall(f"eager.{error.reason}", f"{self.note}, sizes {sizes}: {error}")
            return None
        return installed

    def _count_outside(self, problem: str) -> None:
        self.outside_calls += 1
        choose.count("eager.index out of range", f"{self.note}: {problem}" if self.outside_calls == 1 else "")

    def _uninstall(self, name: str, text: str) -> None:
        self.installed, self.settled = None, True
        serving.changed()
        choose.count(name, text)

    def _graph(self, inputs: Sequence[Any]) -> Graph | None:
        training = self.kind != "inference"
        static = () if training else static_inputs_of(self.module)
        try:
            key = program_key(self.module, inputs, static_inputs=static, training=training)
        except UnkeyableGraphError as error:
            choose.count("eager.no key", f"{self.note}: {error}")
            self.settled = True
            return None
        self.note = f"{self.place} ({', '.join((*self._told_apart(inputs), f'{key.n_ops} ops'))})"
        dynamic = any(isinstance(value, torch.SymInt) for value in inputs) or _has_symbols(inputs)
        return Graph(key, self.module, static, training, dynamic, self.note)

    def _told_apart(self, inputs: Sequence[Any]) -> tuple[str, ...]:
        """The kind and the first shapes, in words. Of a backward graph it is not known which inputs are weights."""
        if self.kind == "backward":
            return (self.kind, *shapes_text(inputs))
        weights = static_inputs_of(self.module)
        shapes = shapes_text([value for position, value in enumerate(inputs) if position not in weights])
        return shapes if self.kind == "inference" else (self.kind, *shapes)

    def _choose(self, inputs: Sequence[Any]) -> Installed | None:
        """Decide what runs from now on. No error leaves: eager runs then, and it is counted."""
        with self.choosing:
            if self.settled:
                return self.installed
            try:
                indices = self._known_indices()
                if (problem := indices.outside(inputs)) is not None:
                    self._count_outside(problem)
                    return None  # chosen for at a later call; neither a sample nor a comparison with eager is here
                self._hasten(inputs)
                self.installed = self._chosen(inputs, indices)
            except NotInstalledError as error:
                choose.count(f"eager.{error.reason}", f"{self.note}: {error}")
            except Exception as error:
                choose.count("eager.unexpected", f"{self.note}: {error!r:.300}")
            self.settled = True
            return self.installed

    def _known_indices(self) -> GraphIndices:
        self.indices = self.indices or graph_indices(self.module)
        return self.indices

    def _chosen(self, inputs: Sequence[Any], indices: GraphIndices) -> Installed | None:
        assert self.graph is not None
        store, graph = the_store(), self.graph
        baked = self.changes < 2  # weights that changed more than once change again: then nothing that holds them
        decision = None if self.options["mode"] == "collect" else choose.find(store, graph, inputs, baked=baked)
        if decision is None:
            stored = choose.remember(store, graph, inputs)
            choose.count("stored" if stored else "eager.not stored", self.note)
            if self.options["mode"] != "tune" or not stored:
                choose.count("eager.not tuned", self.note)
                return None
            decision = self._tuned(store, graph, inputs)
            if decision is None:
                choose.count("eager.not tuned", f"{self.note}: no candidate could be tried in time, or none is here")
                return None
        if decision.backend == EAGER:
            choose.count("eager.fastest", self.note)
            return None
        installed = choose.install(store, graph, decision, inputs, indices)
        choose.count(f"serve.{decision.backend}", f"{self.note}: {decision.reason}")
        return installed

    def _hasten(self, inputs: Sequence[Any]) -> None:
        """Call torch's own functions where eager will run this graph beside another one that a candidate runs."""
        if self.kind == "inference":
            return  # Dynamo's graph runs then
        try:
            self.eager = fast_eager(self.module, inputs)
        except Exception as error:  # only speed is lost
            choose.count("not hastened", f"{self.note}: {error!r:.300}")

    def _tuned(self, store: Store, graph: Graph, inputs: Sequence[Any]) -> Any:
        from coexec.tuning.tuner import tune

        limits = dataclasses.replace(self.options["tune"], subgraphs=(graph.key.digest,))
        tune(store, dataclasses.replace(limits, threads=limits.threads or torch.get_num_threads()))
        return choose.find(store, graph, inputs)

    def _changed(self, inputs: Sequence[Any]) -> Installed | None:
        """A static input is another tensor, or was written: what is installed may hold its old values."""
        with self.choosing:
            self.changes += 1
            self.installed, self.settled = None, self.changes > MAX_CHANGES
        serving.changed()
        choose.count("stale", f"{self.note}: its weights were changed")
        return None if self.settled else self._choose(inputs)


@functools.cache
def the_store() -> Store:
    """The store of this process."""
    return open_store()


def static_inputs_of(module: GraphModule) -> tuple[int, ...]:
    """Positions of parameters and buffers that the graph being compiled does not write."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return ()
    written = {position for position, facts in enumerate(metadata.input_info) if facts.mutates_data}
    count = len(module.graph.find_nodes(op="placeholder"))
    return tuple(i for i in sorted(metadata.static_input_indices or ()) if i not in written and i < count)


def shapes_text(inputs: Sequence[Any]) -> tuple[str, ...]:
    """What tells graphs of one line apart: ("8x16", "8 int64") of the first tensors, weights not among them."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return tuple(_shape_text(tensor) for tensor in tensors[:SHOWN_INPUTS])


def _shape_text(tensor: torch.Tensor) -> str:
    sizes = "x".join(map(str, tensor.shape)) or "a number"
    return sizes if tensor.dtype is torch.float32 else f"{sizes} {str(tensor.dtype).removeprefix('torch.')}"


def note_of(module: GraphModule) -> str:
    """File and line of the user's code that the graph begins with, or the modules that it comes from."""
    for node in module.graph.nodes:
        if (trace := node.meta.get("stack_trace")) and (frames := _frames(trace)):
            return frames[-1]
    # Dynamo leaves out frames of torch itself: of a bare nn.Sequential nothing else remains.
    owners = [next(iter(stack.values()))[1] for n in module.graph.nodes if (stack := n.meta.get("nn_module_stack"))]
    names = [owner if isinstance(owner, str) else owner.__qualname__ for owner in owners]
    return names[0].rpartition(".")[2] if names else "a graph without source"


def _frames(trace: str) -> list[str]:
    """ "model.py:31" for each frame of a stack trace in text."""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith('File "')]
    parts = [line.split('"')[1:3] for line in lines]
    return [f"{name.rpartition('/')[2]}:{rest.split('line ')[1].split(',')[0]}" for name, rest in parts]


def _has_symbols(inputs: Sequence[Any]) -> bool:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


def _checked_options(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    given = {"tune": {}, "mode": mode or "serve", **(options or {})}
    for name in given:
        if name not in OPTIONS:
            raise UnknownOptionError(name, OPTIONS)
    if given["mode"] not in MODES:
        raise OptionValueError("mode", given["mode"], MODES)
    return {"mode": given["mode"], "tune": _checked_limits(given["tune"])}


def _checked_limits(given: Any) -> TuneSettings:
    """The limits for mode "tune". Errors: OptionValueError, UnknownOptionError."""
    names = [field.name for field in dataclasses.fields(TuneSettings) if field.name != "subgraphs"]
    if not isinstance(given, dict):
        raise OptionValueError("tune", given, (f"a dict of limits ({', '.join(names)})",))
    for name in given:
        if name not in names:
            raise UnknownOptionError(f"tune.{name}", (f"tune.{valid}" for valid in names))
    try:
        limits = TuneSettings(**given)
    except (TypeError, ValueError) as error:
        raise OptionValueError("tune", given, (f"limits that leave something to tune with: {error}",)) from error
    for name in limits.candidates or ():
        if name not in registry.candidates():
            raise OptionValueError("tune.candidates", name, sorted(registry.candidates()))
    return limits


_cache_reported = False


def _report_unusable_cache() -> None:
    """Warns, once per process, where nothing can be stored or served: all graphs run eagerly then."""
    global _cache_reported
    try:
        private_cache_dir("tuning")
    except CacheFolderError as error:
        if not _cache_reported:
            _cache_reported = True
            warnings.warn(f"coexec: {error} Until then every graph runs eagerly.", stacklevel=2)


__all__ = ["coexec_backend"]
