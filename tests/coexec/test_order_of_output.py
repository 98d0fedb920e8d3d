"""What a program writes: prints, logs, warnings and tracebacks come in eager's order and with eager's words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, sys, threading, warnings
import torch
from torch import nn
import coexec
from coexec.intercept.build import build

build(verbose=False)
torch.set_num_threads(1)
torch.manual_seed(0)
sys.stdout.reconfigure(line_buffering=True)
FORMAT = "%(levelname)s %(threadName)s %(funcName)s %(lineno)d %(message)s"
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format=FORMAT)
log = logging.getLogger("training")
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def noted(x):
    log.debug("norm %.3f", x.norm())
    return x

def step(i, x, y):
    print("step", i, flush=True)
    h = noted(model[1](model[0](x)))
    if i % 4 == 3:
        warnings.warn(f"every fourth step, {h.mean().item():.3f}")
    out = model[2](h)
    print("logits", out[0])
    loss = nn.functional.mse_loss(out, y[:1])  # warns of broadcasting, in Python
    optimizer.zero_grad()
    loss.backward()
    log.info("loss %s grad %s", loss.item(), model[0].bias.grad[:2])
    spread = x[:1, 0].var()  # a kernel warns
    print("spread", spread.item())
    optimizer.step()
    sys.stderr.write(f"after {model[2].bias.detach().tolist()}\\n")
    log.warning("weights %s", model[0].weight.data[0])
    print(f"{loss:.4f} {loss.detach():>10.3f} {out.shape} {out.requires_grad} {out.grad_fn is not None}")

step = coexec.compile(step, backend="replay", numerics="exact")
generator = torch.Generator().manual_seed(1)
for action in ("default", "always", "ignore"):
    print("warnings:", action)
    warnings.simplefilter(action)
    for i in range(10):
        step(i, torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator))
    assert "on" in sys.argv or step.stats().iterations == 0
    assert "on" not in sys.argv or step.stats().phase == "co-execution", step.explain()
    step.reset()
    globals().get("__warningregistry__", {}).clear()
"""


def output(script: Path, on: bool) -> str:
    """Everything that the script wrote, stdout and stderr in the order of time."""
    environment = {**os.environ, "COEXEC_DISABLE": "" if on else "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "on" if on else "off"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=environment, timeout=55,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_prints_logs_and_warnings_in_order(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    expected = output(script, on=False)
    default, always, ignore = expected.split("warnings: ")[1:]
    assert default.count("degrees of freedom") == 1
    assert always.count("degrees of freedom") == 10
    assert ignore.count("degrees of freedom") == 0
    assert output(script, on=True) == expected


FAILING = """
import logging, sys, torch, warnings
from torch import nn
import coexec
from coexec.intercept.build import build

build(verbose=False)
torch.set_num_threads(1)
table = nn.Embedding(5, 4)

def look_up(ids):
    rows = table(ids)
    return rows * 2

class Model(nn.Module):
    def forward(self, ids):
        return look_up(ids).sum()

model = Model()

def step(ids):
    total = model(ids)
    total = total + 1
    return total * 2

step = coexec.compile(step, backend="replay", numerics="exact")
for i in range(9):
    print("step", i, flush=True)
    step(torch.tensor([0, 9 if i == 8 else 1]))
"""


def test_an_uncaught_error_of_a_kernel_ends_with_eagers_words_and_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    texts = []
    for on in (False, True):
        environment = {**os.environ, "COEXEC_DISABLE": "" if on else "1"}
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=55
        )
        assert done.returncode == 1
        assert done.stdout == "".join(f"step {i}\n" for i in range(9))
        texts.append(done.stderr)
    eager, got = texts
    own = re.compile(rf'File "{re.escape(str(script))}", line \d+, in .*\n.*')
    assert own.findall(got) == own.findall(eager)
    words = [line for line in eager.splitlines() if line.startswith("IndexError")]
    assert words == [line for line in got.splitlines() if line.startswith("IndexError")]
