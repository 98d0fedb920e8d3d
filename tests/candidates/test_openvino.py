"""OpenVINO computes in float32, keeps float32 weights, and leaves Dynamo's settings alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from coexec.backends.candidates import registry
from tests.candidates.checks import assert_same_as_eager, built
from tests.candidates.samples import handmade

pytestmark = pytest.mark.skipif(
    not registry.get("openvino").availability().usable, reason=registry.get("openvino").availability().reason
)


def test_precision_is_single_where_the_processor_offers_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The default precision was wrong by up to 0.14 here: a sum over 4,096 products shows it anywhere it is taken."""
    from coexec.backends.candidates.openvino.heavy import settings

    assert settings(2)["INFERENCE_PRECISION_HINT"] == "f32"
    product = handmade(lambda x, y: (x @ y,), (torch.randn(64, 4096), torch.randn(4096, 64)))
    run = built(registry.get("openvino"), product, tmp_path_factory.mktemp("product"))
    exact = product.inputs[0].double() @ product.inputs[1].double()
    assert (run(*product.inputs)[0] - exact).abs().max() < 1e-3
    lowered = product.inputs[0].bfloat16().double() @ product.inputs[1].bfloat16().double()
    assert (lowered - exact).abs().max() > 1e-2, "the bound above would not tell the precisions apart"


def test_stored_constants_are_not_rounded_to_half_precision(tmp_path_factory: pytest.TempPathFactory) -> None:
    fine = torch.full((64, 64), 1.0) + torch.arange(4096).view(64, 64) * 2.0**-20
    scaled = handmade(lambda x: (x * fine,), (torch.ones(64, 64),))
    folder = tmp_path_factory.mktemp("constant")
    run = built(registry.get("openvino"), scaled, folder)
    assert (folder / "model.bin").stat().st_size >= 4 * 4096
    assert torch.equal(run(*scaled.inputs)[0], fine)


def test_settings_of_dynamo_stay_and_its_torch_module_is_not_imported() -> None:
    code = """
import sys, torch, torch._dynamo
before = torch._dynamo.config.inline_inbuilt_nn_modules
import coexec.backends.candidates.openvino.heavy
assert torch._dynamo.config.inline_inbuilt_nn_modules == before
assert not any(name.startswith("openvino.torch") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_results_of_earlier_calls_are_not_overwritten(stored: Callable[..., object]) -> None:
    artifact = stored("openvino", "mlp")
    assert_same_as_eager(artifact.load(), artifact.program, seeds=(3, 4, 5))  # type: ignore[attr-defined]
