"""DistributedDataParallel and collectives inside the step: two ranks on this machine, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.coexec.distributed_child import HANG_S, SCENARIOS, STEPS

RANKS = 2
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank says of each scenario."""
    rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
    command = [sys.executable, "-m", "tests.coexec.distributed_child"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(rendezvous)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=HANG_S + 20) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, [errors[-3000:] for _, errors in outputs]
    answers: dict[str, list[dict[str, Any]]] = {scenario: [] for scenario in SCENARIOS}
    for output, _ in outputs:
        for line in output.splitlines():
            answer = json.loads(line)
            answers[answer["scenario"]].append(answer)
    return answers


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_train_as_in_eager_and_in_co_execution(scenario: str, told: dict[str, list[dict[str, Any]]]) -> None:
    assert len(told[scenario]) == RANKS
    for answer in told[scenario]:
        assert answer["difference"] == "", answer["explanation"]
        assert answer["phase"] == "co-execution", answer["explanation"]
        # A rank whose hooks ran at another time than before takes a path of its own now and then.
        assert answer["fallbacks"] <= 4, answer["explanation"]
        assert answer["co_executed"] >= STEPS - 8, answer["explanation"]
