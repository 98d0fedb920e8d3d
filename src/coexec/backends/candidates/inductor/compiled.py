"""Runs TorchInductor on the core of a program, in either form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import config
from torch.fx import Graph, GraphModule

from coexec.backends.candidates.candidate import CandidateError
from coexec.backends.candidates.core import Core, draws_random
from coexec.backends.candidates.exported import quiet


@contextmanager
def compiling(name: str, core: Core, options: Mapping[str, Any], threads: int) -> Iterator[None]:
    """Settings of one compilation; every one of them is put back. Errors of the compiler become CandidateError."""
    settings = {
        # Written into the code unless it equals the machine's count, in which case OpenMP's own setting counts.
        "cpp.threads": threads,
        "cpp.dynamic_threads": False,
        "fallback_random": draws_random(core.module),  # eager's kernels draw, in program order
        "compile_threads": 1,
        "fx_graph_cache": False,  # its entries are pickles
        "fx_graph_remote_cache": False,
        # Another package may leave a pass behind here (zentorch does), which changes what every later graph becomes.
        "joint_custom_pre_pass": None,
        "joint_custom_post_pass": None,
        "post_grad_custom_pre_pass": None,
        "post_grad_custom_post_pass": None,
        **options,
    }
    known = {key: value for key, value in settings.items() if _exists(key)}
    try:
        with config.patch(known), torch.no_grad(), quiet():
            yield
    except CandidateError:
        raise
    except Exception as error:
        raise CandidateError(name, f"{type(error).__name__}: {str(error).strip()[:400]}") from error


def _exists(key: str) -> bool:
    """Settings come and go between torch releases."""
    holder: Any = config
    *path, last = key.split(".")
    for part in path:
        holder = getattr(holder, part, None)
    return hasattr(holder, last)


def with_weights(core: Core) -> GraphModule:
    """The core as a module that holds its static inputs and takes the live ones."""
    graph, root = Graph(), torch.nn.Module()
    placeholders = core.module.graph.find_nodes(op="placeholder")
    env: dict[Any, Any] = {}
    for position, node in enumerate(placeholders):
        if position in core.static:
            root.register_buffer(f"w{position}", core.examples[position].detach())
            env[node] = graph.get_attr(f"w{position}")
            env[node].meta = dict(node.meta)
    for node in core.module.graph.nodes:
        if node.op == "get_attr":
            root.register_buffer(str(node.target), getattr(core.module, str(node.target)))
        if node not in env and node.op != "output":
            env[node] = graph.node_copy(node, lambda n: env[n])
    output = next(iter(reversed(core.module.graph.nodes)))
    graph.output(tuple(env[n] for n in output.args[0]))
    return GraphModule(root, graph)


def example_inputs(core: Core, positions: tuple[int, ...]) -> list[torch.Tensor]:
    """Fake inputs with symbolic sizes for a dynamic core, real ones for a static core."""
    if not core.dynamic:
        return [core.examples[i] for i in positions]
    placeholders = core.module.graph.find_nodes(op="placeholder")
    return [placeholders[i].meta["val"] for i in positions]


def compile_jit(core: Core) -> Any:
    """The compiler's output code for the core with all its inputs: wrapper source and loaded kernels."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        found.append(compile_fx_inner(*args, **kwargs))
        return found[-1]

    compile_fx(core.module, example_inputs(core, tuple(range(len(core.sources)))), inner_compile=inner)
    if len(found) != 1:
        raise CandidateError("inductor", f"the graph was compiled in {len(found)} pieces, one is expected")
    return found[0]


def compile_aot(module: GraphModule, inputs: list[torch.Tensor], path: str) -> None:
    """Compile `module` into the shared library `path`."""
    import torch._inductor

    torch._inductor.aot_compile(module, tuple(inputs), options={"aot_inductor.output_path": path, **_patched()})


def _patched() -> dict[str, Any]:
    """aot_compile resets nothing, but insists on its own dict of options."""
    return {"aot_inductor.package": False} if hasattr(config.aot_inductor, "package") else {}
