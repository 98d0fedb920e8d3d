"""`import coexec` before `import torch`: torch stays out until it is imported, and its functions are wrapped then."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import coexec
assert "torch" not in sys.modules
{imports}
from torch import tensor
assert getattr(torch.Tensor.numpy, "_coexec_wrapper", False)
assert tensor is torch.tensor
assert torch.__loader__ is torch.__spec__.loader and torch.__loader__.__class__.__name__ == "SourceFileLoader"
print(coexec.compile(lambda x: x + 1)(torch.ones(1)).item())
"""


def run(imports: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_coexec_first() -> None:
    assert run("import torch") == "2.0"


def test_coexec_first_and_torch_by_a_part_of_it() -> None:
    assert run("import torch.nn.functional\nimport torch") == "2.0"


def test_torch_first() -> None:
    program = "import torch\nimport coexec\nprint(getattr(torch.Tensor.numpy, '_coexec_wrapper', False))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
