"""What every candidate has to do: eager's numbers from stored files, in another process, without compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coexec.backends.candidates import program_json, registry
from coexec.backends.candidates.candidate import Candidate, CandidateError, captures_constants
from coexec.backends.candidates.tensor_file import write_tensors
from tests.candidates.checks import assert_same_as_eager, built
from tests.candidates.conftest import Stored
from tests.candidates.samples import handmade, inference, kinds, program, training

FAST = ("eager", "torchscript", "optimize-for-inference", "static-runtime", "onnxruntime", "openvino")
COMPILED = ("inductor", "inductor-cpp-wrapper", "inductor-freezing", "aotinductor", "tvm")
SLOW = ("inductor-max-autotune", "tvm-metaschedule")
SAVED = [
    *FAST,
    *(pytest.param(name, marks=pytest.mark.compile) for name in COMPILED),
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
]
Get = Callable[..., Stored]


def test_the_registry_holds_what_is_tested_and_ipex() -> None:
    assert set(registry.candidates()) >= {*FAST, *COMPILED, *SLOW, "ipex"}
    assert all(isinstance(candidate, Candidate) for candidate in registry.candidates().values())
    assert all(json.dumps(dict(c.options_in_key())) for c in registry.candidates().values())


def test_detection_imports_nothing_heavy() -> None:
    code = """
import sys
from coexec.backends.candidates import registry
print([c.availability() for c in registry.candidates().values()])
heavy = {"onnxruntime", "onnx", "openvino", "tvm", "torch._inductor", "torch.onnx", "intel_extension_for_pytorch"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize("name", SAVED)
def test_one_graph_with_everything_gives_eagers_results(name: str, stored: Get) -> None:
    artifact = stored(name)
    assert_same_as_eager(artifact.load(), artifact.program)


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("name", [*COMPILED, "onnxruntime", "openvino"])
def test_each_kind_of_graph_gives_eagers_results(name: str, kind: str, stored: Get) -> None:
    if name == "inductor-freezing" and not program(kind).static_inputs:
        with pytest.raises(CandidateError, match="no static inputs to freeze"):
            stored(name, kind)
        return
    artifact = stored(name, kind)
    assert_same_as_eager(artifact.load(), artifact.program)


@pytest.mark.parametrize("name", ["torchscript", "onnxruntime", "openvino"])
def test_results_that_are_inputs_or_views_of_them_share_their_memory(name: str, tmp_path: Path) -> None:
    if not registry.get(name).availability().usable:
        pytest.skip(registry.get(name).availability().reason)
    shared = handmade(lambda x, y: (torch.sin(x @ y), y, x.t()[1:], None, 3), (torch.randn(3, 4), torch.randn(4, 5)))
    run = built(registry.get(name), shared, tmp_path)
    assert_same_as_eager(run, shared)
    x, y = shared.inputs
    _, second, third, _, _ = run(x, y)
    assert second is y
    assert third.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


IN_ANOTHER_PROCESS = """
import json, os, sys
from pathlib import Path
import torch
import coexec.backends.candidates.registry as registry
from coexec.backends.candidates import program_json
from coexec.backends.candidates.tensor_file import read_tensors
work = Path(sys.argv[1])
os.environ["CC"] = os.environ["CXX"] = "/bin/false"
os.environ["PATH"] = ""
tensors = read_tensors(work / "inputs")
inputs = [tensors[f"i{i}"] for i in range(len(tensors))]
program = program_json.loads((work / "program.json").read_text(), inputs)
for name, folder, metadata in json.loads((work / "stored.json").read_text()):
    run = registry.get(name).load(Path(folder), metadata, program, threads=1)
    for got, expected in zip(run(*inputs), program.run_eagerly(*inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    print(name)
"""


@pytest.mark.compile
def test_stored_artifacts_run_in_another_process_without_a_compiler(stored: Get, tmp_path: Path) -> None:
    """With an empty compiler cache, no PATH, and nothing but the stored program and files."""
    names = [n for n in (*FAST, *COMPILED) if registry.get(n).availability().usable]
    listing = [[n, str(stored(n).folder), dict(stored(n).metadata)] for n in names]
    (tmp_path / "stored.json").write_text(json.dumps(listing))
    (tmp_path / "program.json").write_text(program_json.dumps(program("everything")))
    write_tensors(tmp_path / "inputs", {f"i{i}": t for i, t in enumerate(program("everything").inputs)})
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    arguments = [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS, str(tmp_path)]
    done = subprocess.run(arguments, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == names
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.parametrize("name", SAVED)
def test_files_without_weights_serve_other_weights_and_files_with_them_say_so(name: str, stored: Get) -> None:
    artifact = stored(name)
    static = artifact.program.static_inputs
    other = artifact.program.with_inputs(
        [t * 0.5 if i in static and t.is_floating_point() else t for i, t in enumerate(artifact.program.inputs)]
    )
    if registry.get(name).bakes_constants:
        with pytest.raises(AssertionError):
            assert_same_as_eager(artifact.load(other), other)
    else:
        assert_same_as_eager(artifact.load(other), other)


@pytest.mark.parametrize("name", SAVED)
def test_a_change_of_weights_in_place_is_seen_unless_the_candidate_says_it_captures_them(
    name: str, stored: Get
) -> None:
    artifact = stored(name)
    values = tuple(t.clone() for t in artifact.program.inputs)
    own = artifact.program.with_inputs(values)
    run = artifact.load(own)
    with torch.no_grad():
        for position in own.static_inputs:
            if values[position].is_floating_point():
                values[position].mul_(1.5)
    if not captures_constants(registry.get(name)):
        assert_same_as_eager(run, own)
    elif name != "static-runtime":  # freezes, which may copy a weight, and here does not
        with pytest.raises(AssertionError):
            assert_same_as_eager(run, own)


@pytest.mark.parametrize("name", ["torchscript", "onnxruntime", "openvino", "tvm", "inductor"])
def test_a_batch_of_no_elements_is_right_or_refused(name: str, tmp_path: Path) -> None:
    if not registry.get(name).availability().usable:
        pytest.skip(registry.get(name).availability().reason)
    empty = inference(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), (torch.randn(0, 4),))
    if name in ("torchscript", "inductor"):
        assert_same_as_eager(built(registry.get(name), empty, tmp_path), empty)
    else:
        with pytest.raises(CandidateError, match="without elements"):
            built(registry.get(name), empty, tmp_path)


@pytest.mark.parametrize("name", ["torchscript", "onnxruntime"])
def test_forward_and_backward_graphs_of_training_are_programs_too(name: str, tmp_path: Path) -> None:
    if not registry.get(name).availability().usable:
        pytest.skip(registry.get(name).availability().reason)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    for index, part in enumerate(training(model, (torch.randn(3, 6),))):
        assert_same_as_eager(built(registry.get(name), part, tmp_path / str(index)), part)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_one_artifact_of_a_dynamic_graph_serves_other_sizes(name: str, tmp_path: Path) -> None:
    _assert_dynamic(name, tmp_path)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["inductor", "aotinductor"])
def test_one_compiled_artifact_of_a_dynamic_graph_serves_other_sizes(name: str, tmp_path: Path) -> None:
    _assert_dynamic(name, tmp_path)


def _assert_dynamic(name: str, folder: Path) -> None:
    if not registry.get(name).availability().usable:
        pytest.skip(registry.get(name).availability().reason)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    dynamic = inference(model, (torch.randn(5, 4),), dynamic=True)
    reread = program_json.loads(program_json.dumps(dynamic), dynamic.inputs)
    run = built(registry.get(name), reread, folder)
    for batch in (5, 2, 33):
        inputs = _with_batch(dynamic.inputs, batch)
        for got, expected in zip(run(*inputs), dynamic.run_eagerly(*inputs), strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def _with_batch(inputs: tuple[Any, ...], batch: int) -> list[Any]:
    """The inputs with their batch of 5 replaced, as a number and as a size."""
    return [_other_batch(value, batch) for value in inputs]


def _other_batch(value: Any, batch: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return batch if value == 5 else value
    return torch.randn(batch, *value.shape[1:]) if value.shape[0] == 5 else value
