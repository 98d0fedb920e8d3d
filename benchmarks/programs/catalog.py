"""The programs by name: the ten of the paper (Terra, section 5), then five that users bring today."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

from benchmarks.programs.program import Program

PAPER = (
    *("resnet50", "dcgan", "bert_qa", "bert_cls", "gpt2"),
    *("music_transformer", "yolov3", "faster_rcnn", "dropblock", "sdpoint"),
)
TODAY = ("ppo", "moe", "lstm_speech", "gnn", "lora")
PROGRAMS = (*PAPER, *TODAY)

NEEDS = {"lora": "transformers", "bert_cls": "sklearn", "gpt2": "sklearn", "gnn": "sklearn", "dcgan": "sklearn"}
"""The package that a program cannot do without, beside torch and NumPy."""


def missing(name: str) -> str:
    """Returns what the program lacks on this machine, with what to do; "" if nothing."""
    package = NEEDS.get(name, "torch")
    if find_spec(package) is not None:
        return ""
    return f"needs {package}: pip install {'scikit-learn' if package == 'sklearn' else package}"


def described(name: str) -> str:
    """Returns what a program says about itself: what it is, and what about it is hard to convert. Imports nothing."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def make(name: str, seed: int = 0, tiny: bool = False) -> Program:
    """Builds a program.

    Args:
        name: one of PROGRAMS.
        seed: of weights, batches and whatever the step draws; also seeds the process's generators.
        tiny: the same structure with few channels and short inputs, for tests.

    Raises:
        KeyError: there is no such program.
    """
    if name not in PROGRAMS:
        raise KeyError(f"no program {name!r}; there are {', '.join(PROGRAMS)}")
    program: Program = importlib.import_module(f"benchmarks.programs.{name}").make(seed, tiny)
    return program
