"""Publishing from inside a compiled graph: the op, its place in the optimized graph, the check of the generated code.

While a segment is lowered and optimized, a publish is `coexec_lower::mark(value, channel)`, which has no order of its
own.
Just before scheduling, :func:`place_publishes` replaces the marks by `coexec::publish(order, value, channel)`:

* all publishes of a graph declare to write one token, `order`, so the compiler keeps each of them and their order;
* the next matrix product or convolution is declared to run after the publish (`control_deps`), or Inductor would move
  the call to the graph's end, where nobody needs the value any more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.fx import Graph, Node
from torch.fx.node import has_side_effect
from torch.utils._ordered_set import OrderedSet

from coexec.errors import CoexecError

SCHEMA = "publish(Tensor(a!) order, Tensor value, int channel) -> ()"

received: list[tuple[int, torch.Tensor]] = []
"""Channel and copy of every value published in this process by the Python kernel (worker and tests only)."""

aten = torch.ops.aten

MATRIX_OPS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})


class PublishLostError(CoexecError):
    """The compiler dropped, doubled or reordered a publish; the message says which."""


_libraries: list[torch.library.Library] = []  # a Library unregisters its ops when it is collected


def mark(value: torch.Tensor, channel: int) -> None:
    """Note, in the graph being traced, that `value` leaves on `channel`."""
    _define_mark()
    torch.ops.coexec_lower.mark.default(value, channel)


def register_publish() -> None:
    """Define `coexec::publish` unless the native core has; the Python kernel appends to :data:`received`."""
    if not _is_defined("coexec::publish"):
        library = torch.library.Library("coexec", "FRAGMENT")
        library.define(SCHEMA)
        library.impl("publish", _receive, "CPU")
        _libraries.append(library)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("coexec::publish", "Meta"):
        library = torch.library.Library("coexec", "FRAGMENT")
        library.impl("publish", _receive_nothing, "Meta")
        _libraries.append(library)


def unregister_publish() -> None:
    """Remove our definition, so that the native core can be loaded into this process afterwards (tests)."""
    while _libraries:
        _libraries.pop()._destroy()


def receives_here() -> bool:
    """Published values arrive in :data:`received`: the native core is not loaded."""
    return any(library.ns == "coexec" and library._op_defs for library in _libraries)


def _receive(order: torch.Tensor, value: torch.Tensor, channel: int) -> None:
    received.append((channel, value.clone()))


def _receive_nothing(order: torch.Tensor, value: torch.Tensor, channel: int) -> None:
    return None


def _define_mark() -> None:
    if _is_defined("coexec_lower::mark"):
        return
    library = torch.library.Library("coexec_lower", "DEF")
    library.define("mark(Tensor value, int channel) -> ()")
    library.impl("mark", lambda value, channel: None, "CompositeExplicitAutograd")
    _libraries.append(library)
    has_side_effect(torch.ops.coexec_lower.mark.default)


def _is_defined(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel(name))


def place_publishes(graph: Graph) -> None:
    """Replace the marks of an optimized graph by publishes that the scheduler cannot drop, double or delay."""
    marks = [n for n in graph.nodes if n.op == "call_function" and str(n.target) == "coexec_lower.mark.default"]
    if not marks:
        return
    order = _make_token(graph)
    position = order
    followers: dict[Node, OrderedSet[Node]] = {}
    for node in marks:
        position = _place(graph, node, order, position)
        if (follower := _next_heavy(position)) is not None:
            followers.setdefault(follower, OrderedSet()).add(position)
    preserve_node_ordering(graph, followers)


def _make_token(graph: Graph) -> Node:
    first = next(n for n in graph.nodes if n.op != "placeholder")
    fake = next(n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
    with graph.inserting_before(first):
        token = graph.call_function(aten.full.default, ([1], 0), {"dtype": torch.uint8, "device": torch.device("cpu")})
    with fake:
        token.meta["val"] = torch.full([1], 0, dtype=torch.uint8)
    return token


def _place(graph: Graph, node: Node, order: Node, previous: Node) -> Node:
    """Put the publish behind its value's computation and the previous publish, whichever is later."""
    value, channel = node.args
    assert isinstance(value, Node)
    numbers = {n: i for i, n in enumerate(graph.nodes)}
    behind = max((value, previous), key=numbers.__getitem__)
    if behind.op == "placeholder":
        behind = order
    with graph.inserting_after(behind):
        publish = graph.call_function(torch.ops.coexec.publish.default, (order, value, channel))
    publish.meta["val"] = None
    graph.erase_node(node)
    return publish


def _next_heavy(node: Node) -> Node | None:
    """The next matrix product, or else the next convolution (which loses its layout preference by being ordered)."""
    first_convolution = None
    while (node := node.next).op != "output":
        if node.target in MATRIX_OPS:
            return node
        if node.target in CONVOLUTIONS and first_convolution is None:
            first_convolution = node
    return first_convolution


def check_generated_code(code: str, channels: Sequence[int], serialized: dict[str, Any]) -> list[float]:
    """Check that the generated C++ publishes exactly `channels`, in that order.

    Args:
        code: the wrapper's source.
        channels: of spec.publishes, in order.
        serialized: the artifact's list of custom ops (`{"nodes": [...]}`).

    Returns:
        Per publish, the share of kernel calls of the graph that come before it (0 to 1).

    Raises:
        PublishLostError: one is missing, twice there, or out of order.
    """
    names = [node["node"]["target"] for node in serialized.get("nodes", ())]
    body = code[code.rfind("AOTInductorModel::run_impl(") :]
    body = body[: body.find("} // AOTInductorModel::run_impl")]
    kernels = [m.start() for m in KERNEL_CALL.finditer(body)]
    found, places = [], []
    for call in CUSTOM_CALL.finditer(body):
        if names[int(call["index"])] == "coexec::publish":
            found.append(int(call["channel"]))
            places.append(sum(k < call.start() for k in kernels) / max(1, len(kernels)))
    if found != list(channels):
        raise PublishLostError(f"the segment publishes on channels {list(channels)}, the generated code on {found}")
    return places


CUSTOM_CALL = re.compile(
    r"aoti_torch_proxy_executor_call_function\(proxy_executor, (?P<index>\d+), \d+, "
    r"(?:std::array<int64_t, 1>\{(?P<channel>-?\d+)L*\})?"
)
"""A custom op in generated C++: its position in the list of custom ops, and its only integer argument."""

KERNEL_CALL = re.compile(r"^ +(?:\w+\()?(?:aoti_torch_(?:cpu|mkldnn|mkl)\w+|cpp_fused\w*)\(", re.MULTILINE)
"""A kernel's call in generated C++."""
