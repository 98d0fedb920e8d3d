"""Same computation, same key; anything that changes the result or the code, another key, with the entry named."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from coexec.subgraphs import code_hash
from coexec.subgraphs.errors import UnkeyableGraphError
from coexec.subgraphs.graph_key import GraphMode, constants_digest, key_of_graph
from coexec.subgraphs.key import SubgraphKey, key_of_text
from coexec.subgraphs.near_miss import explain_difference

PLAIN = GraphMode()


def traced(function: Callable[..., Any], *inputs: torch.Tensor, mode: GraphMode = PLAIN, **kwargs: Any) -> SubgraphKey:
    """Key of `function` traced to aten ops."""
    return key_of_graph(make_fx(lambda *args: function(*args))(*inputs), inputs, mode=mode, **kwargs)


def entry_changed(left: SubgraphKey, right: SubgraphKey) -> list[str]:
    assert left.digest != right.digest
    return [difference.entry for difference in explain_difference(left.text, right.text)]


def image() -> torch.Tensor:
    return torch.zeros(1, 3, 8, 8)


def conv_weight() -> torch.Tensor:
    return torch.zeros(4, 3, 3, 3)


# The collisions of 2021 ----------------------------------------------------------------------------------------------


def test_convolutions_of_other_strides_have_other_keys() -> None:
    one, two = (
        traced(lambda x, w, stride=stride: torch.conv2d(x, w, stride=stride), image(), conv_weight())
        for stride in (1, 2)
    )
    assert entry_changed(one, two) == ["%0 aten.convolution.default stride"]


def test_pools_of_other_sizes_have_other_keys() -> None:
    one, two = (
        traced(lambda x, size=size: torch.nn.functional.avg_pool2d(x, size, stride=1), image()) for size in (2, 3)
    )
    assert entry_changed(one, two) == ["%0 aten.avg_pool2d.default kernel_size"]


def test_norms_of_other_eps_have_other_keys() -> None:
    one, two = (traced(lambda x, eps=eps: torch.layer_norm(x, [8], eps=eps), image()) for eps in (1e-5, 1e-6))
    assert entry_changed(one, two) == ["%0 aten.native_layer_norm.default eps"]


def test_train_and_eval_have_other_keys() -> None:
    def run(training: bool) -> SubgraphKey:
        stats = torch.zeros(3), torch.ones(3)
        return traced(lambda x, m, v: torch.batch_norm(x, None, None, m, v, training, 0.1, 1e-5, True), image(), *stats)

    assert any("training" in entry or "ops" in entry for entry in entry_changed(run(True), run(False)))


@pytest.mark.parametrize(
    ("left", "right", "entry"),
    [
        (nn.Conv2d(3, 4, 3, stride=1), nn.Conv2d(3, 4, 3, stride=2), "stride"),
        (nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), "padding_mode"),
        (nn.MaxPool2d(2, stride=1), nn.MaxPool2d(3, stride=1), "kernel_size"),
        (nn.BatchNorm2d(3, eps=1e-5), nn.BatchNorm2d(3, eps=1e-3), "eps"),
        (nn.Dropout(0.5).train(), nn.Dropout(0.5).eval(), "training"),
        (nn.Softmax(dim=1), nn.Softmax(dim=2), "dim"),
    ],
)
def test_attributes_of_called_modules_are_in_the_key(left: nn.Module, right: nn.Module, entry: str) -> None:
    one, two = (key_of_module(module) for module in (left, right))
    assert any(changed.endswith(f" {entry}") for changed in entry_changed(one, two))


def key_of_module(module: nn.Module) -> SubgraphKey:
    """Key of a graph that calls `module`, as old tracers make it."""
    root = nn.Module()
    root.layer = module
    graph = torch.fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    return key_of_graph(torch.fx.GraphModule(root, graph), [image()], mode=PLAIN)


# What else must change the key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        (lambda x: x.double(), "in0"),
        (lambda x: x.to(memory_format=torch.channels_last), "in0"),
        (lambda x: x[:, :, :4], "in0"),
        (lambda x: x.to("meta"), "in0"),
    ],
)
def test_dtype_strides_shape_and_device_of_an_input_are_in_the_key(change: Callable[..., Any], entry: str) -> None:
    x = torch.zeros(2, 3, 8, 8)
    assert entry_changed(traced(torch.relu, x), traced(torch.relu, change(x))) == [entry]


@pytest.mark.parametrize(
    ("mode", "entry"),
    [
        (GraphMode(grad=True), "mode.grad"),
        (GraphMode(inference=True), "mode.inference"),
        (GraphMode(autocast="cpu=bfloat16"), "mode.autocast"),
    ],
)
def test_the_callers_mode_is_in_the_key(mode: GraphMode, entry: str) -> None:
    assert entry_changed(traced(torch.relu, image()), traced(torch.relu, image(), mode=mode)) == [entry]


def test_the_current_mode_is_read_from_the_thread() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert GraphMode.current() == GraphMode(grad=False, inference=False, autocast="cpu=bfloat16")
    with torch.inference_mode():
        assert GraphMode.current().inference
    assert GraphMode.current().grad


def test_requires_grad_counts_only_where_gradients_are_taken() -> None:
    plain, leaf = image(), image().requires_grad_()
    module = make_fx(torch.relu)(plain)
    assert key_of_graph(module, [plain], mode=PLAIN) == key_of_graph(module, [leaf], mode=PLAIN)
    grad = GraphMode(grad=True)
    assert key_of_graph(module, [plain], mode=grad) != key_of_graph(module, [leaf], mode=grad)


def graph_calling(target: Callable[..., Any], *args: Any, **kwargs: Any) -> SubgraphKey:
    """Key of a graph with one call, made by hand; "x" and "y" stand for its inputs."""
    graph = torch.fx.Graph()
    inputs = {name: graph.placeholder(name) for name in ("x", "y")}

    def node_of(value: Any) -> Any:
        return inputs.get(value, value) if isinstance(value, str) else value

    words = {name: node_of(value) for name, value in kwargs.items()}
    graph.output((graph.call_function(target, tuple(node_of(arg) for arg in args), words),))
    return key_of_graph(torch.fx.GraphModule(nn.Module(), graph), [torch.zeros(2), torch.zeros(2)], mode=PLAIN)


def test_int_float_and_bool_attributes_are_told_apart() -> None:
    add = torch.ops.aten.add.Tensor
    assert len({graph_calling(add, "x", "y", alpha=alpha).digest for alpha in (1, 1.0, True)}) == 3


def test_an_input_that_aliases_another_has_another_key() -> None:
    x = torch.zeros(4)
    module = make_fx(torch.add)(x, x.clone())
    apart, together = (key_of_graph(module, [x, y], mode=PLAIN) for y in (x.clone(), x))
    assert entry_changed(apart, together) == ["in1"]


def test_an_option_that_is_in_the_key_changes_it() -> None:
    fast, exact = (traced(torch.relu, image(), options={"numerics": name}) for name in ("fast", "exact"))
    assert entry_changed(fast, exact) == ["option.numerics"]


def test_swapped_inputs_have_another_key() -> None:
    x = image()
    assert traced(lambda a, b: a - b, x, x.clone()) != traced(lambda a, b: b - a, x, x.clone())


def test_list_and_tuple_indices_are_told_apart() -> None:
    assert graph_calling(operator.getitem, "x", [0, 0]) != graph_calling(operator.getitem, "x", (0, 0))


# What must not change it ---------------------------------------------------------------------------------------------


def renamed(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    module = copy.deepcopy(module)
    for number, node in enumerate(module.graph.nodes):
        node._rename(f"other_{number}")
        node.meta.clear()
        node.stack_trace = f'File "elsewhere.py", line {number}'
    module.recompile()
    return module


def test_names_metadata_and_stack_traces_do_not_change_the_key() -> None:
    module = make_fx(lambda x, w: torch.relu(torch.conv2d(x, w)))(image(), conv_weight())
    inputs = [image(), conv_weight()]
    assert key_of_graph(module, inputs, mode=PLAIN) == key_of_graph(renamed(module), inputs, mode=PLAIN)


def test_keyword_spelling_and_defaults_do_not_change_the_key() -> None:
    add = torch.ops.aten.add.Tensor
    plain = graph_calling(add, "x", "y")
    assert plain == graph_calling(add, "x", "y", alpha=1)
    assert plain == graph_calling(add, "x", other="y")
    assert plain == graph_calling(add, other="y", self="x")
    assert plain != graph_calling(add, "x", "y", alpha=2)


def test_values_of_weights_do_not_change_the_key_and_do_change_the_constants() -> None:
    def scaled(weight: torch.Tensor) -> torch.fx.GraphModule:
        return make_fx(lambda x: x * weight)(torch.zeros(3))

    one, two = scaled(torch.full((3,), 1.0)), scaled(torch.full((3,), 2.0))
    assert key_of_graph(one, [torch.zeros(3)], mode=PLAIN) == key_of_graph(two, [torch.ones(3)], mode=PLAIN)
    assert constants_digest(one) != constants_digest(two)
    assert constants_digest(one) == constants_digest(copy.deepcopy(one))
    assert constants_digest(make_fx(torch.relu)(torch.zeros(3))) == ""


def test_the_offset_of_an_input_in_its_storage_does_not_change_the_key() -> None:
    base = torch.zeros(10)
    module = make_fx(torch.relu)(base[:4])
    assert key_of_graph(module, [base[:4]], mode=PLAIN) == key_of_graph(module, [base[4:8]], mode=PLAIN)


def test_equal_layers_share_one_key() -> None:
    """vllm#20451, pytorch#126205: 80 equal subgraphs missed the cache 80 times."""
    layers = [nn.Linear(4, 4) for _ in range(5)]
    keys = set()
    for layer in layers:
        function = make_fx(lambda x, w, b: torch.nn.functional.linear(x, w, b))
        inputs = [torch.zeros(2, 4), layer.weight.detach(), layer.bias.detach()]
        keys.add(key_of_graph(function(*inputs), inputs, mode=PLAIN))
    assert len(keys) == 1


def test_a_fed_number_does_not_change_the_key() -> None:
    graph = torch.fx.Graph()
    x, rate = graph.placeholder("x"), graph.placeholder("rate")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, rate)),))
    module = torch.fx.GraphModule(nn.Module(), graph)
    fed = {key_of_graph(module, [torch.zeros(2), rate], mode=PLAIN, fed=[1]) for rate in (0.1, 0.2)}
    baked = {key_of_graph(module, [torch.zeros(2), rate], mode=PLAIN) for rate in (0.1, 0.2)}
    assert len(fed) == 1
    assert len(baked) == 2


# Symbols -------------------------------------------------------------------------------------------------------------


def dynamic_key(function: Callable[..., Any], *inputs: torch.Tensor) -> SubgraphKey:
    """Key of the graph that Dynamo makes with symbolic sizes."""
    keys: list[SubgraphKey] = []

    def backend(module: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        keys.append(key_of_graph(module, example, mode=PLAIN))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True)(*inputs)
    return keys[0]


def test_symbols_are_renumbered_and_sizes_give_the_shape_class() -> None:
    small = dynamic_key(lambda x: x.sin() + 1, torch.zeros(3, 5))
    again = dynamic_key(lambda x: x.sin() + 1, torch.zeros(4, 7))
    large = dynamic_key(lambda x: x.sin() + 1, torch.zeros(3, 500))
    assert small.text == again.text == large.text
    assert "in2: float32 [s0, s1] stride=[s1, 1] cpu" in small.text
    assert small.shape_class == "s0<=4 s1<=8"
    assert small == again
    assert small != large


def test_a_symbolic_graph_is_not_the_static_one() -> None:
    assert dynamic_key(torch.sin, torch.zeros(3, 5)).digest != traced(torch.sin, torch.zeros(3, 5)).digest


def test_a_key_can_be_asked_for_at_other_sizes() -> None:
    key = dynamic_key(lambda x: x.sin(), torch.zeros(3, 5))
    assert key.at_sizes({"s0": 1000, "s1": 8}).shape_class == "s0<=1024 s1<=8"


def test_very_many_symbols_still_make_a_short_shape_class() -> None:
    sizes = {f"s{number}": number for number in range(100)}
    key = key_of_text("text", []).at_sizes(sizes)
    assert len(key.shape_class) < 200
    assert key != key_of_text("text", []).at_sizes({**sizes, "s7": 1 << 20})


def branching_key(otherwise: Callable[..., Any]) -> SubgraphKey:
    """Key of a graph with a branch: the bodies are graphs inside the graph."""
    return dynamic_key(lambda x: torch.cond(x.sum() > 0, torch.sin, otherwise, (x,)), torch.zeros(3, 5))


def test_the_bodies_of_a_branch_are_in_the_key() -> None:
    assert branching_key(torch.cos) == branching_key(torch.cos)
    changed = entry_changed(branching_key(torch.cos), branching_key(torch.tan))
    assert changed == ["ops 1..2"]  # bodies come before the ops that call them


# Code of others ------------------------------------------------------------------------------------------------------


def test_a_graph_that_holds_an_object_without_identity_is_refused() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.rand.generator, ([2],), {"generator": None}),))
    module = torch.fx.GraphModule(nn.Module(), graph)
    module.graph.find_nodes(op="call_function", target=torch.ops.aten.rand.generator)[0].kwargs = {
        "generator": torch.Generator()
    }
    with pytest.raises(UnkeyableGraphError, match="Generator"):
        key_of_graph(module, [], mode=PLAIN)


def test_a_module_with_hooks_is_refused() -> None:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda *args: None)
    with pytest.raises(UnkeyableGraphError, match="hooks"):
        key_of_module(layer)


def test_the_code_of_a_python_function_in_the_graph_is_in_the_key() -> None:
    def graph(body: str) -> SubgraphKey:
        space: dict[str, Any] = {"__name__": "users_module", "torch": torch}
        exec(f"def inner(x): return x * 2\ndef f(x): return {body}", space)
        graph = torch.fx.Graph()
        graph.output(graph.call_function(space["f"], (graph.placeholder("x"),)))
        return key_of_graph(torch.fx.GraphModule(nn.Module(), graph), [torch.zeros(2)], mode=PLAIN)

    assert graph("inner(x) + 1") == graph("inner(x)   +   1")
    assert graph("inner(x) + 1") != graph("inner(x) + 2")


def test_custom_ops_are_named_even_where_they_are_arguments() -> None:
    """A mutating op reaches a backend as an argument of `auto_functionalized`."""

    @torch.library.custom_op("coexec_key::double_", mutates_args=("x",))
    def double_(x: torch.Tensor) -> None:
        x.mul_(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        double_(y)
        return y

    keys = []

    def compiler(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        keys.append(key_of_graph(module, inputs, mode=PLAIN))
        return module.forward

    torch._dynamo.reset()
    torch.compile(step, backend=aot_autograd(fw_compiler=compiler))(torch.zeros(3))
    assert keys[0].custom_ops == ("coexec_key::double_",)
    assert "auto_functionalized" in keys[0].text


def test_the_hash_of_a_function_follows_what_it_calls() -> None:
    def function(inner: str) -> str:
        space: dict[str, Any] = {"__name__": "users_module"}
        exec(
            f"K = {{3, 1, 2}}\ndef inner(x): return {inner}\ndef f(x): return inner(x) if x in {{'a', 'b'}} else K",
            space,
        )
        return code_hash.callable_hash(space["f"])

    assert function("x + 1") == function("x + 1")
    assert function("x + 1") != function("x - 1")


def test_a_function_that_calls_itself_can_be_hashed() -> None:
    space: dict[str, Any] = {"__name__": "users_module"}
    exec("def f(x): return f(x - 1) if x else 0", space)
    assert len(code_hash.callable_hash(space["f"])) == 64


def test_a_known_text_is_its_own_key() -> None:
    key = key_of_text("segment 1\nop aten::relu\n", ["aten::relu"], ["my::op", "my::op"])
    assert key.custom_ops == ("my::op",)
    assert key == key_of_text("segment 1\nop aten::relu\n", ["aten::relu"])
    assert key != key_of_text("segment 1\nop aten::silu\n", ["aten::silu"])


# Explaining ----------------------------------------------------------------------------------------------------------


def test_an_inserted_op_is_named_alone() -> None:
    x = image()
    short = traced(lambda x: x.sin().cos().tan(), x)
    long = traced(lambda x: x.sin().exp().cos().tan(), x)
    assert [str(d) for d in explain_difference(short.text, long.text)] == ["before op 1: (absent) -> aten.exp.default"]


def test_equal_texts_have_no_difference() -> None:
    assert explain_difference(traced(torch.sin, image()).text, traced(torch.sin, image()).text) == ()


def test_differences_are_limited() -> None:
    left = "".join(f"in{n}: a\n" for n in range(50))
    assert len(explain_difference(left, left.replace("a", "b"), limit=7)) == 7
