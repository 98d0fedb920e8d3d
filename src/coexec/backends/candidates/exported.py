"""The core of a program as an ExportedProgram, which ONNX, OpenVINO and TVM read."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule

from coexec.backends.candidates.candidate import CandidateError
from coexec.backends.candidates.core import Core, draws_random, split
from coexec.backends.candidates.program import Program


def foreign_core(name: str, program: Program, *, bind_static: bool = True) -> Core:
    """The core for a runtime with row-major memory of its own. Errors: CandidateError for what none of them takes."""
    core = split(program, row_major=True, bind_static=bind_static)
    if not core.live:
        raise CandidateError(name, "the graph has no input that changes between calls")
    if draws_random(core.module):
        raise CandidateError(name, "it draws random numbers, which this runtime would take from another generator")
    tensors = [*core.examples, *(torch.empty(o.sizes, device="meta") for o in core.outputs if o.sizes is not None)]
    if any(t.numel() == 0 for t in tensors):
        raise CandidateError(name, "a tensor without elements: there is nothing to gain, and other runtimes misread it")
    return core


def export(name: str, core: Core) -> ExportedProgram:
    """All of the core's inputs, weights included, are inputs of the exported program.

    Sizes that are symbols in a dynamic core are exported as such.
    """
    module = without_detours(with_plain_attention(core.module))
    examples = tuple(t.detach().contiguous() for t in core.examples)
    shapes = _dynamic_shapes(core) if core.dynamic else None
    with torch.no_grad(), quiet():
        try:
            return torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise CandidateError(name, f"torch.export: {type(error).__name__}: {error!s:.300}") from error


def with_plain_attention(module: GraphModule) -> GraphModule:
    """Attention as users write it, in place of the CPU kernel that torch chose: runtimes have their own for it, and the
    kernel's decomposition has other strides than the kernel, on which later views fail."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, val_map={}))
    for node in graph.find_nodes(op="call_function", target=FLASH):
        users = list(node.users)
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in users if user.users):
            continue  # the logarithm of sums is wanted too: a training graph
        given = dict(zip(("dropout_p", "is_causal"), node.args[3:], strict=False)) | node.kwargs
        with graph.inserting_before(node):
            plain = graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, node.args[:3], given)
        for user in users:
            user.replace_all_uses_with(plain)
            graph.erase_node(user)
        graph.erase_node(node)
    return GraphModule(module, graph)


def without_detours(module: GraphModule) -> GraphModule:
    """Without ops that mean something to autograd alone; OpenVINO's converter fails on results that have two names."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, val_map={}))
    for target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        for node in graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    return GraphModule(module, graph)


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _dynamic_shapes(core: Core) -> tuple[dict[int, object], ...]:
    values = [node.meta["val"] for node in core.module.graph.find_nodes(op="placeholder")]
    return tuple({d: Dim.AUTO for d, size in enumerate(v.shape) if isinstance(size, torch.SymInt)} for v in values)


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn and log a lot about what is no news to a tuner."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
