"""Shared vocabulary: what one stage hands to the next, as frozen data. Imports no torch.

The native recorder (csrc/) produces a :class:`Trace`; ``graph`` merges traces into a TraceGraph and refers to the ops
of a trace by index, so that attribute values and tensor metadata can stay on the native side.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

EXTERNAL = -1
"""Producer index of a value that no op of the trace made (a parameter, a batch, a fed tensor)."""


class OpKind(enum.IntEnum):
    """What the runners do with an op."""

    COMPUTE = 0  # runs in the graph; Python gets placeholders
    VIEW = 1  # its outputs share an input's memory and no memory is read or written: nothing to execute
    FETCH = 2  # a value goes to Python (`item()`, `bool()`): Output Fetching
    SYNC = 3  # Python waits and the op runs on real tensors (data-dependent sizes, custom ops, sparse ...)
    BARRIER = 4  # Python touches state outside the dispatcher (RNG state, `numpy()`): all earlier ops are done first
    HOST = 5  # tiny CPU computation that depends on nothing in the graph: the PythonRunner does it at once


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A value of one trace: output `output` of op `producer`, or external number `output` if `producer` is EXTERNAL.

    Number -1 is an external that is no plain strided CPU tensor (sparse, fake, quantized ...): its op is SYNC.
    """

    producer: int
    output: int


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One op of a trace."""

    op: str  # name with overload, e.g. "aten::add.Tensor"; pseudo ops are "coexec::..."
    uid: int  # 64 bit: program location + op + how often this pair was met before in the iteration (unless `folded`)
    location: int  # 64 bit: chain of (code object, instruction offset) from the step's frame
    kind: OpKind
    static: tuple[Hashable, ...]  # attributes that select a path: bool, None, str, dtype, device, list lengths ...
    numbers: tuple[Hashable, ...]  # attributes that may vary: int, float, complex and tuples of them
    inputs: tuple[ValueRef, ...]  # tensor arguments in order, tensor lists flattened
    n_outputs: int
    writes: tuple[int, ...] = ()  # positions in `inputs` whose memory the op writes
    aliases: tuple[int, ...] = ()  # per output: position in `inputs` whose memory it shares, or -1
    random: bool = False  # draws from the default generator
    node: int = -1  # TraceGraph node already matched (the validated prefix after a fallback), or -1
    folded: bool = False  # in a loop whose trip count varies: the uid is the same in each pass


@dataclass(frozen=True, slots=True)
class ExternalRecord:
    """A value from outside the trace. Two externals with equal `storage` share memory."""

    storage: int  # dense number of the storage within the trace
    nbytes: int
    step_argument: int = -1  # position among the tensors of the step's flattened arguments, or -1
    foreign: bool = False  # memory that other code can write (NumPy, DLPack): copied when it is fed


@dataclass(frozen=True, slots=True)
class Trace:
    """The ops of one iteration in program order."""

    ops: tuple[OpRecord, ...]
    externals: tuple[ExternalRecord, ...]
    complete: bool = True  # False if the step raised: the trace is a prefix and has no end
