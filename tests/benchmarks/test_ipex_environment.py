"""The environment for IPEX: what is to be fetched is counted before it is fetched."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import ipex

SAID = """Collecting torch==2.8.0
  Downloading torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)
  Downloading torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl (888.1 MB)
  Using cached numpy-2.3.5-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)
Downloading https://files.example/nvidia_cudnn_cu12-9.10.2.21-py3-none-manylinux_2_27_x86_64.whl (706.8 MB)
Saved ./wheels/torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl
"""


def test_sizes_are_those_that_pip_announces() -> None:
    sizes = dict(ipex.announced(SAID.splitlines(keepends=True)))
    assert sizes == {
        "torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata": 30_000,
        "torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl": 888_100_000,
        "nvidia_cudnn_cu12-9.10.2.21-py3-none-manylinux_2_27_x86_64.whl": 706_800_000,
    }
    assert ipex.fetch_within(SAID.splitlines(), 1_600_000_000) == 1_594_930_000


PIP = """#!{python}
import json, sys, time
if "--dry-run" in sys.argv:
    names = ("torch", "triton", "numpy")
    print(json.dumps({{"install": [{{"metadata": {{"name": n, "version": "1"}}}} for n in names]}}))
else:
    assert not [word for word in sys.argv if "triton" in word]
    print("  Downloading torch-1.whl (900.0 MB)", flush=True)
    print("  Downloading numpy-1.whl (200.0 MB)", flush=True)
    time.sleep(60)  # it would fetch that now
"""


def test_what_exceeds_the_limit_is_not_fetched(tmp_path: Path) -> None:
    pip = tmp_path / "python"
    pip.write_text(PIP.format(python=sys.executable))
    os.chmod(pip, 0o700)
    with pytest.raises(SystemExit, match=r"numpy-1\.whl has 0\.20 GB; with 0\.90 GB"):
        ipex.download(pip, tmp_path / "wheels", 1_000_000_000)


SILENT_PIP = """#!{python}
import json, os, sys, time
if "--dry-run" in sys.argv:
    print(json.dumps({{"install": [{{"metadata": {{"name": "torch", "version": "1"}}}}]}}))
else:
    print("Fetching torch-1.whl, 2 gigabytes", flush=True)
    with open(os.path.join(os.environ["TMPDIR"], "pip-unpack"), "wb") as file:
        file.truncate({nbytes})
    time.sleep({sleep_s})
"""


def test_the_limit_holds_whatever_pip_says(tmp_path: Path) -> None:
    pip = tmp_path / "python"
    pip.write_text(SILENT_PIP.format(python=sys.executable, nbytes=1_000_000_001, sleep_s=60))
    os.chmod(pip, 0o700)
    with pytest.raises(SystemExit, match=r"more than the limit of 1\.00 GB"):
        ipex.download(pip, tmp_path / "wheels", 1_000_000_000)
    pip.write_text(SILENT_PIP.format(python=sys.executable, nbytes=999_999_999, sleep_s=0))
    assert ipex.download(pip, tmp_path / "wheels", 1_000_000_000) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python", "wheels"]
