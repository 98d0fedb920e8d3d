"""One OpenMP pool at a time: who computes has workers, who does not gives them back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import glob, time
import torch
import coexec

def workers():
    names = []
    for path in glob.glob("/proc/self/task/*/comm"):
        with open(path) as file:
            names.append(file.read().strip())
    return names.count("coexec-graph"), sum(name.startswith("python") for name in names) - others

others = 0

torch.set_num_threads(2)
x = torch.empty(1 << 18)
x.numpy().fill(1.0)

@coexec.compile(numerics="exact")
def step():
    return (x.exp() + 1).sum().item()

step.wait_compiled(300)
others = workers()[1] - 1  # of NumPy's libraries
x.exp()
before = workers()
for _ in range(3):
    step()
computing = workers()
deadline = time.monotonic() + 10
while workers() == computing and time.monotonic() < deadline:
    time.sleep(0.01)
idle = workers()
x.exp()
print(before, computing, idle, workers())
"""


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="no OpenMP")
def test_pools_follow_the_work() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=400, check=True)
    # (threads of the graph, threads of Python), workers included
    assert done.stdout.strip() == "(0, 2) (2, 1) (1, 1) (1, 2)"
