"""The key of a subgraph: SHA-256 of its canonical text, with the text kept beside the hash.

Imports no torch: whatever only keeps and finds entries (the command line, a fleet's import) starts without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

SEPARATOR = " | "
"""Stands between the arguments of one entry of a text; never inside a literal."""


@dataclass(frozen=True, slots=True)
class SubgraphKey:
    """Identity of a subgraph at one class of sizes: two keys are equal when digest and shape class are."""

    digest: str  # SHA-256 of `text`, 64 hex digits
    text: str = field(compare=False, repr=False)  # entries "name: value", one a line
    outline: str = field(compare=False, repr=False)  # SHA-256 of the ops alone: finds near misses
    n_ops: int = field(default=0, compare=False)
    shape_class: str = ""  # size bucket of the symbols, "" for static shapes; decisions belong to one class
    custom_ops: tuple[str, ...] = field(default=(), compare=False)  # "namespace::name", for the environment

    def at_sizes(self, sizes: Mapping[str, int]) -> SubgraphKey:
        """The same subgraph at other sizes of its symbols ("s0", "s1" ... as in the text)."""
        return replace(self, shape_class=shape_class(dict(sizes)))


def key_of_text(text: str, ops: Sequence[str], custom_ops: Sequence[str] = ()) -> SubgraphKey:
    """Key of a text that is canonical already (a co-execution segment's); `ops` are its op names in order."""
    return SubgraphKey(
        digest=digest_of_text(text),
        text=text,
        outline=hashlib.sha256("\n".join(ops).encode()).hexdigest(),
        n_ops=sum(not op.endswith("getitem") for op in ops),  # it only picks one of an op's several results
        custom_ops=tuple(sorted(set(custom_ops))),
    )


def digest_of_text(text: str) -> str:
    """SHA-256 of UTF-8 `text`: how a stored text proves that it belongs to its hash."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def shape_class(sizes: dict[str, int]) -> str:
    """Bucket sizes by the next power of two: a tuning result belongs to one class of shapes, not to all of them."""
    text = " ".join(f"{name}<={_bucket(size)}" for name, size in sorted(sizes.items()))
    # It is a column of a primary key: very many symbols are told apart by a hash instead.
    return text if len(text) <= 200 else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _bucket(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
