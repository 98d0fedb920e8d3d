"""Reinforcement learning and other small perceptrons: what acts at every time step, where overhead is everything."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.build import Built, Make, conv_norm, dense, floats, images


def atari_trunk() -> list[nn.Module]:
    """The three convolutions of DQN (Mnih et al. 2015) over 4 frames of 84x84; 3136 features."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride in ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
        layers += [nn.Conv2d(inputs, outputs, kernel, stride), nn.ReLU()]
    return [*layers, nn.Flatten()]


class Dueling(nn.Module):
    """State value and advantages apart (Wang et al. 2016)."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*atari_trunk())
        self.value, self.advantage = dense(3136, 256, 1), dense(3136, 256, actions)

    def forward(self, frames: Tensor) -> Tensor:
        features = self.trunk(frames / 255.0)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(1, keepdim=True)


class Actor(nn.Module):
    """A squashed normal policy (soft actor-critic, Haarnoja et al. 2018): the action, its deviation, entropy term."""

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.trunk = dense(states, 256, 256, 2 * actions)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_deviation = self.trunk(state).chunk(2, -1)
        deviation = (-5 + 3.5 * (torch.tanh(log_deviation) + 1)).exp()
        action = torch.tanh(mean)
        log_probability = -deviation.log() - torch.log1p(-action.square() + 1e-6)
        return action, deviation, log_probability.sum(-1)


class Critics(nn.Module):
    """Twin critics; the smaller value counts (Fujimoto et al. 2018)."""

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.first, self.second = dense(states + actions, 256, 256, 1), dense(states + actions, 256, 256, 1)

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        both = torch.cat([state, action], -1)
        return torch.minimum(self.first(both), self.second(both))


class ActorCritic(nn.Module):
    """Shared trunk, probabilities and a value (PPO on vectors)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.policy, self.value = nn.Linear(128, 10), nn.Linear(128, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(state)
        return self.policy(features).softmax(-1), self.value(features)


class Impala(nn.Module):
    """Residual convolutions over frames, one LSTM step, policy and value (Espeholt et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((4, 16), (16, 32), (32, 32))])
        self.residuals = nn.ModuleList(
            [
                nn.Sequential(nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1))
                for b in (16, 16, 32, 32, 32, 32)
            ]
        )
        self.features, self.cell = nn.Linear(32 * 8 * 8, 256), nn.LSTMCell(256, 256)
        self.policy, self.value = nn.Linear(256, 15), nn.Linear(256, 1)

    def forward(self, frames: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = frames
        for number, entry in enumerate(self.entries):
            x = F.max_pool2d(entry(x), 3, 2, 1)
            x = x + self.residuals[2 * number](x)
            x = x + self.residuals[2 * number + 1](x)
        hidden, memory = self.cell(self.features(x.relu().flatten(1)).relu(), (hidden, memory))
        return self.policy(hidden), self.value(hidden), hidden, memory


class MixerBlock(nn.Module):
    """Perceptrons over patches and over channels in turn (Tolstikhin et al. 2021)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.over_patches = nn.Sequential(nn.Linear(patches, width), nn.GELU(), nn.Linear(width, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).mT).mT
        return x + self.over_channels(self.norms[1](x))


class Mixer(nn.Module):
    """MLP-Mixer over patches of 8."""

    def __init__(self, width: int = 128, patches: int = 64) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock(patches, width) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patch(x).flatten(2).mT)).mean(1))


class Tabular(nn.Module):
    """A ResNet for tables (Gorishniy et al. 2021)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.entry, self.head = (
            nn.Linear(40, width),
            nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1)),
        )
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.BatchNorm1d(width), dense(width, 2 * width, width), nn.Dropout(0.1)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def dqn() -> Built:
    """6 actions."""
    return nn.Sequential(*atari_trunk(), dense(3136, 512, 6)), floats(4, 84, 84)


def dueling_dqn() -> Built:
    """Frames as bytes would come: 0 to 255."""
    return Dueling(6), lambda batch: (torch.randint(0, 256, (batch, 4, 84, 84)).float(),)


def sac_actor() -> Built:
    """17 state values, 6 actions."""
    return Actor(17, 6), floats(17)


def sac_critic() -> Built:
    """Twin critics."""
    return Critics(17, 6), lambda batch: (torch.randn(batch, 17), torch.rand(batch, 6) * 2 - 1)


def ppo_policy() -> Built:
    """64 state values, 10 actions."""
    return ActorCritic(), floats(64)


def impala() -> Built:
    """One time step."""
    return Impala(), lambda batch: (
        torch.rand(batch, 4, 64, 64),
        torch.zeros(batch, 256),
        torch.zeros(batch, 256),
    )


def pixel_encoder() -> Built:
    """Continuous control from pixels (DrQ, Yarats et al. 2021): four convolutions, layer norm, tanh."""
    layers: list[nn.Module] = [nn.Conv2d(9, 32, 3, 2), nn.ReLU()]
    layers += [layer for _ in range(3) for layer in (nn.Conv2d(32, 32, 3), nn.ReLU())]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(32 * 25 * 25, 50), nn.LayerNorm(50), nn.Tanh(), dense(50, 256, 6)
    ), images(64, 9)


def mlp_mixer() -> Built:
    """64x64 pictures."""
    return Mixer(), images(64)


def tabular_resnet() -> Built:
    """40 columns, 16 rows per sample."""
    return Tabular(), lambda batch: (torch.randn(16 * batch, 40),)


def few_shot() -> Built:
    """MAML's net for Omniglot: four convolutions of 64."""
    blocks = [layer for inputs in (1, 64, 64) for layer in (conv_norm(inputs, 64), nn.MaxPool2d(2))]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 9, 5)), images(28, 1)


MODELS: dict[str, Make] = {
    make.__name__: make
    for make in (
        *(dqn, dueling_dqn, sac_actor, sac_critic, ppo_policy, impala, pixel_encoder),
        *(mlp_mixer, tabular_resnet, few_shot),
    )
}
