"""All models by name, and how one is built: seeded, batch norms settled, in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import (
    audio,
    classifiers,
    control,
    graphs,
    language,
    mobile,
    pictures,
    recommenders,
    recurrent,
)
from benchmarks.models.build import Built

FAMILIES = {
    "convolutional": classifiers.MODELS | mobile.MODELS | pictures.MODELS,
    "language": language.MODELS,
    "recurrent": recurrent.MODELS,
    "recommendation": recommenders.MODELS,
    "graph": graphs.MODELS,
    "control": control.MODELS,
    "audio": audio.MODELS,
}
MODELS: dict[str, Callable[[], Built]] = {name: make for family in FAMILIES.values() for name, make in family.items()}
TRAINED = ("minilm", "resemblyzer", "crepe_tiny", "silero_vad")
"""Models with trained weights, which need packages of their own."""

SETTLING_BATCH = 4
LARGER_BATCH = 8


@dataclass(frozen=True, slots=True)
class Model:
    """One built model."""

    name: str
    family: str
    module: nn.Module  # in eval mode
    make_inputs: Callable[[int], tuple[Tensor, ...]]

    def inputs(self, batch: int, seed: int = 1) -> tuple[Tensor, ...]:
        """Example inputs, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_inputs(batch)


def family_of(name: str) -> str:
    """The family of a model."""
    return next(family for family, models in FAMILIES.items() if name in models)


def build(name: str) -> Model:
    """Builds a model; two processes get the same weights. Errors: Missing names the package that it needs."""
    torch.manual_seed(0)
    module, make_inputs = MODELS[name]()
    model = Model(name, family_of(name), module.eval(), make_inputs)
    if name not in TRAINED:
        settle_batch_norms(model)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return model


def settle_batch_norms(model: Model) -> None:
    """Gives batch norms the statistics of a batch, as training would: with the initial ones, signals explode."""
    norms = [module for module in model.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None  # the plain mean, not an exponential one
        norm.train()
    with torch.no_grad():
        if norms:
            model.module(*model.inputs(SETTLING_BATCH))
    for norm in norms:
        norm.momentum = 0.1
        norm.eval()


def outputs_of(value: object) -> list[Tensor]:
    """All tensors of a model's result, in order."""
    if isinstance(value, Tensor):
        return [value]
    assert isinstance(value, list | tuple), f"a model of the catalog returned a {type(value).__name__}"
    return [tensor for part in value for tensor in outputs_of(part)]
