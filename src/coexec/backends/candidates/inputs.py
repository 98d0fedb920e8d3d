"""What a stored program knows about its inputs, and representative inputs made from it.

Weights and activations are not stored: their shape, their range and their scale are, so that made-up inputs take the
same branches in kernels (no denormals, no index out of range, variances that are not negative).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from coexec.backends.candidates.program import ProgramError
from coexec.backends.candidates.tensor_file import CODES, DTYPES, from_raw_bytes, raw_bytes, restride


@dataclass(frozen=True, slots=True)
class NumberDescription:
    """A plain number among the inputs: a symbolic size at its example value, or a fed scalar."""

    value: int | float


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One tensor input. `low` ... `scale` are over finite values; integers and bools have them too (bool as 0, 1)."""

    dtype: str  # code of tensor_file.CODES
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    low: float = 0.0  # smallest value
    high: float = 0.0  # largest value
    mean: float = 0.0
    scale: float = 0.0  # standard deviation
    sample: str = ""  # base64 of the values themselves, where they were kept

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


InputDescription = NumberDescription | TensorDescription


def describe_inputs(inputs: Sequence[Any], *, sample_bytes: int = 0) -> tuple[InputDescription, ...]:
    """Describe live inputs; integer tensors of at most `sample_bytes` are kept as they are.

    Reads every value once. Errors: ProgramError for an input that is no strided CPU tensor and no number.
    """
    return tuple(_describe(position, value, sample_bytes) for position, value in enumerate(inputs))


def make_inputs(descriptions: Sequence[InputDescription], *, seed: int, samples: bool = True) -> tuple[Any, ...]:
    """Representative inputs, the same for the same seed. `samples=False`: made up even where a sample was kept."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        d.value if isinstance(d, NumberDescription) else _make(d, generator, use_sample=samples) for d in descriptions
    )


def to_json(description: InputDescription) -> dict[str, Any]:
    """As plain JSON, without what is at its default."""
    if isinstance(description, NumberDescription):
        return {"number": description.value}
    return {name: value for name, value in asdict(description).items() if value not in (0.0, "") or name == "dtype"}


def from_json(data: dict[str, Any]) -> InputDescription:
    """The reverse. Errors: ProgramError."""
    try:
        if "number" in data:
            return NumberDescription(data["number"])
        sizes, strides = tuple(data["sizes"]), tuple(data["strides"])
        return TensorDescription(**{**data, "sizes": sizes, "strides": strides})
    except (KeyError, TypeError) as error:
        raise ProgramError(f"input description {data!r:.200} is not readable: {error!r}") from error


def _describe(position: int, value: Any, sample_bytes: int) -> InputDescription:
    if isinstance(value, int | float):
        return NumberDescription(value)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        raise ProgramError(f"input {position} is {type(value).__name__}, not a strided CPU tensor or a number")
    if value.dtype not in CODES:
        raise ProgramError(f"input {position} has dtype {value.dtype}, which is not stored")
    low, high, mean, scale = _range(value)
    keep = not value.is_floating_point() and not value.is_complex() and value.nbytes <= sample_bytes
    sample = base64.b64encode(raw_bytes(value)).decode() if keep else ""
    return TensorDescription(
        CODES[value.dtype], tuple(value.shape), tuple(value.stride()), low, high, mean, scale, sample
    )


def _range(value: torch.Tensor) -> tuple[float, float, float, float]:
    """(low, high, mean, standard deviation) of the finite values, zeros if there are none."""
    plain = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    numbers = plain if plain.is_floating_point() else plain.double()
    low, high = (float(x) for x in torch.aminmax(numbers)) if numbers.numel() else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        numbers = numbers[torch.isfinite(numbers)]
        low, high = (float(x) for x in torch.aminmax(numbers)) if numbers.numel() else (0.0, 0.0)
    if not numbers.numel():
        return 0.0, 0.0, 0.0, 0.0
    variance, mean = torch.var_mean(numbers, correction=0)
    return low, high, float(mean), float(variance) ** 0.5


def _make(description: TensorDescription, generator: torch.Generator, *, use_sample: bool) -> torch.Tensor:
    dtype, sizes = description.torch_dtype, list(description.sizes)
    if use_sample and description.sample:
        values = from_raw_bytes(bytearray(base64.b64decode(description.sample)), dtype, sizes)
    elif dtype.is_floating_point or dtype.is_complex:
        values = _floats(description, generator).to(dtype)
    elif dtype is torch.bool:
        values = torch.rand(sizes, generator=generator) < description.mean
    else:
        values = torch.randint(int(description.low), int(description.high) + 1, sizes, generator=generator, dtype=dtype)
    return values if values.stride() == description.strides else restride(values, description.strides)


def _floats(description: TensorDescription, generator: torch.Generator) -> torch.Tensor:
    """Normal values of the recorded mean and deviation, kept inside the recorded range."""
    parts = (2,) if description.torch_dtype.is_complex else ()
    values = torch.randn((*description.sizes, *parts), generator=generator, dtype=torch.float64)
    values = (values * description.scale + description.mean).clamp_(description.low, description.high)
    return torch.view_as_complex(values) if parts else values
