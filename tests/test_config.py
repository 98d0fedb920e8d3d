"""Options and settings: validation, environment, and what is in the artifact key."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coexec import config, errors
from tests.pipes import abandoned


def test_defaults_are_what_compile_documents() -> None:
    options = config.make_options()
    assert dataclasses.asdict(options) == {
        "backend": "auto",
        "numerics": "fast",
        "dynamic": None,
        "mode": "coexec",
        "overlap": False,
    }


def test_unknown_option_lists_the_valid_ones_and_guesses() -> None:
    with pytest.raises(errors.UnknownOptionError, match=r"'bakend'. Did you mean 'backend'\? Valid options: backend, "):
        config.make_options(bakend="replay")
    with pytest.raises(TypeError):  # what a misspelt keyword is everywhere else in Python
        config.make_options(fast=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("backend", "induktor"), ("numerics", "precise"), ("dynamic", "yes"), ("mode", None), ("overlap", 1)],
)
def test_value_outside_the_domain_is_named(name: str, value: object) -> None:
    with pytest.raises(errors.OptionValueError, match=f"{name}=") as caught:
        config.make_options(**{name: value})
    assert isinstance(caught.value, ValueError)


def test_overlap_is_off_unless_asked_for() -> None:
    assert config.make_options().overlap is False
    assert config.make_options(overlap=True).overlap is True


def test_exact_numerics_exclude_a_compiling_backend() -> None:
    assert config.make_options(numerics="exact").numerics == "exact"
    with pytest.raises(errors.ConflictingOptionsError, match="'inductor'"):
        config.make_options(numerics="exact", backend="inductor")


def test_environment_replaces_a_default_but_no_other_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_MODE", "eager")
    assert config.make_options().mode == "eager"
    assert config.make_options(mode="lazy").mode == "lazy"
    monkeypatch.setenv("COEXEC_MODE", "")  # `COEXEC_MODE= command`: unset
    assert config.make_options().mode == "coexec"
    monkeypatch.setenv("COEXEC_MODE", "eagre")
    with pytest.raises(errors.OptionValueError, match=r"COEXEC_MODE='eagre' is not valid. Did you mean 'eager'"):
        config.make_options()


def test_settings_follow_the_environment_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, value in [("1", True), ("off", False), ("", False), ("TRUE", True)]:
        monkeypatch.setenv("COEXEC_DISABLE", word)
        assert config.disabled() is value
    monkeypatch.setenv("COEXEC_DISABLE", "maybe")
    with pytest.raises(errors.OptionValueError, match="COEXEC_DISABLE='maybe'"):
        config.disabled()


@pytest.mark.parametrize("text", ["3", "-1", "much"])
def test_debug_level_outside_its_range_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_DEBUG", text)
    with pytest.raises(errors.OptionValueError, match="COEXEC_DEBUG"):
        config.debug_level()


def test_cache_folder_comes_from_the_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_CACHE_DIR", "/somewhere/else")
    assert config.cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("COEXEC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert config.cache_dir() == Path("/xdg/coexec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert config.cache_dir() == Path("~/.cache/coexec").expanduser()


def test_private_folder_is_made_private_and_an_open_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "cache"))
    folder = config.private_cache_dir("native")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(errors.CacheFolderError, match="written by others"):
        config.private_cache_dir("native")


def test_a_private_folder_in_one_that_others_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could put another one in its place."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(cache))
    config.private_cache_dir("native")
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o775)
    with pytest.raises(errors.CacheFolderError, match=rf"{cache} can be written by others \(mode 775; `chmod go-w"):
        config.private_cache_dir("native")
    cache.chmod(0o755)
    config.private_cache_dir("native")


def test_cache_folder_below_a_file_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(errors.CacheFolderError, match="Set COEXEC_CACHE_DIR"):
        config.private_cache_dir("native")


def test_every_option_and_variable_is_described() -> None:
    done = subprocess.run([sys.executable, "-m", "coexec.config"], capture_output=True, text=True, check=True)
    fields = (*dataclasses.fields(config.Options), *dataclasses.fields(config.Settings))
    for field in fields:
        assert field.metadata["help"] in done.stdout
        assert field.metadata["env"] in done.stdout


def test_the_list_of_options_may_be_read_in_part() -> None:
    source = Path(__file__).resolve().parents[1] / "src"
    words = [sys.executable, "-c", "import runpy; input(); runpy.run_module('coexec.config', run_name='__main__')"]
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": str(source)}
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    assert abandoned(process) == ""
    assert process.returncode == 0
