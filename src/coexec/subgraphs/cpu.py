"""Instruction sets of this CPU. Machine code for AVX-512 dies with SIGILL elsewhere, so they are part of the key."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

_INSTRUCTION_SETS = re.compile(
    r"^(sse\d?.*|ssse3|avx.*|amx.*|fma.*|f16c|bmi\d|abm|lzcnt|popcnt|movbe|vaes|vpclmulqdq|gfni|sha.*|aes|pclmulqdq"
    r"|asimd.*|neon|sve.*|sme\d?(_.*)?|bf16|i8mm|fp|fphp|crc32|atomics|v|zv.*|vsx|altivec)$"
)
"""The flags a compiler may use. The rest of the list (mitigations, virtualisation) changes with every kernel update."""


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """Sorted instruction-set flags; without /proc/cpuinfo the machine and processor names stand in for them."""
    flags = _flags(_read_cpuinfo())
    return flags or tuple(part for part in (platform.machine(), platform.processor()) if part)


def _read_cpuinfo() -> str:
    try:
        return _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _flags(cpuinfo: str) -> tuple[str, ...]:
    """Flags that every core has: code may be scheduled on the weakest one (hybrid CPUs)."""
    lines = re.findall(r"^(?:flags|Features|isa)\s*:\s*(.+)$", cpuinfo, flags=re.MULTILINE)
    if not lines:
        return ()
    # RISC-V joins its extensions: "rv64imafdcv_zba_zbb".
    common = set.intersection(*(set(line.replace("_z", " z").split()) for line in lines))
    return tuple(sorted(flag for flag in common if _INSTRUCTION_SETS.match(flag)))
