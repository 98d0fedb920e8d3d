"""Programs to tune, and stores that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from coexec.backends.candidates.program import Program
from coexec.subgraphs.key import SubgraphKey
from coexec.subgraphs.location import private_location
from coexec.subgraphs.store import Store
from coexec.tuning.identity import program_key
from coexec.tuning.program_file import save_program
from tests.tuning.planted import STEPS

aten = torch.ops.aten


def climbing(size: int = 64, static: bool = False) -> Program:
    """`x` plus one (or plus a static weight), many times: slow op by op, fast in one."""
    graph = Graph()
    value = graph.placeholder("x")
    step: Any = graph.placeholder("weight") if static else 1.0
    for _ in range(STEPS):
        value = graph.call_function(aten.add.Tensor, (value, step))
    graph.output((value,))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, size, generator=generator)]
    if static:
        inputs.append(torch.full((size, size), 0.5))
    return Program(GraphModule(torch.nn.Module(), graph), tuple(inputs), (1,) if static else ())


def key_of(program: Program) -> SubgraphKey:
    return program_key(program.module, program.inputs, static_inputs=program.static_inputs, training=program.training)


def store_with(folder: Path, *programs: Program) -> Store:
    """A strict store in `folder` that holds the programs."""
    store = Store(private_location(folder / "store"), strict=True)
    for number, program in enumerate(programs):
        path = folder / f"program{number}"
        save_program(program, path)
        store.put_subgraph(key_of(program), program=path, note=f"graphs.py:{number}")
    return store
