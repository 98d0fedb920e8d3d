"""Ops with fed numbers, written with 0-dim tensors, and with the roundings of eager's kernels.

Eager converts a Python number to the type in which the kernel computes (float32 for bfloat16 tensors) and rounds the
result once. A 0-dim tensor in the same place would be rounded to the tensors' dtype first, so each op is spelled out:
operands and number are converted to the computation dtype, the formula runs there, the result is converted back.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

from coexec.backends.divisions import toward_zero
from coexec.backends.ops import Fed, Overload, resolve
from coexec.errors import CoexecError

Named = dict[str, Any]
Number = Callable[[int], torch.Tensor]
Formula = Callable[[Named], Any]
"""Computes an op's result from its converted operands by name; an operand is a tensor or a constant number."""

SAMPLES = {torch.float64: 0.5, torch.int64: 1, torch.bool: True, torch.complex128: 0.5j}
"""A Python number of the type that a fed one has: type promotion looks at nothing else."""

NOT_PROMOTED = frozenset({"rounding_mode", "mask", "condition"})
"""Arguments that take no part in type promotion."""


class NotLowerableError(CoexecError):
    """`op` cannot be part of a compiled segment, for `reason`: cut the segment around it."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op} cannot be compiled: {reason}")
        self.op, self.reason = op, reason


def has_fed(named: Named) -> bool:
    """Some argument is a fed number."""
    return any(isinstance(v, Fed) or _has_fed_item(v) for v in named.values())


@functools.cache
def takes_fed(name: str, argument: int) -> bool:
    """Whether argument number `argument` of op `name`, a number, can be an input of a compiled graph."""
    overload = resolve(name)
    base = overload.base.rstrip("_").removeprefix("_foreach_")
    parameter = overload.parameters[argument].name
    if (base == "pow" and parameter == "exponent") or any(p.name == "out" for p in overload.parameters):
        return False
    return base in FORMULAS or base in CREATORS


@functools.cache
def takes_integers(name: str, argument: int) -> bool:
    """Whether argument number `argument` of op `name` is an integer or a list of them by its schema: a size, mostly."""
    return resolve(name).parameters[argument].kind == "int"


def call_fed(name: str, overload: Overload, named: Named, number: Number) -> Any:
    """Run an op of which some numbers are fed.

    Args:
        name: the op, for errors.
        overload: the resolved op.
        named: decoded arguments; fed numbers are :class:`Fed`.
        number: gives the 0-dim tensor of a number input.

    Raises:
        NotLowerableError: the number selects shapes, algorithms or draws, so it cannot be a tensor.
    """
    base = overload.base.rstrip("_")
    if "out" in named:
        raise NotLowerableError(name, "an out= variant with a number that changes has no rule")
    if base.startswith("_foreach_"):
        return _call_foreach(name, overload, named, number)
    if base in CREATORS:
        return CREATORS[base](named, number)
    result = compute(name, base, named, number)
    target: torch.Tensor | None = next((named[p.name] for p in overload.parameters if p.written), None)
    return result if target is None else target.copy_(result)


def compute(name: str, base: str, named: Named, number: Number) -> torch.Tensor:
    """The out-of-place result of elementwise op `base`."""
    if base not in FORMULAS:
        raise NotLowerableError(name, "a number that changes between iterations cannot be a tensor in this op")
    kind, formula = FORMULAS[base]
    filled = {k: number(v.input) if isinstance(v, Fed) else v for k, v in named.items() if v is not None}
    promoted = {k: v for k, v in filled.items() if k not in NOT_PROMOTED and k not in KEEPS_SELF.get(base, ())}
    samples = [SAMPLES[v.dtype] if isinstance(named[k], Fed) else v for k, v in promoted.items()]
    kind = KIND.DEFAULT if base == "div" and named.get("rounding_mode") else kind
    computation, result_dtype = elementwise_dtypes(*samples, type_promotion_kind=kind)
    if base in ROUNDS_NUMBER:
        common = elementwise_dtypes(*samples, type_promotion_kind=KIND.DEFAULT)[1]
        filled = {k: _to(v, common) if isinstance(named[k], Fed) else v for k, v in filled.items()}
    converted = {k: v if k in NOT_PROMOTED else _to(v, computation) for k, v in filled.items()}
    result: torch.Tensor = _to(formula(converted), result_dtype)
    return result


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype != dtype else value


def _add(n: Named) -> Any:
    return n["self"] + _scaled(n)


def _sub(n: Named) -> Any:
    return n["self"] - _scaled(n)


def _rsub(n: Named) -> Any:
    return n["other"] - n["self"] * n["alpha"]


def _scaled(n: Named) -> Any:
    alpha = n.get("alpha", 1)
    return n["other"] * alpha if isinstance(alpha, torch.Tensor) or alpha != 1 else n["other"]


def _div(n: Named) -> Any:
    if n.get("rounding_mode") == "trunc" and not torch.result_type(n["self"], n["other"]).is_floating_point:
        return toward_zero(n["self"], n["other"])
    return torch.div(n["self"], n["other"], rounding_mode=n.get("rounding_mode"))


def _addcmul(n: Named) -> Any:
    return n["self"] + n["value"] * n["tensor1"] * n["tensor2"]


def _addcdiv(n: Named) -> Any:
    return n["self"] + n["value"] * n["tensor1"] / n["tensor2"]


def _lerp(n: Named) -> Any:
    # Eager switches formulas at one half so that both ends are exact.
    start, end, weight = n["self"], n["end"], n["weight"]
    near_start, near_end = start + weight * (end - start), end - (end - start) * (1 - weight)
    return torch.where(torch.as_tensor(weight).abs() < 0.5, near_start, near_end)


def _clamp(n: Named) -> Any:
    # As eager: the upper bound wins when the bounds cross.
    assert "min" in n or "max" in n, sorted(n)
    result = n["self"]
    if "min" in n:
        result = torch.maximum(result, _like(n["min"], result))
    return torch.minimum(result, _like(n["max"], result)) if "max" in n else result


def _like(bound: Any, tensor: torch.Tensor) -> Any:
    return bound if isinstance(bound, torch.Tensor) else torch.full((), bound, dtype=tensor.dtype)


def _fill(n: Named) -> Any:
    return _like(n["value"], n["self"]).expand(n["self"].shape)


def _masked_fill(n: Named) -> Any:
    return torch.where(n["mask"], n["value"], n["self"])


def _where(n: Named) -> Any:
    return torch.where(n["condition"], n["self"], n["other"])


def _pow(n: Named) -> Any:
    if isinstance(n["exponent"], torch.Tensor) and n["exponent"].dim() == 0:
        # Eager has exact special cases (0.5, 2, -1 ...) that a tensor exponent would miss.
        raise NotLowerableError("aten::pow", "the exponent changes between iterations")
    return torch.pow(n["self"], n["exponent"])


def _binary(function: Any) -> Formula:
    return lambda n: function(n["self"], n["other"])


FORMULAS: dict[str, tuple[Any, Formula]] = {
    "add": (KIND.DEFAULT, _add),
    "sub": (KIND.DEFAULT, _sub),
    "rsub": (KIND.DEFAULT, _rsub),
    "mul": (KIND.DEFAULT, _binary(operator.mul)),
    "div": (KIND.INT_TO_FLOAT, _div),
    "true_divide": (KIND.INT_TO_FLOAT, _div),
    "fmod": (KIND.DEFAULT, _binary(torch.fmod)),
    "remainder": (KIND.DEFAULT, _binary(torch.remainder)),
    "maximum": (KIND.DEFAULT, _binary(torch.maximum)),
    "minimum": (KIND.DEFAULT, _binary(torch.minimum)),
    "addcmul": (KIND.DEFAULT, _addcmul),
    "addcdiv": (KIND.DEFAULT, _addcdiv),
    "lerp": (KIND.DEFAULT, _lerp),
    "clamp": (KIND.DEFAULT, _clamp),
    "clamp_min": (KIND.DEFAULT, _clamp),
    "clamp_max": (KIND.DEFAULT, _clamp),
    "fill": (KIND.NO_OPMATH, _fill),
    "masked_fill": (KIND.NO_OPMATH, _masked_fill),
    "where": (KIND.NO_OPMATH, _where),
    "pow": (KIND.DEFAULT, _pow),
    "eq": (KIND.ALWAYS_BOOL, _binary(operator.eq)),
    "ne": (KIND.ALWAYS_BOOL, _binary(operator.ne)),
    "lt": (KIND.ALWAYS_BOOL, _binary(operator.lt)),
    "le": (KIND.ALWAYS_BOOL, _binary(operator.le)),
    "gt": (KIND.ALWAYS_BOOL, _binary(operator.gt)),
    "ge": (KIND.ALWAYS_BOOL, _binary(operator.ge)),
}
"""Elementwise ops by name without the in-place underscore: how types are promoted, and the formula."""

ROUNDS_NUMBER = frozenset(
    {"fmod", "remainder", "maximum", "minimum", "pow", "clamp", "clamp_min", "clamp_max"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)
"""Ops whose kernel gets the number in the tensors' dtype, already rounded; the others compute with it as it is."""

KEEPS_SELF = {"fill": ("value",), "masked_fill": ("value",)}
"""Operands that are converted to self's dtype instead of promoting it."""


def _full(n: Named, number: Number) -> torch.Tensor:
    value = number(n["fill_value"].input)
    if n["dtype"] is None:
        value = _to(value, torch.get_default_dtype()) if value.is_floating_point() else value
    filled = torch.empty(n["size"], dtype=n["dtype"] or value.dtype, device=n["device"])
    return filled.copy_(value)


def _full_like(n: Named, number: Number) -> torch.Tensor:
    layout = n["memory_format"] if n["memory_format"] is not None else torch.preserve_format
    empty = torch.empty_like(n["self"], dtype=n["dtype"], memory_format=layout)
    return empty.copy_(number(n["fill_value"].input))


def _scalar_tensor(n: Named, number: Number) -> torch.Tensor:
    return number(n["s"].input).to(n["dtype"] or torch.get_default_dtype(), copy=True)


CREATORS: dict[str, Callable[[Named, Number], torch.Tensor]] = {
    "full": _full,
    "full_like": _full_like,
    "scalar_tensor": _scalar_tensor,
}
"""Ops that make a tensor from a fed number."""

FOREACH_NAMES = {"tensors1": "end", "scalar": "", "scalars": ""}
"""Arguments that a foreach op calls differently; an empty name is looked up in FOREACH_SCALAR."""

FOREACH_SCALAR = {
    "addcmul": "value", "addcdiv": "value", "lerp": "weight", "pow": "exponent", "clamp_min": "min", "clamp_max": "max",
}  # fmt: skip
"""What the number of a foreach op is in the op that it repeats; "other" where nothing is said."""


def _call_foreach(name: str, overload: Overload, named: Named, number: Number) -> list[torch.Tensor]:
    """One elementwise op per list element."""
    base = overload.base.rstrip("_").removeprefix("_foreach_")
    in_place = any(p.written for p in overload.parameters)
    results = []
    for position, target in enumerate(named["self"]):
        element = {_foreach_name(base, k): _element(v, position) for k, v in named.items()}
        result = compute(name, base, element, number)
        results.append(target.copy_(result) if in_place else result)
    return [] if in_place else results  # an in-place foreach op returns nothing


def _foreach_name(base: str, name: str) -> str:
    return FOREACH_NAMES.get(name, name) or FOREACH_SCALAR.get(base, "other")


def _element(value: Any, position: int) -> Any:
    return value[position] if isinstance(value, list) else value


def _has_fed_item(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Fed) for item in value)
