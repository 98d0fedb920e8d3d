"""Intel Extension for PyTorch as a backend, in an environment of its own: its last release is for torch 2.8 alone.

    python -m benchmarks.ipex                                 # everything, in out/ipex
    python -m benchmarks.ipex --models resnet50 vit --candidates ipex,inductor-freezing,torchscript
    python -m benchmarks.ipex --only-build --limit-gb 4

1. Asks pip what torch 2.8 and IPEX 2.8 need, and fetches it. pip says how large a file is before it fetches it, and the
   fetch ends where the limit would be exceeded; what lies on disk is watched too, whatever pip says.
   On Linux pip finds a build of torch 2.8 for CUDA, whose library does not load without NVIDIA's libraries: 3.9 GB to
   fetch and 7 GB on disk, though nothing here uses a GPU.
2. Makes a virtual environment. coexec is not installed there but runs from this checkout: it needs a newer torch for
   co-execution, while the database side (store, tuner, backends, `torch.compile`'s backend) is pure Python.
3. Runs `benchmarks.bench_inference` there: collects the models' graphs, tunes them with IPEX among others, and serves
   them in fresh processes, with every result checked against eager and float64.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = (
    "torch==2.8.*", "intel-extension-for-pytorch==2.8.*", "numpy<2.4", "setuptools<80",
    "sqlalchemy>=2.0", "cryptography>=42", "click>=8.5", "rich>=13",
)  # fmt: skip
UNUSED = frozenset({"triton"})
"""Required by torch's wheel, and of use with a GPU only."""

ANNOUNCED = re.compile(r"^\s*Downloading (\S+) \(([\d.]+) (bytes|kB|MB|GB)\)")
UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def main() -> None:
    """Builds the environment unless it is there, and runs the benchmark in it."""
    options = parse()
    python = options.folder / "venv" / "bin" / "python"
    built = options.folder / "built"
    if not built.exists():
        venv.create(options.folder / "venv", with_pip=True, clear=True)
        wheels = options.folder / "wheels"
        fetched = download(python, wheels, int(options.limit_gb * 1e9))
        print(f"fetched {fetched / 1e9:.2f} GB in {len(list(wheels.iterdir()))} files", flush=True)
        install(python, wheels)
        built.touch()
    if not options.only_build:
        raise SystemExit(run_benchmark(python, options))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "ipex")
    parser.add_argument("--limit-gb", type=float, default=4.0, help="fetch no more than this; default: 4")
    parser.add_argument("--only-build", action="store_true", help="only fetch and install")
    parser.add_argument("--models", nargs="+", default=["lenet", "resnet18", "mobilenet_v2"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--candidates", default="ipex", help="backends to choose from, separated by commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the result there")
    return parser.parse_args()


# Building ------------------------------------------------------------------------------------------------------------


def download(python: Path, wheels: Path, limit_bytes: int) -> int:
    """Fetch what is required into `wheels`; returns its size in bytes. Errors: SystemExit at the limit."""
    wheels.mkdir(parents=True, exist_ok=True)
    pinned = [name for name in resolved(python) if name.partition("==")[0] not in UNUSED]
    words = [
        python,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--progress-bar",
        "off",
        "--dest",
        wheels,
        *pinned,
    ]
    scratch = wheels.parent / "fetching"  # where pip keeps a file until it is whole
    scratch.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(scratch.absolute())}
    with subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True, env=environment) as pip:
        watch = Watch(pip, (wheels, scratch), limit_bytes)
        try:
            fetch_within(pip.stdout or (), limit_bytes)
        except BaseException:
            pip.kill()
            raise
        finally:
            watch.join()
    shutil.rmtree(scratch)
    if watch.exceeded:
        raise SystemExit(f"more than the limit of {limit_bytes / 1e9:.2f} GB was fetched: give --limit-gb")
    if pip.returncode:
        raise SystemExit(f"pip download ended with status {pip.returncode}")
    return nbytes_in(wheels)


class Watch(threading.Thread):
    """Kills pip once its folders hold more than the limit: pip's words change from release to release."""

    def __init__(self, pip: subprocess.Popen[str], folders: tuple[Path, ...], limit_bytes: int) -> None:
        super().__init__(daemon=True)
        self.pip, self.folders, self.limit_bytes = pip, folders, limit_bytes
        self.exceeded = False
        self.start()

    def run(self) -> None:
        """Until pip ends."""
        while self.pip.poll() is None:
            if sum(map(nbytes_in, self.folders)) > self.limit_bytes:
                self.exceeded = True
                self.pip.kill()
                return
            time.sleep(0.2)


def nbytes_in(folder: Path) -> int:
    """Bytes of all files below `folder`, which others may move or delete meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def resolved(python: Path) -> list[str]:
    """What pip would install, as "name==version". Fetches metadata, no wheels where the index has it apart."""
    words = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *REQUIRED]
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True, check=True)
    entries = [entry["metadata"] for entry in json.loads(done.stdout)["install"]]
    return [f"{entry['name']}=={entry['version']}" for entry in entries]


def fetch_within(lines: Iterable[str], limit_bytes: int) -> int:
    """Pass on what pip says while the sizes it announces stay within the limit; returns their sum in bytes.

    Errors: SystemExit at the file with which they would not.
    """
    total = 0
    for name, nbytes in announced(lines):
        if total + nbytes > limit_bytes:
            raise SystemExit(
                f"{name} has {nbytes / 1e9:.2f} GB; with {total / 1e9:.2f} GB before it that is more than the limit of "
                f"{limit_bytes / 1e9:.2f} GB: give --limit-gb, or install a CPU build of torch 2.8 by hand"
            )
        total += nbytes
        print(f"  {nbytes / 1e6:8.1f} MB  {name}", flush=True)
    return total


def announced(lines: Iterable[str]) -> Iterator[tuple[str, int]]:
    """(file, bytes) of each line in which pip begins to fetch one; pip rounds to a tenth of the unit."""
    for line in lines:
        if found := ANNOUNCED.match(line):
            name, number, unit = found.groups()
            yield name.rpartition("/")[2], round(float(number) * UNITS[unit])


def install(python: Path, wheels: Path) -> None:
    """Install all wheels, and see whether both packages load."""
    files = sorted(str(file) for file in wheels.glob("*.whl"))
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *files], check=True)
    code = (
        "import torch, intel_extension_for_pytorch as ipex; print('torch', torch.__version__, 'IPEX', ipex.__version__)"
    )
    subprocess.run([str(python), "-W", "ignore", "-c", code], check=True)


# Running -------------------------------------------------------------------------------------------------------------


def run_benchmark(python: Path, options: argparse.Namespace) -> int:
    """Collect, tune and serve in the environment; returns the benchmark's exit status."""
    words = ["--models", *options.models, "--batches", *map(str, options.batches), "--candidates", options.candidates]
    words += ["--rounds", str(options.rounds), "--store", str(options.folder.absolute() / "store")]
    words += ["--json", str(options.json.absolute())] if options.json else []
    search = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": search}
    program = [str(python.absolute()), "-W", "ignore", "-m", "benchmarks.bench_inference"]
    return subprocess.run([*program, *words], env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
