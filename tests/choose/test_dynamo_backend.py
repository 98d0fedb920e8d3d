"""`torch.compile(backend="coexec")`: what is stored, what is served, and that trouble never reaches the user."""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coexec import choose, dynamo_backend
from coexec.dynamo_backend import Region, coexec_backend
from coexec.errors import OptionValueError, UnknownOptionError
from coexec.subgraphs.store import Store
from coexec.tuning.program_file import load_program
from tests.choose.decided import decide
from tests.tuning.planted import STEPS

LIMITS = {"rounds": (3, 4), "busy_retries": 0, "attempt_s": 20.0}


def climb(x: torch.Tensor) -> torch.Tensor:
    for _ in range(STEPS):
        x = x + 1.0
    return x


class Climb(torch.nn.Module):
    """The same with a weight."""

    def __init__(self, value: float = 0.5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((16, 16), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(STEPS):
            x = x + self.weight
        return x


def compiled(function: Any, mode: str = "serve", **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=coexec_backend, options={"mode": mode}, **options)  # type: ignore[no-any-return]


def tuned(store: Store, candidate: str, function: Any, *inputs: Any) -> None:
    """As if the tuner had tried only this candidate on the function's graphs: the measurement alone is made up."""
    returned = compiled(function, "collect")(*inputs)
    if returned.requires_grad:
        returned.sum().backward()
    for info in store.subgraphs():
        decide(store, info.digest, candidate)
    choose.reset_counters()


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[Region]:
    """The regions made during the test."""
    made: list[Region] = []
    original = Region.__init__

    def recording(self: Region, *arguments: Any) -> None:
        made.append(self)
        original(self, *arguments)

    monkeypatch.setattr(Region, "__init__", recording)
    return made


def test_an_unknown_graph_is_stored_with_its_program_and_runs_as_dynamos_graph(
    store: Store, regions: list[Region]
) -> None:
    run, x = compiled(climb), torch.randn(16, 16)
    for _ in range(3):
        assert torch.equal(run(x), climb(x))
    (info,) = store.subgraphs()
    assert info.note.startswith("test_dynamo_backend.py:")
    path = store.program(info.digest)
    assert path is not None
    assert torch.allclose(load_program(path).run_eagerly(x)[0], climb(x))
    assert choose.counters() == {"stored": 1, "eager.not tuned": 1}
    assert regions[0].current is regions[0].dynamo  # from the second call on no slower than backend="eager"


def test_graphs_of_one_line_are_told_apart_by_their_shapes(store: Store) -> None:
    run = compiled(climb, "collect", dynamic=False)
    for shape, dtype in (((4, 8), torch.float32), ((2, 3, 4), torch.float32), ((16,), torch.float64)):
        run(torch.ones(shape, dtype=dtype))
    notes = sorted(info.note.partition(" ")[2] for info in store.subgraphs())
    assert notes == [f"({shape}, {STEPS} ops)" for shape in ("16 float64", "2x3x4", "4x8")]
    assert all(note in choose.explain() for note in notes)


def test_a_tuned_graph_is_served_from_the_store_without_building(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16, 16)
    tuned(store, "planted-fast", climb, x)
    _forbid_building(monkeypatch)
    run = compiled(climb)
    results = [run(x) for _ in range(3)]
    assert choose.counters() == {"serve.planted-fast": 1}
    assert all(torch.equal(result, x + STEPS) for result in results)  # the candidate's rounding, not eager's
    assert "planted-fast" in choose.explain()


def test_mode_tune_tunes_what_is_unknown_and_serves_it_at_once(store: Store) -> None:
    x = torch.randn(16, 16)
    options = {"mode": "tune", "tune": {**LIMITS, "candidates": ("planted-fast",)}}
    run = torch.compile(climb, backend=coexec_backend, options=options)
    assert torch.equal(run(x), x + STEPS)
    assert choose.counters()["serve.planted-fast"] == 1
    assert [m.backend for info in store.subgraphs() for m in store.measurements(info.digest)] == ["planted-fast"]


def test_collect_never_serves(store: Store) -> None:
    x = torch.randn(16, 16)
    tuned(store, "planted-fast", climb, x)
    assert torch.equal(compiled(climb, "collect")(x), climb(x))
    assert not any(name.startswith("serve") for name in choose.counters())


def test_a_graph_for_which_eager_is_fastest_runs_as_dynamos_graph(store: Store, regions: list[Region]) -> None:
    x = torch.randn(16, 16)
    tuned(store, "planted-slow", climb, x)
    assert torch.equal(compiled(climb)(x), climb(x))
    assert choose.counters() == {"eager.fastest": 1}
    assert regions[-1].current is regions[-1].dynamo


@pytest.mark.parametrize("candidate", ["planted-baked", "planted-bound"])
def test_captured_weights_are_noticed_when_they_change_in_place(store: Store, candidate: str) -> None:
    net, x = Climb(), torch.randn(16, 16)
    with torch.no_grad():
        tuned(store, candidate, net, x)
        run = compiled(net)
        run(x)
        assert choose.counters()[f"serve.{candidate}"] == 1
        net.weight.add_(1.0)
        assert torch.allclose(run(x), x + STEPS * 1.5, rtol=1e-4)
        assert choose.counters()["stale"] == 1
        net.weight.data = torch.full((16, 16), 3.0)
        assert torch.allclose(run(x), x + STEPS * 3.0, rtol=1e-4)


def test_other_weights_never_get_an_artifact_that_bakes_weights(store: Store) -> None:
    x = torch.randn(16, 16)
    with torch.no_grad():
        tuned(store, "planted-baked", Climb(), x)
        other = Climb(2.0)
        assert torch.allclose(compiled(other)(x), x + STEPS * 2.0, rtol=1e-4)
        assert choose.counters() == {"eager.fastest": 1}
        same = Climb()
        compiled(same)(x)
    assert choose.counters()["serve.planted-baked"] == 1


def test_a_flipped_bit_is_refused(store: Store) -> None:
    x = torch.randn(16, 16)
    tuned(store, "planted-fast", climb, x)
    (decision,) = [d for d in store.decisions() if d.backend == "planted-fast"]
    _flip_a_bit(store, decision.artifacts[0].digest)
    assert torch.equal(compiled(climb)(x), climb(x))
    assert choose.counters() == {"eager.artifact missing": 1}


def test_an_artifact_that_is_wrong_here_is_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16, 16)
    tuned(store, "planted-sleeper", climb, x)
    compiled(climb)(x)
    assert choose.counters()["serve.planted-sleeper"] == 1
    monkeypatch.setitem(os.environ, "PLANTED_AWAKE", "1")
    assert torch.equal(compiled(climb)(x), climb(x))
    assert choose.counters()["eager.wrong on live inputs"] == 1
    assert store.decisions() == ()


def test_training_stores_forward_and_backward_and_trains_as_eager(store: Store, regions: list[Region]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5))
    reference, x = copy.deepcopy(net), torch.randn(5, 8)
    run = compiled(net)
    for seed in range(3):
        for module in (run, reference):
            torch.manual_seed(seed)
            module(x).pow(2).sum().backward()
    for mine, theirs in zip(
        (*net.parameters(), *net.buffers()), (*reference.parameters(), *reference.buffers()), strict=True
    ):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    assert sorted(info.note.partition("(")[2].partition(",")[0] for info in store.subgraphs()) == [
        "backward",
        "forward",
    ]
    assert regions[0].current is regions[0].dynamo


def test_a_tuned_forward_runs_beside_an_eager_backward(store: Store) -> None:
    x = torch.randn(16, 16, requires_grad=True)
    tuned(store, "planted-fast", climb, x)
    x.grad = None
    compiled(climb)(x).sum().backward()
    assert choose.counters()["serve.planted-fast"] == 1
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(16, 16))


def test_dynamic_sizes_are_one_graph_with_a_class_per_size(store: Store) -> None:
    run = compiled(lambda x: torch.relu(x) * 2 + 1, dynamic=True)
    for size in (4, 6, 40):
        x = torch.randn(size, size + 1)
        assert torch.equal(run(x), torch.relu(x) * 2 + 1)
    (info,) = store.subgraphs()
    path = store.program(info.digest)
    assert path is not None
    program = load_program(path)
    assert program.dynamic
    x = torch.randn(7, 9)
    sizes = [7 if value == 4 else 9 for value in program.inputs if isinstance(value, int)]
    assert torch.equal(program.run_eagerly(*sizes, x)[0], torch.relu(x) * 2 + 1)


def test_a_candidate_for_a_dynamic_graph_is_checked_at_every_new_size(store: Store) -> None:
    x = torch.randn(16, 17)
    run = compiled(climb, "collect", dynamic=True)
    run(x)
    for info in store.subgraphs():
        decide(store, info.digest, "planted-rigid")
    choose.reset_counters()
    run = compiled(climb, dynamic=True)
    for _ in range(2):
        assert torch.equal(run(x), climb(x))
    assert choose.counters() == {"serve.planted-rigid": 1}
    other = torch.randn(15, 14)
    assert torch.equal(run(other), climb(other))
    assert choose.counters()["eager.wrong on live inputs"] == 1


def test_a_candidate_that_raises_gives_way_to_eager(store: Store) -> None:
    x = torch.rand(16, 16)
    tuned(store, "planted-picky", climb, x)
    run = compiled(climb)
    assert torch.equal(run(x), x + STEPS)
    assert torch.equal(run(-x), climb(-x))
    assert choose.counters() == {"serve.planted-picky": 1, "eager.failed while serving": 1}
    assert torch.equal(run(x), climb(x))


def test_a_graph_without_a_key_runs_eagerly(store: Store) -> None:
    @torch.library.custom_op("coexec_tests::nameless", mutates_args=())
    def nameless(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    nameless.register_fake(lambda x: torch.empty_like(x))
    run = compiled(lambda x: nameless(x) * 2)
    x = torch.randn(4)
    for _ in range(2):
        assert torch.equal(run(x), (x + 1) * 2)


def test_a_store_that_cannot_be_used_costs_only_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(dynamo_backend, "_cache_reported", True)
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "file"))
    x = torch.randn(16, 16)
    run = compiled(climb)
    for _ in range(2):
        assert torch.equal(run(x), climb(x))
    assert sum(count for name, count in choose.counters().items() if name.startswith("eager")) >= 1


def test_options_are_checked() -> None:
    module = torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.raises(OptionValueError, match="'fast'"):
        coexec_backend(module, [torch.randn(2)], mode="fast")
    with pytest.raises(UnknownOptionError, match="moode"):
        coexec_backend(module, [torch.randn(2)], options={"moode": "serve"})


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ({"bugdet_s": 3}, ["tune.bugdet_s", "Did you mean 'tune.budget_s'", "tune.per_graph_s"]),
        ({"attempt_s": 0}, ["attempt_s=0", "positive"]),
        ({"attempt_s": "long"}, ["attempt_s", "long"]),
        ({"candidates": ("planted-fats",)}, ["planted-fats", "Did you mean 'planted-fast'"]),
        ("30m", ["tune='30m'", "budget_s"]),
    ],
)
def test_limits_of_the_tuner_are_checked_where_the_user_sees_it(tune: Any, words: list[str]) -> None:
    torch._dynamo.reset()
    run = torch.compile(climb, backend=coexec_backend, options={"mode": "tune", "tune": tune})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        run(torch.randn(4))
    assert isinstance(raised.value.inner_exception, UnknownOptionError | OptionValueError)
    for word in words:
        assert word in str(raised.value)


def test_a_cache_folder_that_cannot_be_used_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dynamo_backend, "_cache_reported", False)
    x = torch.randn(16, 16)
    with pytest.warns(UserWarning, match=f"{tmp_path} can be written by others.*runs eagerly") as caught:
        returned = [compiled(climb)(x) for _ in range(2)]
    assert len(caught) == 1
    assert all(torch.equal(y, climb(x)) for y in returned)
    assert not (tmp_path / "subgraphs").exists()


def test_torch_finds_the_backend_by_name() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["coexec"].partition(":")
    assert (module, name) == (coexec_backend.__module__, coexec_backend.__name__)


def _forbid_building(monkeypatch: pytest.MonkeyPatch) -> None:
    from coexec.backends.candidates import registry

    def build(*_: Any, **__: Any) -> Any:
        raise AssertionError("a serving process builds nothing")

    monkeypatch.setattr(type(registry.get("planted-fast")), "build", build)


def _flip_a_bit(store: Store, digest: str) -> None:
    path = store.open_artifact(digest)
    assert path is not None
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
