"""Proximal policy optimisation (Schulman et al. 2017) on the cart-pole, whose physics are NumPy.

One step plays a rollout (each move is sampled from the policy and read back), estimates advantages, and makes a few
passes over minibatches, the last of which is left out once the policy has moved too far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.programs.program import Program, seed_everything

OBSERVED, ACTIONS = 4, 2
GAMMA, LAMBDA, CLIP, ENTROPY, FARTHEST = 0.99, 0.95, 0.2, 0.01, 0.03


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is played and learned per step."""

    games: int = 8
    moves: int = 24
    passes: int = 3
    minibatches: int = 4
    width: int = 64


TINY = Sizes(games=2, moves=4, passes=2, minibatches=2, width=8)


@dataclass
class CartPole:
    """Several games side by side (Barto et al. 1983): state float64[games, 4], a force of 10 N left or right."""

    state: np.ndarray
    generator: np.random.Generator

    @staticmethod
    def new(games: int, seed: int) -> CartPole:
        """Starts `games` games."""
        game = CartPole(np.zeros((0, OBSERVED)), np.random.default_rng(seed))
        game.state = game._fresh(games)
        return game

    def _fresh(self, games: int) -> np.ndarray:
        return self.generator.uniform(-0.05, 0.05, (games, OBSERVED))

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moves all games by 0.02 s; returns whether each is over, and the new state, with new games for those."""
        x, v, angle, spin = self.state.T
        force = np.where(actions == 1, 10.0, -10.0)
        push = (force + 0.05 * spin**2 * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        run = push - 0.05 * turn * np.cos(angle) / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * run, angle + 0.02 * spin, spin + 0.02 * turn], axis=1)
        over = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095)
        self.state[over] = self._fresh(int(over.sum()))
        return over, self.state


class ActorCritic(nn.Module):
    """Observations float32[n, OBSERVED] to the logits of the actions and the value of the state, float32[n]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(OBSERVED, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, ACTIONS)
        )
        self.critic = nn.Sequential(
            nn.Linear(OBSERVED, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(observed), self.critic(observed).squeeze(-1)


@dataclass
class Rollout:
    """What was played, float32[moves, games] unless said otherwise."""

    observed: Tensor  # float32[moves, games, OBSERVED]
    actions: Tensor  # int64
    log_probs: Tensor
    values: Tensor
    over: Tensor  # 1.0 where a game ended with the move
    last_value: Tensor  # float32[games], of the state after the last move


@torch.no_grad()
def play(policy: nn.Module, game: CartPole, moves: int) -> Rollout:
    """Plays `moves` moves of all games."""
    observed, actions, log_probs, values, over = [], [], [], [], []
    now = torch.as_tensor(game.state, dtype=torch.float32)
    for _ in range(moves):
        logits, value = policy(now)
        choice = Categorical(logits=logits, validate_args=False)
        action = choice.sample()
        ended, state = game.step(action.numpy())
        observed.append(now)
        actions.append(action)
        log_probs.append(choice.log_prob(action))
        values.append(value)
        over.append(torch.as_tensor(ended, dtype=torch.float32))
        now = torch.as_tensor(state, dtype=torch.float32)
    parts = (torch.stack(part) for part in (observed, actions, log_probs, values, over))
    return Rollout(*parts, last_value=policy(now)[1])


@torch.no_grad()
def advantages_of(rollout: Rollout) -> Tensor:
    """Generalised advantage estimates (Schulman et al. 2016), float32[moves, games]; each move earns 1."""
    advantages = torch.zeros_like(rollout.values)
    running, after = torch.zeros_like(rollout.last_value), rollout.last_value
    for move in reversed(range(len(rollout.values))):
        going = 1.0 - rollout.over[move]
        delta = 1.0 + GAMMA * after * going - rollout.values[move]
        running = delta + GAMMA * LAMBDA * going * running
        advantages[move], after = running, rollout.values[move]
    return advantages


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    sizes = TINY if tiny else Sizes()
    policy, game = ActorCritic(sizes.width), CartPole.new(sizes.games, seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)
    history: list[dict[str, float]] = []

    def update(rollout: Rollout, advantages: Tensor, chosen: Tensor) -> tuple[float, float]:
        logits, values = policy(rollout.observed.flatten(0, 1)[chosen])
        policy_now = Categorical(logits=logits, validate_args=False)
        change = policy_now.log_prob(rollout.actions.flatten()[chosen]) - rollout.log_probs.flatten()[chosen]
        ratio, gain = change.exp(), advantages.flatten()[chosen]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        returns = (advantages + rollout.values).flatten()[chosen]
        loss = policy_loss + 0.5 * F.mse_loss(values, returns) - ENTROPY * policy_now.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        return loss.item(), ((ratio - 1) - change).mean().item()

    def step(iteration: int) -> float:
        rollout = play(policy, game, sizes.moves)
        advantages = advantages_of(rollout)
        for _ in range(sizes.passes):
            order = torch.randperm(advantages.numel())
            results = [update(rollout, advantages, chosen) for chosen in order.chunk(sizes.minibatches)]
            distance = float(np.mean([moved for _, moved in results]))
            if distance > FARTHEST:
                break
        ended = rollout.over.sum().item()
        history.append({"iteration": iteration, "loss": results[-1][0], "distance": distance, "games_over": ended})
        return results[-1][0]

    batches: Iterator[int] = itertools.count()
    return Program(step, batches, {"policy": policy}, {"optimizer": optimizer}, {"history": history, "game": game})
