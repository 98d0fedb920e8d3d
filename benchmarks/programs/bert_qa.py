"""BERT for question answering: where does the answer begin and end? Synthetic texts, padded to one length.

A question is two tokens; its answer is the passage's span between these two. What the model learns is to find them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs import bert
from benchmarks.programs.program import Program, seed_everything

CLS, SEP, FIRST_WORD = 1, 2, 3
QUESTION = 4  # tokens of [CLS] question [SEP]

Batch = dict[str, Tensor]  # tokens, segments, mask: int64[batch, length]; starts, ends: int64[batch]


class BertForQuestionAnswering(nn.Module):
    """Returns the loss if the answers are given, and the logits of start and end, float32[batch, length] each."""

    def __init__(self, sizes: bert.Sizes) -> None:
        super().__init__()
        self.encoder = bert.Encoder(sizes)
        self.outputs = nn.Linear(sizes.width, 2)

    def forward(
        self, tokens: Tensor, segments: Tensor, mask: Tensor, starts: Tensor | None = None, ends: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        logits = self.outputs(self.encoder(tokens, segments, mask))
        start_logits, end_logits = (part.squeeze(-1).contiguous() for part in logits.split(1, dim=-1))
        if starts is None or ends is None:
            return None, start_logits, end_logits
        outside = start_logits.size(1)  # an answer that was cut off counts for nothing
        starts, ends = starts.clamp(0, outside), ends.clamp(0, outside)
        start_loss = F.cross_entropy(start_logits, starts, ignore_index=outside)
        end_loss = F.cross_entropy(end_logits, ends, ignore_index=outside)
        return (start_loss + end_loss) / 2, start_logits, end_logits


def texts(seed: int, sizes: bert.Sizes) -> Iterator[Batch]:
    """Yields questions with their passages, for ever."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    while True:
        tokens = torch.zeros(sizes.batch, sizes.length, dtype=torch.int64)
        segments, starts, ends = torch.zeros_like(tokens), [], []
        for row in tokens:
            length = draw(sizes.length * 3 // 4, sizes.length + 1)
            row[:length] = torch.randint(FIRST_WORD, sizes.vocabulary, (length,), generator=generator)
            start = draw(QUESTION, length - 2)
            end = min(length - 1, start + draw(1, 6))
            row[:QUESTION] = torch.tensor([CLS, row[start], row[end], SEP])
            starts.append(start)
            ends.append(end)
        segments[:, QUESTION:] = 1
        mask = (tokens != 0).long()
        answers = {"starts": torch.tensor(starts), "ends": torch.tensor(ends)}
        yield {"tokens": tokens, "segments": segments * mask, "mask": mask, **answers}


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    sizes = bert.TINY if tiny else bert.Sizes()
    model = BertForQuestionAnswering(sizes)
    optimizer, schedule = bert.fine_tuning(model)
    losses: list[float] = []

    def step(batch: Batch) -> float:
        model.train()
        loss, _, _ = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        losses.append(loss.item())
        return losses[-1]

    extras = {"schedule": schedule, "losses": losses}
    return Program(step, texts(seed, sizes), {"model": model}, {"optimizer": optimizer}, extras)
