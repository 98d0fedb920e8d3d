"""BERT for classification, with scikit-learn's metrics computed on each training batch inside the step.

A text is positive if tokens of the upper half of the vocabulary are in the majority.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor, nn

from benchmarks.programs import bert
from benchmarks.programs.program import Program, seed_everything

CLASSES = 2
CLS, FIRST_WORD = 1, 2

Batch = tuple[Tensor, Tensor, Tensor]  # tokens and mask int64[batch, length], labels int64[batch]


class BertForClassification(nn.Module):
    """Logits float32[batch, CLASSES] from the first token's vector."""

    def __init__(self, sizes: bert.Sizes) -> None:
        super().__init__()
        self.encoder = bert.Encoder(sizes)
        self.pooler = nn.Linear(sizes.width, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.classifier = nn.Linear(sizes.width, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(tokens, torch.zeros_like(tokens), mask)
        pooled = torch.tanh(self.pooler(states[:, 0]))
        return self.classifier(self.dropout(pooled))


class RunningMetrics:
    """Accuracy, F1 and the share of positive guesses, averaged with a decay: NumPy and scikit-learn, no torch."""

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.values: dict[str, float] = {}

    def update(self, guesses: np.ndarray, labels: np.ndarray) -> None:
        """Takes in one batch, int64[batch] each."""
        now = {
            "accuracy": float(accuracy_score(labels, guesses)),
            "f1": float(f1_score(labels, guesses, zero_division=0.0)),
            "positive": float(np.mean(guesses)),
        }
        for name, value in now.items():
            self.values[name] = self.decay * self.values.get(name, value) + (1.0 - self.decay) * value


def texts(seed: int, sizes: bert.Sizes) -> Iterator[Batch]:
    """Yields texts with labels, for ever."""
    generator = torch.Generator().manual_seed(seed)
    middle = (FIRST_WORD + sizes.vocabulary) // 2
    while True:
        tokens = torch.randint(FIRST_WORD, sizes.vocabulary, (sizes.batch, sizes.length), generator=generator)
        tokens[:, 0] = CLS
        lengths = torch.randint(sizes.length // 2, sizes.length + 1, (sizes.batch, 1), generator=generator)
        mask = (torch.arange(sizes.length) < lengths).long()
        high = ((tokens >= middle) * mask).sum(1)
        yield tokens * mask, mask, (2 * high > mask.sum(1)).long()


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    sizes = bert.TINY if tiny else bert.Sizes()
    model = BertForClassification(sizes)
    optimizer, schedule = bert.fine_tuning(model)
    metrics = RunningMetrics()
    losses: list[float] = []

    def step(batch: Batch) -> float:
        tokens, mask, labels = batch
        logits = model(tokens, mask)
        loss = F.cross_entropy(logits, labels)
        metrics.update(logits.detach().argmax(dim=-1).numpy(), labels.numpy())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return losses[-1]

    extras = {"schedule": schedule, "metrics": metrics.values, "losses": losses}
    return Program(step, texts(seed, sizes), {"model": model}, {"optimizer": optimizer}, extras)
