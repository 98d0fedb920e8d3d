"""`import coexec` before `import torch`: torch stays out until it is imported, and its functions are wrapped then."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def test_the_builder_of_the_native_core_starts() -> None:
    """It imports torch by way of coexec's own modules."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "coexec.intercept", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_module_can_be_the_first() -> None:
    """Whichever imports torch: what follows its import must not need a module that is half way."""
    names = [
        "api",
        "intercept.build",
        "intercept.compile_core",
        "intercept.native",
        "runtime.segments",
    ]
    names += ["backends.worker_main", "choose", "dynamo_backend", "tuning", "subgraphs.machine", "intercept.background"]
    for name in names:
        done = subprocess.run(
            [sys.executable, "-c", f"import coexec.{name}"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{name}: {done.stderr}"


BACKEND = """
import sys
{imports}
from torch._dynamo.backends import registry
found = registry._BACKENDS["coexec"]
assert found.value == "coexec.dynamo_backend:coexec_backend" and "coexec.dynamo_backend" not in sys.modules
print(registry.lookup_backend("coexec").__name__)
"""


@pytest.mark.parametrize("imports", ["import coexec, torch", "import torch._dynamo, coexec"])
def test_the_backend_is_known_without_an_installed_entry_point(imports: str) -> None:
    hidden = "import importlib.metadata as m; m.entry_points = lambda **_: m.EntryPoints()"
    program = hidden + BACKEND.format(imports=imports)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "coexec_backend", done.stderr
