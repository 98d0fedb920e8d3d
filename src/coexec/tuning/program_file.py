"""One stored program as one file: its text, and the values of its static inputs where they are not too large.

Weights are stored because a candidate that bakes them into its artifact must bake the right ones: a decision about such
an artifact serves models with these very weights only. A program without them still serves every other candidate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from coexec.backends.candidates.inputs import describe_inputs, make_inputs
from coexec.backends.candidates.program import Program, ProgramError
from coexec.backends.candidates.program_json import dumps, loads, read_descriptions
from coexec.backends.candidates.tensor_file import read_tensors, write_tensors

TEXT = "program"

SAMPLE_BYTES = 1 << 20
"""Integer inputs up to this size are stored as they are: indices, masks and offsets have structure."""

STATIC_BYTES = 4 << 30
"""Static inputs of a larger total are described instead of stored."""


def save_program(program: Program, path: Path, *, static_bytes: int = STATIC_BYTES) -> None:
    """Write `program` to `path`. Errors: ProgramError for what has no stored form; OSError."""
    static = _static_tensors(program)
    keep = sum(tensor.nbytes for tensor in static.values()) <= static_bytes
    text = dumps(program, describe_inputs(program.inputs, sample_bytes=SAMPLE_BYTES))
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    write_tensors(path, {TEXT: encoded, **({_name(i): t for i, t in static.items()} if keep else {})})


def load_program(path: Path, *, seed: int = 0) -> Program:
    """The program in `path`: static inputs as stored, the others made up from what was recorded of them.

    Errors: ProgramError.
    """
    tensors = read_tensors(path)
    if TEXT not in tensors:
        raise ProgramError(f"{path} holds no program")
    text = tensors[TEXT].numpy().tobytes().decode()
    inputs: list[Any] = list(make_inputs(read_descriptions(text), seed=seed))
    for position in range(len(inputs)):
        inputs[position] = tensors.get(_name(position), inputs[position])
    return loads(text, inputs)


def _static_tensors(program: Program) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for position in program.static_inputs:
        value = program.inputs[position]
        if isinstance(value, torch.Tensor):
            found[position] = value
    return found


def _name(position: int) -> str:
    return f"in{position}"
