"""The models of the inference benchmark: each runs, gives what its name promises, and is the same in two builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.models import catalog
from benchmarks.models.build import Missing

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "albert": [(1, 64, 256)],
    "bart": [(1, 16, 256)],
    "bert_masked_lm": [(1, 64, 1000)],
    "cyclegan": [(1, 3, 96, 96)],
    "dcgan_generator": [(1, 3, 64, 64)],
    "dcgan_discriminator": [(1, 1)],
    "conv_tasnet": [(1, 2, 2000)],
    "crepe_tiny": [(4, 360)],
    "deepspeech": [(1, 60, 29)],
    "gat": [(200, 7)],
    "gin": [(1, 2)],
    "impala": [(1, 15), (1, 1), (1, 256), (1, 256)],
    "minilm": [(1, 384)],
    "nerf": [(1, 256, 4)],
    "resemblyzer": [(1, 256)],
    "resnet50": [(1, 1000)],
    "sac_actor": [(1, 6), (1, 6), (1,)],
    "silero_vad": [(1, 1), (2, 1, 128)],
    "super_resolution": [(1, 1, 192, 192)],
    "two_towers": [(32, 32)],
    "unet": [(1, 4, 96, 96)],
    "vocoder": [(1, 1, 2048)],
    "wav2vec2": [(1, 49, 256)],
    "yolo_tiny": [(1, 48, 85), (1, 192, 85)],
}
PARAMETERS_M = {"resnet18": 11.69, "resnet50": 25.56, "densenet121": 7.98, "mobilenet_v2": 3.50, "squeezenet": 1.24}
"""Millions of parameters as published for the net of that name with 1000 classes."""
PARAMETERS_M |= {"efficientnet_b0": 5.29, "mobilenet_v3_large": 5.48, "shufflenet_v2": 2.28, "resnext50": 25.03}


pytestmark = pytest.mark.usefixtures("one_thread")


def built(name: str) -> catalog.Model:
    try:
        return catalog.build(name)
    except Missing as problem:
        pytest.skip(str(problem))


def run(model: catalog.Model, batch: int = 1) -> list[Tensor]:
    with torch.no_grad():
        return catalog.outputs_of(model.module(*model.inputs(batch)))


def test_there_are_enough_models_of_every_family() -> None:
    assert len(catalog.MODELS) >= 47
    assert sum(len(models) for models in catalog.FAMILIES.values()) == len(catalog.MODELS), "a name is used twice"
    assert all(len(models) >= 5 for models in catalog.FAMILIES.values())
    assert set(SHAPES) | set(PARAMETERS_M) | set(catalog.TRAINED) <= set(catalog.MODELS)


@pytest.mark.parametrize("name", catalog.MODELS)
def test_model_runs_eagerly(name: str) -> None:
    model = built(name)
    outputs = run(model)
    assert outputs
    assert all(bool(output.isfinite().all()) and output.dtype == torch.float32 for output in outputs)
    assert max(float(output.abs().max()) for output in outputs) < 100
    if name in SHAPES:
        assert [tuple(output.shape) for output in outputs] == SHAPES[name]
    assert not any(module.training for module in model.module.modules())


@pytest.mark.parametrize("name", PARAMETERS_M)
def test_model_has_the_published_size(name: str) -> None:
    module, _ = catalog.MODELS[name]()
    millions = sum(parameter.numel() for parameter in module.parameters()) / 1e6
    assert millions == pytest.approx(PARAMETERS_M[name], abs=0.01)


@pytest.mark.parametrize("name", ["lenet", "dlrm", "graphsage", "gru_tagger", "tabular_resnet"])
def test_two_builds_agree_and_samples_do_not_depend_on_the_rest_of_a_batch(name: str) -> None:
    first, second = built(name), built(name)
    for one, other in zip(run(first), run(second), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    both = first.inputs(2)
    if name != "graphsage":  # its batch is one graph, its inputs have no batch dimension
        half = tuple(value[: len(value) // 2] for value in both)
        with torch.no_grad():
            alone, together = first.module(*half), first.module(*both)
        torch.testing.assert_close(together[: len(alone)], alone)


def test_settled_batch_norms_hold_the_statistics_of_their_inputs() -> None:
    model = built("resnet18")
    seen: dict[str, Any] = {}
    norm = next(m for m in model.module.modules() if isinstance(m, torch.nn.BatchNorm2d))
    norm.register_forward_pre_hook(lambda module, arguments: seen.update(x=arguments[0]))
    run(model, catalog.SETTLING_BATCH)
    torch.testing.assert_close(norm.running_mean, seen["x"].mean((0, 2, 3)))
    assert norm.momentum == 0.1
