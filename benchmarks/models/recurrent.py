"""Recurrent nets for text and series."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from benchmarks.models.build import Built, Make, floats, tokens

VOCABULARY = 2000


class Tagger(nn.Module):
    """Embedding, recurrence, one label per token."""

    def __init__(self, recurrence: nn.Module, width: int, labels: int) -> None:
        super().__init__()
        self.embedding, self.recurrence, self.head = nn.Embedding(VOCABULARY, 64), recurrence, nn.Linear(width, labels)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrence(self.embedding(ids))[0]).log_softmax(-1)


class Classifier(nn.Module):
    """Both directions' last states to one label per text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.recurrence = nn.LSTM(64, 64, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.recurrence(self.embedding(ids))[1][0]
        return self.head(torch.cat([hidden[-2], hidden[-1]], 1))


class UnrolledGRU(nn.Module):
    """A GRU written out step by step, as one does to change a gate."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(inputs, 3 * width), nn.Linear(width, 3 * width)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.width)
        for gates in self.of_input(x).unbind(1):
            reset, update, candidate = gates.chunk(3, 1)
            of_reset, of_update, of_candidate = self.of_state(state).chunk(3, 1)
            proposed = torch.tanh(candidate + torch.sigmoid(reset + of_reset) * of_candidate)
            gate = torch.sigmoid(update + of_update)
            state = gate * state + (1 - gate) * proposed
        return state


class Attentive(nn.Module):
    """Encoder and decoder over GRU cells with attention at each step (Bahdanau et al. 2015), teacher forced."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.query, self.key, self.energy = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.cell, self.head = nn.GRUCell(2 * width, width), nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(source))
        keys, state, outputs = self.key(memory), last[0], []
        for embedded in self.target(target).unbind(1):
            scores = self.energy(torch.tanh(self.query(state)[:, None] + keys)).softmax(1)
            state = self.cell(torch.cat([embedded, (scores * memory).sum(1)], 1), state)
            outputs.append(state)
        return self.head(torch.stack(outputs, 1))


class Chomped(nn.Module):
    """Two causal dilated convolutions with a residual (TCN, Bai et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.first = nn.Conv1d(inputs, outputs, 3, dilation=dilation)
        self.second = nn.Conv1d(outputs, outputs, 3, dilation=dilation)
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.pad(x)).relu()
        return (self.second(self.pad(y)).relu() + self.shortcut(x)).relu()


class Forecaster(nn.Module):
    """A series' next values from an LSTM over its past."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrence, self.head = nn.LSTM(8, 96, num_layers=2, batch_first=True), nn.Linear(96, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrence(x)[0][:, -1])


def lstm_tagger() -> Built:
    """One layer of 128 over 32 tokens."""
    return Tagger(nn.LSTM(64, 128, batch_first=True), 128, 17), tokens(VOCABULARY, 32)


def gru_tagger() -> Built:
    """Both directions, 96 each."""
    return Tagger(nn.GRU(64, 96, bidirectional=True, batch_first=True), 192, 17), tokens(VOCABULARY, 32)


def lstm_language_model() -> Built:
    """Two layers of 256 to the vocabulary."""
    return Tagger(nn.LSTM(64, 256, num_layers=2, batch_first=True), 256, VOCABULARY), tokens(VOCABULARY, 32)


def bilstm_classifier() -> Built:
    """48 tokens."""
    return Classifier(), tokens(VOCABULARY, 48)


def unrolled_gru() -> Built:
    """24 steps of 64 inputs, 128 wide."""
    return UnrolledGRU(64, 128), floats(24, 64)


def seq2seq_attention() -> Built:
    """20 tokens to 12."""
    return Attentive(), lambda batch: tokens(VOCABULARY, 20)(batch) + tokens(VOCABULARY, 12)(batch)


def tcn() -> Built:
    """Six levels over a series of 256."""
    widths = (8, 64, 64, 64, 64, 64, 64)
    pairs = enumerate(itertools.pairwise(widths))
    blocks = [Chomped(inputs, outputs, 1 << level) for level, (inputs, outputs) in pairs]
    return nn.Sequential(*blocks, nn.Conv1d(64, 8, 1)), floats(8, 256)


def lstm_forecaster() -> Built:
    """48 past values of 8 series."""
    return Forecaster(), floats(48, 8)


MODELS: dict[str, Make] = {
    make.__name__: make
    for make in (
        *(lstm_tagger, gru_tagger, lstm_language_model, bilstm_classifier),
        *(unrolled_gru, seq2seq_attention, tcn, lstm_forecaster),
    )
}
