"""TVM: what its search needs in this wheel."""

from __future__ import annotations

import subprocess
import sys

import pytest

import coexec.backends.candidates.installed as installed
from coexec.backends.candidates import registry


def test_a_version_of_its_interface_that_crashes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.15.post2", "cloudpickle": "3", "psutil": "7"}
    monkeypatch.setattr(installed, "version_of", versions.get)
    found = registry.get("tvm-metaschedule").availability()
    assert not found.usable
    assert "0.1.15.post2" in found.reason
    assert "apache-tvm-ffi==0.1.14.post1" in found.works_with


def test_a_search_needs_what_its_workers_import(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}
    monkeypatch.setattr(installed, "version_of", lambda name: versions.get(name, ""))
    assert registry.get("tvm").availability().usable
    assert "cloudpickle, psutil" in registry.get("tvm-metaschedule").availability().reason


@pytest.mark.skipif(not registry.get("tvm").availability().usable, reason=registry.get("tvm").availability().reason)
def test_only_x86_intrinsics_are_parsed_and_workers_do_not_spin() -> None:
    """All of them take longer than a worker may live."""
    code = """
import os, sys
import coexec.backends.candidates.tvm.heavy
from coexec.backends.candidates.tvm.intrinsics import preload
preload()
import tvm.s_tir.tensor_intrin.x86
loaded = [name for name in sys.modules if name.startswith("tvm.s_tir.tensor_intrin.")]
assert loaded == ["tvm.s_tir.tensor_intrin.x86"], loaded
assert os.environ["TVM_THREAD_POOL_SPIN_COUNT"] == "0"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
