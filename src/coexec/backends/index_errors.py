"""Lets a compiled loop raise where an index is out of range: Inductor's own check would end the process.

Inductor checks an index where it is used, in the middle of a parallel region, from which no exception can leave. With
:func:`raising_indices`, the loop notes the error and goes on with index 0, and the kernel raises behind its last loop,
as Inductor's kernels do after an integer division by zero. What was computed meanwhile is nobody's: the GraphRunner
discards the segment and replays its ops, one of which raises eager's error.

A scatter that is left to torch's kernel returns its error as a code, which the generated call forgets (torch 2.13): the
results were wrong without a word. It is looked at.

A segment that writes memory of the user cannot be discarded. It is not compiled if it computes an index
(:func:`computed_index`); those that are inputs are looked at before a run, see `index_ranges.py`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import sympy
from torch._inductor.codegen.cpp import CppKernel, KernelGroup
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch.utils._sympy.symbol import SymT, symbol_is_type

CHECK = "COEXEC_CHECK_INDEX_"
"""And the index variable's name: what stands in a loop until its kernel is written."""

NOTE = "[&](bool right, const char*) {{ if (!right) {{ coexec_index_error.store(1); {resets} }} }}("

CHECKS = re.compile(rf'{CHECK}(\w+)\((.*"index out of bounds: (?:\S+ <= )?(\w+))')
"""(the index, the check, what the check compares: the index, or a copy of it that stores may use)."""

ELEMENTS = re.compile(
    r"auto (?P<array>\w+) =\s*\[&\]\s*\{\s*__at_align__ std::array<[^>]*> tmpbuf;\s*"
    r"(?P<vector>\w+)\.store\(tmpbuf\.data\(\),[^;]*\);\s*return tmpbuf;\s*\}\s*\(\)"
)
"""A vector of indices as an array: what memory is then read and written by, element by element."""

BEGINS, ENDS = (
    "std::atomic<int> inductor_cpu_integer_div_error{0};",
    "inductor_cpu_throw_if_integer_div_error(inductor_cpu_integer_div_error);",
)
"""Lines of every kernel, before its first loop and behind its last one."""

BEGIN = "std::atomic<int> coexec_index_error{0};"
END = 'if (coexec_index_error.load()) throw std::runtime_error("an index is out of range");'
"""Without the stack that torch's own errors have: the library prints what it throws."""


SCATTER = "_generate_scatter_fallback"
"""Writes the call of torch's own scatter."""

CODE_CHECK = "AOTI_TORCH_ERROR_CODE_CHECK"


@contextlib.contextmanager
def raising_indices() -> Iterator[None]:
    """While active, generated kernels raise after their loops if an index was out of range."""
    with (
        patch.object(CppKernel, "check_bounds", _noting(CppKernel.check_bounds)),
        patch.object(KernelGroup, "codegen_group", _writing(KernelGroup.codegen_group)),
        patch.object(CppWrapperCpu, SCATTER, _checking(getattr(CppWrapperCpu, SCATTER))),
    ):
        yield


def _noting(original: Any) -> Any:
    """`check_bounds` that leaves :data:`CHECK` in place of the assertion where a loop uses a computed index."""

    def check_bounds(kernel: Any, expr: sympy.Expr, size: sympy.Expr, lower: bool, upper: bool) -> None:
        # Index 0 of nothing is out of range as well: that assertion stays as it is.
        if size == 0 or not (isinstance(expr, sympy.Symbol) and symbol_is_type(expr, SymT.TMP)):
            original(kernel, expr, size, lower, upper)
            return
        with patch.object(CppKernel, "assert_function", f"{CHECK}{expr}"):
            original(kernel, expr, size, lower, upper)

    return check_bounds


def _writing(original: Any) -> Any:
    """`codegen_group` that turns each :data:`CHECK` of a kernel into a note, and raises it at the end."""

    def codegen_group(group: Any, name: str | None = None) -> str:
        code: str = original(group, name)
        if CHECK not in code:
            return code
        assert code.count(BEGINS) == code.count(ENDS) == 1, "kernels of this torch begin and end in another way"
        code = code.replace(BEGINS, f"{BEGINS}\n    {BEGIN}").replace(ENDS, f"{ENDS}\n    {END}")
        return noted(code)

    return codegen_group


def noted(code: str) -> str:
    """Returns the code of a kernel in which a wrong index is noted, and is 0 from there on, wherever it is kept."""

    def note(check: re.Match[str]) -> str:
        index, rest, compared = check.groups()
        before = code[: check.start()]
        defined = before.rfind(f"auto {index} =")  # names of an earlier loop come again
        arrays = [e["array"] for e in ELEMENTS.finditer(before, defined) if e["vector"] == index]
        resets = [f"{name} = decltype({name})(0);" for name in dict.fromkeys((index, compared))]
        resets += [f"{array}.fill(0);" for array in arrays]
        return NOTE.format(resets=" ".join(resets)) + rest

    code = CHECKS.sub(note, code)
    assert CHECK not in code, "the checks of this torch are written in another way"
    return code


def _checking(original: Any) -> Any:
    """`_generate_scatter_fallback` whose call raises what the kernel complains of."""

    def generate(wrapper: Any, *args: Any) -> None:
        writeline = wrapper.writeline

        def write(line: str) -> None:
            call = line.removesuffix(";")
            writeline(line if CODE_CHECK in call else f"{CODE_CHECK}({call});")

        with patch.object(wrapper, "writeline", write):
            original(wrapper, *args)

    return generate
