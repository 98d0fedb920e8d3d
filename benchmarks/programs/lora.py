"""LoRA (Hu et al. 2022) on a Hugging Face Llama: the base is frozen, gradients of two micro-batches are accumulated.

The base has random weights: nothing is downloaded. Its language is made of a few repeated phrases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.programs.program import Program, seed_everything

VOCABULARY, IGNORED, PAD = 512, -100, 0
RANK, ALPHA, TARGETS = 8, 16.0, ("q_proj", "v_proj")
MICRO_BATCHES, WARMUP = 2, 50

Batch = list[dict[str, Tensor]]  # per micro-batch: input_ids, attention_mask, labels, int64[batch, time] each


class LoRALinear(nn.Module):
    """A frozen linear layer, and a trained product of two narrow matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(RANK, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, RANK))
        self.dropout = nn.Dropout(0.05)
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (self.dropout(x) @ self.lora_a.t() @ self.lora_b.t()) * (ALPHA / RANK)


def add_adapters(model: nn.Module) -> list[nn.Parameter]:
    """Freezes the model, puts an adapter beside each target layer, and returns the adapters' parameters."""
    model.requires_grad_(False)
    targets = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in TARGETS and isinstance(child, nn.Linear)
    ]
    for parent, name, child in targets:
        setattr(parent, name, LoRALinear(child))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def base_model(width: int, layers: int) -> nn.Module:
    """Returns a small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=PAD,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def phrases(seed: int, batch: int, time: int) -> Iterator[Batch]:
    """Yields micro-batches padded to one length, for ever; padding is not learned."""
    generator = torch.Generator().manual_seed(seed)
    book = torch.randint(1, VOCABULARY, (16, 8), generator=generator)
    while True:
        micro = []
        for _ in range(MICRO_BATCHES):
            ids = book[torch.randint(len(book), (batch, math.ceil(time / 8)), generator=generator)].flatten(1)[:, :time]
            lengths = torch.randint(time * 3 // 4, time + 1, (batch, 1), generator=generator)
            mask = (torch.arange(time) < lengths).long()
            labels = ids.masked_fill(mask == 0, IGNORED)
            micro.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
        yield micro


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, layers, batch, time = (32, 1, 2, 16) if tiny else (128, 4, 2, 64)
    model = base_model(width, layers)
    adapters = add_adapters(model)
    model.train()
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    losses: list[float] = []

    def step(micro_batches: Batch) -> float:
        total = 0.0
        for inputs in micro_batches:
            loss = model(**inputs).loss / len(micro_batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
        return total

    extras = {"schedule": schedule, "losses": losses}
    return Program(step, phrases(seed, batch, time), {"model": model}, {"optimizer": optimizer}, extras)
