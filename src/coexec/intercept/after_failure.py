"""After a kernel failed: Python may have gone on by many lines that eager would never have reached."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch


def forget_gradients(never_computed: Callable[[torch.Tensor], bool]) -> None:
    """Sets `.grad` to None wherever it holds a tensor that depends on the failed op.

    The assignment came after the failed op, so it has no place in eager's state. What was there before is gone, unless
    it was None: a program that clears its gradients before the failing line, or after its backward pass, finds what
    eager leaves; one that clears them between the two finds None instead of the previous gradients.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for leaf in _leaves():
            if leaf.grad is not None and never_computed(leaf.grad):
                leaf.grad = None


def _leaves() -> Iterator[torch.Tensor]:
    """Leaf tensors that gradients are accumulated in. By type: `isinstance` asks proxies for their class."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and candidate.requires_grad and candidate.is_leaf:
            yield candidate
