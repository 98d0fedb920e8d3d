"""Channels-last memory for convolutions, forward and backward in one graph.

Inductor lets convolutions choose channels-last memory, but gives the operands of `convolution_backward` the strides
that the traced graph has: contiguous ones. With torch.compile forward and backward are two graphs, and the second is
traced with the strides that the first one chose; here they are one graph, every activation is an operand of both, and
each kernel between them would transpose (seen: a small ResNet's fused kernels 3 times slower). So the traced strides
of these operands are changed to channels-last before Inductor reads them.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def prefer_channels_last(graph: Graph) -> int:
    """Let the image operands of every 2-d `convolution_backward` be channels-last; return how many were changed."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        for operand in node.args[:2]:  # grad_output, input; the weight is small and converted anyway
            changed += isinstance(operand, Node) and _change(operand)
    return changed


def _change(node: Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    if value.is_contiguous(memory_format=torch.channels_last):
        return False
    with value.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty_like(value, memory_format=torch.channels_last)
    return True
