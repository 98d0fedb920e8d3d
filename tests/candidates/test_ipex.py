"""IPEX says why it cannot be used, and is not imported to find out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import CandidateError
from coexec.backends.candidates.torch_version import torch_release
from tests.candidates.samples import program


@pytest.mark.skipif(torch_release() <= (2, 8), reason="this torch has an IPEX")
def test_it_names_the_versions_that_work_and_refuses_before_importing(tmp_path: Path) -> None:
    """Imported beside another torch it ends the process."""
    available = registry.get("ipex").availability()
    assert not available.usable
    assert "2.8" in available.works_with
    assert "symbols" in available.reason
    with pytest.raises(CandidateError, match=r"works with .*2\.8"):
        registry.get("ipex").build(program("mlp"), tmp_path, threads=1, budget_s=1)
    assert "intel_extension_for_pytorch" not in sys.modules


def test_a_release_for_another_torch_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import coexec.backends.candidates.ipex as ipex

    monkeypatch.setattr(ipex, "torch_release", lambda: (2, 8))
    monkeypatch.setattr(ipex, "version_of", lambda name: "")
    assert ipex.Ipex().availability().reason == "not installed; pip install 'intel-extension-for-pytorch==2.8.*'"
    monkeypatch.setattr(ipex, "version_of", lambda name: "2.7.0")
    assert "another torch" in ipex.Ipex().availability().reason
    monkeypatch.setattr(ipex, "version_of", lambda name: "2.8.0")
    assert ipex.Ipex().availability().usable
