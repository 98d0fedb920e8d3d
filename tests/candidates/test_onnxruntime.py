"""ONNX Runtime: workers do not spin, models hold neither weights nor the builder's file names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import CandidateError
from tests.candidates.checks import assert_same_as_eager, built
from tests.candidates.samples import handmade, inference, program

pytestmark = pytest.mark.skipif(
    not registry.get("onnxruntime").availability().usable, reason=registry.get("onnxruntime").availability().reason
)


def test_workers_do_not_spin_between_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import onnxruntime

    seen: list[Any] = []
    real = onnxruntime.InferenceSession

    def session(path: str, options: Any, **given: Any) -> Any:
        seen.append(options)
        return real(path, options, **given)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    built(registry.get("onnxruntime"), program("mlp"), tmp_path)
    assert len(seen) == 2  # once to see that the runtime takes the model, once to serve
    for options in seen:
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)


def test_a_model_holds_no_weights_and_nothing_of_the_machine(tmp_path: Path) -> None:
    big = inference(torch.nn.Linear(256, 256), (torch.randn(2, 256),))
    built(registry.get("onnxruntime"), big, tmp_path)
    content = (tmp_path / "model.onnx").read_bytes()
    assert len(content) < 8000
    assert b".py" not in content


def test_memory_of_weights_stays_alive_when_the_caller_drops_it(stored: Callable[..., Any]) -> None:
    artifact = stored("onnxruntime", "conv")
    own = artifact.program.with_inputs([t.clone() for t in artifact.program.inputs])
    run = artifact.load(own)
    del own
    junk = [torch.full((8, 3, 3, 3), float("nan")) for _ in range(200)]
    assert_same_as_eager(run, artifact.program)
    assert len(junk) == 200


def test_a_dtype_without_an_onnx_type_is_refused_with_the_reason(tmp_path: Path) -> None:
    complex_graph = handmade(lambda x: (x * x,), (torch.randn(4, dtype=torch.complex64),))
    with pytest.raises(CandidateError, match=r"complex64|onnx"):
        built(registry.get("onnxruntime"), complex_graph, tmp_path)


def test_sums_into_repeated_rows_on_several_threads_are_refused(tmp_path: Path) -> None:
    """Its threads add to one element at once: a call in ten loses updates, which no check of a few calls finds."""
    rows, values = torch.randint(0, 50, (4000,)), torch.randn(4000, 16)
    graph = handmade(lambda x, i, v: (x.index_add(0, i, v),), (torch.zeros(50, 16), rows, values))
    with pytest.raises(CandidateError, match=r"ScatterND with reduction='add' loses updates on 2 threads"):
        built(registry.get("onnxruntime"), graph, tmp_path, threads=2)
    run = built(registry.get("onnxruntime"), graph, tmp_path, threads=1)
    for _ in range(40):
        assert_same_as_eager(run, graph)
