"""A segment as the tuner needs it: what was compiled, and what its live inputs were like. One JSON file::

    {"coexec-segment-program": 1,
     "observed": [{"spec": SPEC, "inputs": [DESCRIPTION, ...]}, ...]}

SPEC is the form of :mod:`coexec.backends.spec_json`: what is drawn, published and written is in it. With several
observations the segment is one for many sizes. A DESCRIPTION (:mod:`coexec.backends.candidates.inputs`) holds range and
deviation of a float input, and small integer inputs as they are; a fed number is a 0-dim tensor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coexec.backends.candidates import inputs as descriptions
from coexec.backends.candidates.inputs import InputDescription
from coexec.backends.candidates.program import ProgramError
from coexec.backends.ops import torch_dtype
from coexec.backends.spec import SegmentSpec, SpecError, Value
from coexec.backends.spec_json import from_json, to_json
from coexec.backends.symbolic import SymbolicSpec, unify

FORMAT = "coexec-segment-program"
BEGINNING = f'{{"{FORMAT}": 1'
"""No file of another kind begins so: a stored graph begins with the length of its header, in eight bytes."""

SAMPLE_BYTES = 1 << 20
"""Integer inputs up to this size are stored as they are: indices and masks have structure."""

ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """One pass through the segment."""

    spec: SegmentSpec
    described: tuple[InputDescription, ...]  # of spec.inputs, in order

    def inputs(self, seed: int) -> list[torch.Tensor]:
        """Inputs like the live ones, the same for the same seed; those that shared memory share it here."""
        return _sharing_memory(self.spec, list(descriptions.make_inputs(self.described, seed=seed)))


@dataclass(frozen=True, slots=True)
class SegmentProgram:
    """One segment."""

    observed: tuple[Observation, ...]

    @property
    def spec(self) -> SegmentSpec | SymbolicSpec:
        """What is compiled."""
        specs = [observation.spec for observation in self.observed]
        return specs[0] if len(specs) == 1 else unify(specs)

    @property
    def threads(self) -> int:
        """Intra-op threads that it runs with."""
        return self.observed[0].spec.threads


def observe(spec: SegmentSpec, live: Sequence[torch.Tensor]) -> Observation:
    """Describe one pass by its live inputs; every value is read once. Errors: ProgramError for a dtype not stored."""
    return Observation(spec, descriptions.describe_inputs(live, sample_bytes=SAMPLE_BYTES))


def write_program(program: SegmentProgram, path: Path) -> None:
    """Write `program` to `path`. Errors: OSError."""
    observed = [
        {"spec": to_json(one.spec), "inputs": [descriptions.to_json(described) for described in one.described]}
        for one in program.observed
    ]
    path.write_text(json.dumps({FORMAT: 1, "observed": observed}))


def is_segment_program(path: Path) -> bool:
    """Whether the file holds a segment, by its beginning. Errors: OSError."""
    with path.open("rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING.encode()


def read_program(path: Path) -> SegmentProgram:
    """What :func:`write_program` wrote. Errors: ProgramError for anything else; OSError."""
    try:
        form: dict[str, Any] = json.loads(path.read_text())
        if form[FORMAT] != 1 or not form["observed"]:
            raise ProgramError(f"{path} is a segment of format {form[FORMAT]}: this version of coexec reads format 1")
        return SegmentProgram(tuple(map(_observation, form["observed"])))
    except (ValueError, KeyError, TypeError, SpecError) as error:
        raise ProgramError(f"{path} holds no segment: {error!r:.200}; run the step again to store it anew") from error


def _observation(form: dict[str, Any]) -> Observation:
    described = tuple(descriptions.from_json(entry) for entry in form["inputs"])
    spec = from_json(form["spec"])
    if len(described) != len(spec.inputs):
        raise ValueError(f"{len(described)} inputs are described, the segment takes {len(spec.inputs)}")
    return Observation(spec, described)


def _sharing_memory(spec: SegmentSpec, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    groups: dict[int, list[int]] = {}
    for position, entry in enumerate(spec.inputs):
        if (value := getattr(entry, "value", None)) is not None:
            groups.setdefault(value.storage, []).append(position)
    for positions in groups.values():
        if len(positions) > 1:
            values = [spec.input_value(position) for position in positions]
            for position, view in zip(positions, _views(values), strict=True):
                _fill(view, tensors[position])
                tensors[position] = view
    return tensors


def _views(values: Sequence[Value]) -> list[torch.Tensor]:
    """Tensors of these geometries over one piece of memory, which holds no more than they touch."""
    extents = [value.extent() for value in values]
    low = min(begin for begin, _ in extents) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    memory = torch.zeros(max(end for _, end in extents) - low, dtype=torch.uint8).untyped_storage()
    views = []
    for value in values:
        empty = torch.empty(0, dtype=torch_dtype(value.dtype))
        offset = value.offset - low // empty.element_size() if 0 not in value.sizes else 0
        views.append(empty.set_(memory, offset, value.sizes, value.strides))
    return views


def _fill(view: torch.Tensor, source: torch.Tensor) -> None:
    """Through single elements of an expanded dimension: copy_ refuses memory that overlaps itself."""
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in view.stride())
    view[index].copy_(source[index])
