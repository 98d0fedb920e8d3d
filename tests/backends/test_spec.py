"""A segment survives JSON, its text ignores the caller's numbering, and the checker names what is wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from coexec.backends.spec import (
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
    check_spec,
)
from coexec.backends.spec_json import canonical_text, dumps, loads


def small_spec(first: int = 0, swap: bool = False) -> SegmentSpec:
    """One input, one fed number, two ops. `first` shifts value ids, `swap` numbers the storages the other way."""
    inside, outside = (0, 1) if swap else (1, 0)
    storages = [Storage(24, True), Storage(24, False)]
    x = Value(first, outside, "float32", (2, 3), (3, 1))
    y = Value(first + 1, inside, "float32", (2, 3), (3, 1))
    return SegmentSpec(
        storages=tuple(reversed(storages) if swap else storages),
        inputs=(TensorInput(x), NumberInput("float64")),
        ops=(
            Op("aten::mul.Tensor", (TensorArg(x.id), FedWrapped(1, "float64")), (y,)),
            Op("aten::add_.Tensor", (TensorArg(x.id), TensorArg(y.id), FedNumber(1)), (x,)),
        ),
        outputs=(y.id,),
        mutated=(0,),
        publishes=(Publish(0, y.id, 4),),
    )


def test_every_argument_form_survives_json() -> None:
    args = (
        TensorArg(0), TensorListArg((0, 0)), TensorListArg((0, None), True), Const(None), Const(True), Const(2),
        Const(2.0), Const(math.inf), Const(-math.inf), Const(-0.0), Const("mean"), Const((1, 2.5)), Const(1 + 2j),
        Const("cpu", "device"), FedNumber(1), ListArg((Const(0.5), FedNumber(1))), WrappedNumber(3, "int64"),
        WrappedNumber(math.inf, "float64"), FedWrapped(1, "float64"), Undefined(),
    )  # fmt: skip
    spec = small_spec()
    spec = replace(spec, ops=(*spec.ops, Op("aten::anything", args, (None,))))
    again = loads(dumps(spec))
    assert again == spec
    kinds = [type(a.value) for a in again.ops[-1].args if isinstance(a, Const)]
    assert kinds[:4] == [type(None), bool, int, float]  # 2 == 2.0 in Python: compare the types too
    assert canonical_text(again) == canonical_text(spec)


def test_nan_survives_json() -> None:
    spec = replace(small_spec(), ops=(Op("aten::full", (Const(math.nan),), ()),), outputs=(), publishes=())
    constant = loads(dumps(spec)).ops[0].args[0]
    assert isinstance(constant, Const)
    assert isinstance(constant.value, float)
    assert math.isnan(constant.value)
    json.loads(dumps(spec), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_text_ignores_numbering_and_tells_types_apart() -> None:
    assert canonical_text(small_spec()) == canonical_text(small_spec(first=40, swap=True))
    for other in (
        replace(small_spec(), threads=2),
        replace(small_spec(), mode="commit"),
        replace(small_spec(), inputs=(small_spec().inputs[0], NumberInput("int64"))),
    ):
        assert canonical_text(other) != canonical_text(small_spec())
    bare = replace(small_spec(), outputs=(), publishes=())
    texts = {canonical_text(replace(bare, ops=(Op("o", (Const(c),), ()),))) for c in (1, 1.0, True)}
    assert len(texts) == 3


def test_a_good_segment_passes() -> None:
    check_spec(small_spec())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "threads is 0"),
        ({"mode": "later"}, "mode 'later'"),
        ({"outputs": (9,)}, "output 9"),
        ({"outputs": (1, 1)}, "shares storage"),
        ({"mutated": (1,)}, "mutated input 1"),
        ({"mutated": (0, 0)}, "repeat"),
        ({"publishes": (Publish(1, 1, 0), Publish(0, 1, 1))}, "sort them"),
        ({"publishes": (Publish(-1, 1, 0),)}, "before it is defined"),
        ({"storages": (Storage(8, True), Storage(24, False))}, "ends at byte 24"),
        ({"storages": (Storage(24, True), Storage(24, True))}, "no input lies in it"),
        ({"ops": (Op("o", (TensorArg(5),), ()),)}, "reads value 5"),
        ({"ops": (Op("o", (FedNumber(0),), ()),)}, "no number input"),
        ({"ops": (Op("o", (), (Value(0, 0, "float32", (6,), (1,)),)),)}, "another geometry"),
        ({"ops": (Op("o", (), (Value(3, 0, "quint8", (6,), (1,)),)),)}, "dtype 'quint8'"),
        ({"inputs": (small_spec().inputs[0], NumberInput("float32"))}, "fed number of dtype"),
    ],
)
def test_the_checker_names_what_is_wrong(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_spec(replace(small_spec(), **change))  # type: ignore[arg-type]


def test_bad_json_is_a_spec_error() -> None:
    for text in ("{", "{}", '{"storages": [], "inputs": [], "ops": [{"op": "x", "args": [{"q": 1}], "outs": []}]}'):
        with pytest.raises(SpecError):
            loads(text)
