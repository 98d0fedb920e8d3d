"""An acoustic model: convolution, bidirectional LSTM over packed sequences, CTC loss. Every utterance has its length.

The utterances are synthetic: each phone is a band of energy that lasts a few frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from benchmarks.programs.program import Program, seed_everything

BANDS, PHONES, BLANK = 40, 20, 0


class Batch(NamedTuple):
    """Padded utterances and what is said in them."""

    frames: Tensor  # float32[batch, longest, BANDS]
    lengths: Tensor  # int64[batch], frames of each
    phones: Tensor  # int64[sum of phone_counts]
    phone_counts: Tensor  # int64[batch]


class AcousticModel(nn.Module):
    """Frames to log-probabilities float32[time, batch, PHONES + 1], and how many times each utterance has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(BANDS, width, 5, stride=2, padding=2)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * width, PHONES + 1)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.conv(frames.transpose(1, 2))).transpose(1, 2)
        times = (lengths + 1) // 2
        packed = pack_padded_sequence(x, times, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return F.log_softmax(self.head(states), dim=-1).transpose(0, 1), times


def error_count(log_probs: Tensor, times: Tensor, batch: Batch) -> int:
    """Returns how many utterances' best paths do not spell what is said, collapsing repeats and blanks in Python."""
    wrong = 0
    said = [part.tolist() for part in batch.phones.split(batch.phone_counts.tolist())]
    for path, length, wanted in zip(log_probs.argmax(-1).t().tolist(), times.tolist(), said, strict=True):
        heard = [p for p, before in zip(path[:length], [BLANK, *path], strict=False) if p not in (before, BLANK)]
        wrong += heard != wanted
    return wrong


def utterances(seed: int, batch: int, fewest: int, most: int) -> Iterator[Batch]:
    """Yields utterances of `fewest` to `most` phones of 4 to 8 frames each, for ever."""
    generator = torch.Generator().manual_seed(seed)
    bands = torch.arange(BANDS)
    while True:
        counts = torch.randint(fewest, most + 1, (batch,), generator=generator)
        spoken, frames = [], []
        for count in counts.tolist():
            phones = torch.randint(1, PHONES + 1, (count,), generator=generator)
            durations = torch.randint(4, 9, (count,), generator=generator)
            centres = (phones * (BANDS / PHONES)).repeat_interleave(durations)
            energy = torch.exp(-0.5 * (bands - centres[:, None]) ** 2)
            frames.append(energy + 0.1 * torch.randn(energy.shape, generator=generator))
            spoken.append(phones)
        lengths = torch.tensor([len(part) for part in frames])
        yield Batch(pad_sequence(frames, batch_first=True), lengths, torch.cat(spoken), counts)


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, size, fewest, most = (8, 2, 2, 4) if tiny else (64, 4, 8, 16)
    model = AcousticModel(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses: list[float] = []
    wrong: list[int] = []

    def step(batch: Batch) -> float:
        log_probs, times = model(batch.frames, batch.lengths)
        loss = F.ctc_loss(log_probs, batch.phones, times, batch.phone_counts, blank=BLANK, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
        wrong.append(error_count(log_probs.detach(), times, batch))
        return losses[-1]

    batches = utterances(seed, size, fewest, most)
    return Program(step, batches, {"model": model}, {"optimizer": optimizer}, {"losses": losses, "wrong": wrong})
