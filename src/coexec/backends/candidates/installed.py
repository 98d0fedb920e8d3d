"""Whether packages are installed, by their metadata alone."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from coexec.advice import how_to_install
from coexec.backends.candidates.candidate import Availability


def version_of(distribution: str) -> str:
    """The installed version, "" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def needs(distributions: Mapping[str, str], extra: str) -> Availability:
    """Usable if every distribution is there; the first one gives the version.

    `distributions`: name -> exact version it must have, or "" for any.
    `extra`: the name of coexec's extra that installs them.
    """
    found = {name: version_of(name) for name in distributions}
    works = ", ".join(f"{name}=={version}" if version else name for name, version in distributions.items())
    missing = [name for name, version in found.items() if not version]
    first = next(iter(found.values()))
    if missing:
        reason = f"not installed: {', '.join(missing)}; {how_to_install(extra)}"
        return Availability(False, reason, first, works)
    for name, wanted in distributions.items():
        if wanted and found[name] != wanted:
            return Availability(False, f"{name} {found[name]} does not work here, {wanted} does", first, works)
    return Availability(True, version=first)
