"""What messages advise where something is not installed. coexec is on no package index, so a checkout is named."""

from __future__ import annotations


def how_to_install(extra: str = "") -> str:
    """Returns what to do: "in a checkout of coexec: pip install '.[ray]'".

    `extra`: as in `optional-dependencies` of pyproject.toml; "" for coexec itself.
    """
    what = f"'.[{extra}]'" if extra else "."
    return f"in a checkout of coexec: pip install {what}"
