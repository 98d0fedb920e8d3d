"""The second key: threads, versions, CPU features, switches and the code of custom ops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coexec.subgraphs import code_hash, cpu, machine
from coexec.subgraphs.environment import Environment
from coexec.subgraphs.errors import UnkeyableGraphError
from coexec.subgraphs.machine import current_environment
from coexec.subgraphs.near_miss import explain_difference


def changed(left: Environment, right: Environment) -> list[str]:
    return [difference.entry for difference in explain_difference(left.text, right.text)]


def test_the_same_process_has_the_same_environment() -> None:
    assert current_environment() == current_environment()
    assert changed(current_environment(), current_environment()) == []


def test_another_thread_count_is_another_environment() -> None:
    assert changed(current_environment(threads=1), current_environment(threads=2)) == ["threads"]


def test_the_thread_count_in_force_is_the_default() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert current_environment() == current_environment(threads=1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("entry", ["torch", "cpu.features", "python"])
def test_another_torch_cpu_or_python_is_another_environment(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = current_environment()
    entries = machine._platform_entries()
    monkeypatch.setattr(machine, "_platform_entries", lambda: {**entries, entry: "another"})
    assert changed(here, current_environment()) == [entry]


def test_another_backend_version_is_another_environment() -> None:
    old, new = (current_environment(backends={"onnxruntime": version}) for version in ("1.31", "1.32"))
    assert changed(old, new) == ["backend.onnxruntime"]


def test_another_lowering_is_another_environment() -> None:
    assert changed(current_environment(lowering="1"), current_environment(lowering="2")) == ["lowering"]


def test_a_switch_that_changes_results_is_in_the_environment() -> None:
    here = current_environment()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert changed(here, current_environment()) == ["switch.float32_matmul_precision"]
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_environment_says_what_it_is_made_of() -> None:
    entries = current_environment().entries()
    assert entries["torch"].startswith(torch.__version__)
    assert entries["cpu.capability"] == torch.backends.cpu.get_cpu_capability()


def test_no_backend_is_imported_to_learn_its_version() -> None:
    """intel-extension-for-pytorch#272: merely importing a backend breaks others."""
    code = (
        "import sys; from coexec.subgraphs.machine import current_environment; current_environment();"
        "print([m for m in ('onnxruntime', 'openvino', 'tvm', 'intel_extension_for_pytorch') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"


# CPU features --------------------------------------------------------------------------------------------------------


def test_features_are_those_that_every_core_has() -> None:
    text = (
        "processor: 0\nflags\t\t: fpu sse4_2 avx2 avx512f mitigated\nprocessor: 1\nflags\t\t: fpu sse4_2 avx2 other\n"
    )
    assert cpu._flags(text) == ("avx2", "sse4_2")


def test_arm_features_are_read() -> None:
    assert cpu._flags("Features\t: fp asimd sve cpuid\n") == ("asimd", "fp", "sve")


def test_risc_v_extensions_are_read() -> None:
    assert cpu._flags("isa\t\t: rv64imafdcv_zba_zvfh\n") == ("zvfh",)


def test_a_machine_without_cpuinfo_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CPUINFO", Path("/nonexistent"))
    assert cpu.cpu_features.__wrapped__()


# Custom ops ----------------------------------------------------------------------------------------------------------


def test_the_code_of_a_custom_op_is_in_the_environment() -> None:
    """pytorch#144344: a stale graph was reused after the Python of the custom op in it had changed."""

    def define(factor: int) -> str:
        space: dict[str, object] = {"torch": torch, "__name__": "users_module"}
        body = f"def scale(x: torch.Tensor) -> torch.Tensor: return x * {factor}"
        exec(body, space)
        torch.library.custom_op("coexec_test::scale", space["scale"], mutates_args=())  # type: ignore[arg-type]
        return code_hash.op_code_hash("coexec_test::scale")

    assert define(2) != define(3)
    assert changed(current_environment(), current_environment(custom_ops=["coexec_test::scale"])) == [
        "op.coexec_test::scale"
    ]


def test_the_file_of_an_op_defined_with_a_library_is_in_its_hash(tmp_path: Path) -> None:
    def hashed(body: str) -> str:
        module = tmp_path / "library_op.py"
        module.write_text(
            "import torch\nlib = torch.library.Library('coexec_lib', 'FRAGMENT')\n"
            f"lib.define('g(Tensor x) -> Tensor')\nlib.impl('g', lambda x: {body}, 'CPU')\n"
            "from coexec.subgraphs.code_hash import op_code_hash\nprint(op_code_hash('coexec_lib::g'))\n"
        )
        result = subprocess.run([sys.executable, str(module)], capture_output=True, text=True, check=True, timeout=120)
        return result.stdout

    assert hashed("x * 2") == hashed("x * 2")
    assert hashed("x * 2") != hashed("x * 3")


def test_an_op_without_findable_code_is_not_cached_until_its_version_is_declared() -> None:
    with pytest.raises(UnkeyableGraphError, match="declare_op_code"):
        current_environment(custom_ops=["coexec_nowhere::op"])
    code_hash.declare_op_code("coexec_nowhere::op", "1")
    one = current_environment(custom_ops=["coexec_nowhere::op"])
    code_hash.declare_op_code("coexec_nowhere::op", "2")
    assert one != current_environment(custom_ops=["coexec_nowhere::op"])


def test_ops_of_torch_need_no_code() -> None:
    assert not code_hash.is_custom("aten::relu")
    assert code_hash.is_custom("torchvision::nms")
