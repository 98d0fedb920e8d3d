"""What a figure was measured on: written beside every figure."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def describe_machine() -> dict[str, Any]:
    """Returns versions, processor, threads and the load when the benchmark began."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def digest_of_code() -> str:
    """Returns what tells this state of the library and of its benchmarks from another one."""
    digest = hashlib.sha256()
    for folder in (Path("src/coexec"), Path("benchmarks")):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def processor_name() -> str:
    """Returns the model name of the first core."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    """Writes the result as JSON, if a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {path}")
