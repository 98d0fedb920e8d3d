"""Leaves the runtime checks of inputs out of generated wrappers: they are never run, and take most of g++'s time.

AOTInductor writes about 50 lines per input (a training step has hundreds) that compare dtype, sizes and strides when an
environment variable is set. The GraphRunner compares geometry itself before it uses an artifact. Seen on a 4-layer GPT
step with 300 inputs: g++ takes 22 s with the checks and 9 s without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

METHOD = "generate_input_output_runtime_checks"

NO_CHECKS = """
static inline bool _check_aoti_runtime_check_inputs_env() { return false; }
static inline void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}
"""


@contextlib.contextmanager
def without_input_checks() -> Iterator[None]:
    """While active, generated wrappers hold no input checks. Does nothing if this torch generates them otherwise."""
    original = getattr(CppWrapperCpu, METHOD, None)
    if original is None:
        yield
        return
    setattr(CppWrapperCpu, METHOD, _write_no_checks)
    try:
        yield
    finally:
        setattr(CppWrapperCpu, METHOD, original)


def _write_no_checks(wrapper: Any) -> None:
    wrapper.prefix.splice_aot(NO_CHECKS)
