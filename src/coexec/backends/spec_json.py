"""The JSON form of a segment, and the canonical text of it that keys are made from. Imports no torch.

JSON (one object)::

    {"storages": [{"nbytes": 4096, "external": true}, ...],
     "inputs": [VALUE | {"number": "float64"}, ...],
     "ops": [{"op": "aten::add.Tensor", "args": [ARG, ...], "outs": [VALUE | null, ...]}, ...],
     "outputs": [value id, ...], "mutated": [input index, ...], "mode": "commit" | "functional",
     "publishes": [{"after_op": 3, "value": 7, "channel": 0}, ...], "random": false, "threads": 2}

    VALUE = {"id": 7, "storage": 0, "dtype": "float32", "sizes": [2, 3], "strides": [3, 1], "offset": 0}
    ARG   = {"t": value}                      Tensor
          | {"tl": [value, ...]}              Tensor[]
          | {"otl": [value | null, ...]}      Tensor?[]
          | {"c": CONST}                      anything else that is constant; lists are JSON lists
          | {"n": input}                      fed number as int, float or Scalar
          | {"l": [{"c": CONST} | {"n": input}, ...]}   list of numbers of which some are fed
          | {"w": CONST, "dtype": "float64"}  constant wrapped number
          | {"wn": input, "dtype": "float64"} fed wrapped number
          | {"u": true}                       None or undefined tensor
    CONST = null | bool | int | float | string | [CONST, ...] | {"re": float, "im": float} | {"device": "cpu"}
          | {"f": "inf" | "-inf" | "nan"}     (bare Infinity, -Infinity and NaN are read too)

A float must be written with a point or an exponent, or it is read as an int: ``1.0``, never ``1``.
"""

from __future__ import annotations

import json
import math
from typing import Any

from coexec.backends.spec import (
    Arg,
    Const,
    FedNumber,
    FedWrapped,
    ListArg,
    NumberInput,
    Op,
    Publish,
    SegmentSpec,
    SpecError,
    Storage,
    TensorArg,
    TensorInput,
    TensorListArg,
    Undefined,
    Value,
    WrappedNumber,
)

Json = Any


def dumps(spec: SegmentSpec) -> str:
    """`spec` as one line of JSON."""
    return json.dumps(to_json(spec), separators=(",", ":"), allow_nan=False)


def loads(text: str) -> SegmentSpec:
    """The segment written in `text`. SpecError if the text is no JSON or an entry is unknown."""
    try:
        return from_json(json.loads(text))
    except json.JSONDecodeError as error:
        raise SpecError(f"segment is no JSON: {error}") from error


def to_json(spec: SegmentSpec) -> Json:
    """`spec` as JSON-compatible lists and dicts."""
    return {
        "storages": [{"nbytes": s.nbytes, "external": s.external} for s in spec.storages],
        "inputs": [_value_to_json(i.value) if isinstance(i, TensorInput) else {"number": i.dtype} for i in spec.inputs],
        "ops": [_op_to_json(op) for op in spec.ops],
        "outputs": list(spec.outputs),
        "mutated": list(spec.mutated),
        "mode": spec.mode,
        "publishes": [{"after_op": p.after_op, "value": p.value, "channel": p.channel} for p in spec.publishes],
        "random": spec.random,
        "threads": spec.threads,
    }


def from_json(data: Json) -> SegmentSpec:
    """The segment that :func:`to_json` or the native side wrote. SpecError names a missing or unknown entry."""
    try:
        return SegmentSpec(
            storages=tuple(Storage(s["nbytes"], s["external"]) for s in data["storages"]),
            inputs=tuple(_input_from_json(i) for i in data["inputs"]),
            ops=tuple(_op_from_json(o) for o in data["ops"]),
            outputs=tuple(data["outputs"]),
            mutated=tuple(data["mutated"]),
            mode=data["mode"],
            publishes=tuple(Publish(p["after_op"], p["value"], p["channel"]) for p in data["publishes"]),
            random=data["random"],
            threads=data["threads"],
        )
    except (KeyError, TypeError) as error:
        raise SpecError(f"segment JSON lacks or misuses {error}: see coexec/backends/spec_json.py") from error


def _value_to_json(value: Value) -> Json:
    return {
        "id": value.id,
        "storage": value.storage,
        "dtype": value.dtype,
        "sizes": list(value.sizes),
        "strides": list(value.strides),
        "offset": value.offset,
    }


def _value_from_json(data: Json) -> Value:
    return Value(
        data["id"], data["storage"], data["dtype"], tuple(data["sizes"]), tuple(data["strides"]), data.get("offset", 0)
    )


def _input_from_json(data: Json) -> TensorInput | NumberInput:
    return NumberInput(data["number"]) if "number" in data else TensorInput(_value_from_json(data))


def _op_to_json(op: Op) -> Json:
    outs = [None if out is None else _value_to_json(out) for out in op.outs]
    return {"op": op.op, "args": [_arg_to_json(a) for a in op.args], "outs": outs}


def _op_from_json(data: Json) -> Op:
    outs = tuple(None if out is None else _value_from_json(out) for out in data["outs"])
    return Op(data["op"], tuple(_arg_from_json(a) for a in data["args"]), outs)


def _arg_to_json(arg: Arg) -> Json:
    match arg:
        case TensorArg(value):
            return {"t": value}
        case TensorListArg(values, optional):
            return {"otl" if optional else "tl": list(values)}
        case Const(value, "device"):
            return {"c": {"device": value}}
        case Const(value, _):
            return {"c": _const_to_json(value)}
        case FedNumber(position):
            return {"n": position}
        case ListArg(items):
            return {"l": [_arg_to_json(i) for i in items]}
        case WrappedNumber(value, dtype):
            return {"w": _const_to_json(value), "dtype": dtype}
        case FedWrapped(position, dtype):
            return {"wn": position, "dtype": dtype}
        case Undefined():
            return {"u": True}


def _arg_from_json(data: Json) -> Arg:
    match data:
        case {"t": value}:
            return TensorArg(value)
        case {"tl": values}:
            return TensorListArg(tuple(values))
        case {"otl": values}:
            return TensorListArg(tuple(values), optional=True)
        case {"c": {"device": name}}:
            return Const(name, "device")
        case {"c": value}:
            return Const(_const_from_json(value))
        case {"n": position}:
            return FedNumber(position)
        case {"l": items}:
            return ListArg(tuple(_item_from_json(i) for i in items))
        case {"w": value, "dtype": dtype}:
            return WrappedNumber(_const_from_json(value), dtype)
        case {"wn": position, "dtype": dtype}:
            return FedWrapped(position, dtype)
        case {"u": _}:
            return Undefined()
    raise SpecError(f"argument {data!r} is none of t, tl, otl, c, n, l, w, wn, u")


def _item_from_json(data: Json) -> Const | FedNumber:
    return FedNumber(data["n"]) if "n" in data else Const(_const_from_json(data["c"]))


def _const_to_json(value: Any) -> Json:
    if isinstance(value, tuple):
        return [_const_to_json(v) for v in value]
    if isinstance(value, complex):
        return {"re": _const_to_json(value.real), "im": _const_to_json(value.imag)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"f": repr(value)}
    return value


def _const_from_json(data: Json) -> Any:
    match data:
        case list():
            return tuple(_const_from_json(v) for v in data)
        case {"re": real, "im": imag}:
            return complex(_const_from_json(real), _const_from_json(imag))
        case {"f": name}:
            return float(name)
    return data


def canonical_text(spec: SegmentSpec, with_bytes: bool = True) -> str:
    """A readable text that two segments share exactly if one artifact serves both: values are renumbered in order of
    definition and storages in order of appearance, so the caller's numbering does not matter.

    Args:
        spec: the segment.
        with_bytes: say how large storages are.
    """
    return "\n".join(_Canonical(spec, with_bytes).lines()) + "\n"


class _Canonical:
    """Renumbers while printing: one line per storage use, input, op, result and publish."""

    def __init__(self, spec: SegmentSpec, with_bytes: bool) -> None:
        self.spec, self.with_bytes = spec, with_bytes
        self.value_names: dict[int, str] = {}  # caller's value id -> "v0", "v1", ...
        self.storage_names: dict[int, str] = {}  # caller's storage -> "s0", ...

    def lines(self) -> list[str]:
        spec = self.spec
        lines = [f"segment mode={spec.mode} random={spec.random} threads={spec.threads}"]
        lines += [f"input {n} {self._input(entry)}" for n, entry in enumerate(spec.inputs)]
        lines += [self._op(op) for op in spec.ops]
        lines += [f"storage {name} {self._storage(index)}" for index, name in self.storage_names.items()]
        lines.append("outputs " + " ".join(self.value_names[v] for v in spec.outputs))
        lines.append("mutated " + " ".join(map(str, spec.mutated)))
        lines += [f"publish after={p.after_op} {self.value_names[p.value]} channel={p.channel}" for p in spec.publishes]
        return lines

    def _input(self, entry: TensorInput | NumberInput) -> str:
        return self._define(entry.value) if isinstance(entry, TensorInput) else f"number {entry.dtype}"

    def _storage(self, index: int) -> str:
        storage = self.spec.storages[index]
        size = f"{storage.nbytes} " if self.with_bytes else ""
        return f"{size}{'external' if storage.external else 'internal'}"

    def _define(self, value: Value) -> str:
        name = self.value_names.setdefault(value.id, f"v{len(self.value_names)}")
        storage = self.storage_names.setdefault(value.storage, f"s{len(self.storage_names)}")
        return f"{name}={value.dtype}{list(value.sizes)}{list(value.strides)}+{value.offset}@{storage}"

    def _op(self, op: Op) -> str:
        args = ", ".join(self._arg(a) for a in op.args)
        outs = ", ".join("none" if out is None else self._define(out) for out in op.outs)
        return f"{op.op}({args}) -> {outs}"

    def _arg(self, arg: Arg) -> str:
        match arg:
            case TensorArg(value):
                return self.value_names[value]
            case TensorListArg(values, optional):
                names = " ".join("none" if v is None else self.value_names[v] for v in values)
                return f"{'?' if optional else ''}[{names}]"
            case Const(value, "device"):
                return f"device:{value}"
            case Const(value, _):
                return repr(value)  # repr tells 1, 1.0 and True apart, and floats survive a round trip
            case FedNumber(position):
                return f"fed:{position}"
            case ListArg(items):
                return "[" + " ".join(self._arg(i) for i in items) + "]"
            case WrappedNumber(value, dtype):
                return f"wrapped:{value!r}:{dtype}"
            case FedWrapped(position, dtype):
                return f"fed_wrapped:{position}:{dtype}"
            case Undefined():
                return "none"
