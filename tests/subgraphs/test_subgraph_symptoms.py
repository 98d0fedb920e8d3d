"""What users of other caches reported, one test each, named after what they saw."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from coexec.subgraphs.artifacts import ArtifactFolder
from coexec.subgraphs.code_hash import op_code_hash
from coexec.subgraphs.graph_key import GraphMode, key_of_graph
from coexec.subgraphs.location import StoreLocation, private_location
from coexec.subgraphs.machine import current_environment
from coexec.subgraphs.store import Store, open_store
from tests.subgraphs import children
from tests.subgraphs.samples import HERE, decision, elsewhere, key, publish, tuned


def test_a_reader_never_sees_a_half_written_file(store: Store) -> None:
    """pytorch#172144: 'pickle data was truncated', from somebody's temporary file."""
    artifacts = store._open()[1]
    tuned(store, key(), b"whole")
    seen = []

    def slowly() -> Iterator[bytes]:
        yield b"first half"
        seen.append([size for _, size, _ in artifacts.digests()])
        report = store.verify()
        assert report is not None
        assert report.ok
        yield b"second half"

    digest = store.put_artifact(slowly())
    assert seen == [[5]]
    assert store.open_artifact(digest or "").read_bytes() == b"first halfsecond half"  # type: ignore[union-attr]


AUDITED = """
written = []
def watch(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and "/artifacts/" in str(arguments[0]):
        written.append(str(arguments[0]))
sys.addaudithook(watch)
store = Store(private_location(Path(sys.argv[1])), strict=True)
tuned(store, key())
print(written, len(list(Path(sys.argv[1]).glob("artifacts/*/*"))))
"""


def test_no_file_that_a_reader_looks_for_is_ever_open_for_writing(location: StoreLocation) -> None:
    """pytorch#172144 once more: what cannot be written in place cannot be read half."""
    assert children.run(AUDITED, location.folder) == "[] 1\n"


def test_a_writer_that_fails_halfway_publishes_nothing(store: Store, location: StoreLocation) -> None:
    """pytorch#172144, the writer's side."""
    publish(store, b"x")

    def breaks() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put_artifact(breaks())
    assert [path for path in location.folder.rglob("*") if path.is_file() and path.stat().st_size == 4] == []


def test_a_cache_cleared_between_listing_and_opening_is_a_miss(serving: Store, location: StoreLocation) -> None:
    """pytorch#196189."""
    made = tuned(serving, key())
    listed = [digest for digest, _, _ in serving._open()[1].digests()]
    shutil.rmtree(location.folder)
    assert serving.open_artifact(listed[0]) is None
    assert serving.checkout(made) is None
    assert serving.counters()["fault.artifact missing"] == 2


def test_two_builds_of_one_graph_never_mix(store: Store, location: StoreLocation) -> None:
    """pytorch#92664: the library of one rank's build was loaded with the metadata of the other's."""
    other = Store(location, strict=True)
    mine = publish(store, b"library A", "model.so")
    theirs = publish(other, b"library B", "model.so"), publish(other, b"metadata B", "meta.json")
    other.decide(decision(key(), "B", artifacts=theirs), HERE)
    store.decide(decision(key(), "A", artifacts=(mine, publish(store, b"metadata A", "meta.json"))), HERE)
    found = other.lookup(key(), HERE)
    assert found is not None
    folder = other.checkout(found)
    assert folder is not None
    assert {path.read_bytes()[-1:] for path in folder.iterdir()} == {found.backend.encode()}


def test_losing_the_race_to_publish_is_fine(store: Store) -> None:
    """torchdynamo#1185: ranks shared one temporary name, and the rename of the second failed."""

    def overtaken() -> Iterator[bytes]:
        yield b"same "
        assert publish(store, b"same bytes").size_bytes == 10
        yield b"bytes"

    digest = store.put_artifact(overtaken())
    assert store.open_artifact(digest or "").read_bytes() == b"same bytes"  # type: ignore[union-attr]


def test_losing_the_race_to_check_out_is_fine(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchdynamo#1185, for the folders that backends read."""
    made = tuned(store, key())
    make = ArtifactFolder._make_checkout

    def overtaken(self: ArtifactFolder, folder: Path, sources: dict[str, Path]) -> None:
        make(self, folder, sources)
        make(self, folder, sources)

    monkeypatch.setattr(ArtifactFolder, "_make_checkout", overtaken)
    folder = store.checkout(made)
    assert folder is not None
    assert [path.name for path in folder.iterdir()] == ["model.so"]
    assert list(folder.parent.iterdir()) == [folder]


def test_an_incomplete_checkout_is_made_anew(store: Store) -> None:
    """pytorch#92664 again: a folder in which a file is missing is no folder of anything."""
    made = tuned(store, key())
    folder = store.checkout(made)
    assert folder is not None
    (folder / "model.so").unlink()
    assert store.checkout(made) == folder
    assert (folder / "model.so").read_bytes() == b"machine code"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_cache_opened_on_another_thread_while_it_is_used_does_not_crash(store: Store) -> None:
    """pytorch#192368: loading artifacts on a daemon thread while compiling ended with SIGSEGV."""
    made = [tuned(store, key("op", scale=n), b"code %d" % n) for n in range(3)]
    results: list[object] = []
    loader = threading.Thread(target=lambda: results.extend(store.checkout(one) for one in made * 5), daemon=True)
    loader.start()
    for number in range(10):
        tuned(store, key("other", scale=number))
    loader.join(60)
    assert len(results) == 15
    assert None not in results


def test_a_job_goes_on_when_its_cache_is_wiped(serving: Store, location: StoreLocation) -> None:
    """sglang#34231: a wiped shared cache killed running jobs."""
    made = tuned(serving, key())
    folder = serving.checkout(made)
    assert folder is not None
    with (folder / "model.so").open("rb") as in_use:
        shutil.rmtree(location.folder)
        assert in_use.read() == b"machine code"
    assert serving.lookup(key(), HERE) is None
    assert serving.put_subgraph(key())


def test_a_deleted_cache_folder_is_not_kept_in_mind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#167725: workers went on with the folder that was there when they started."""
    monkeypatch.delenv("COEXEC_STORE", raising=False)
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "old"))
    store = open_store(strict=True)
    tuned(store, key())
    shutil.rmtree(tmp_path / "old")
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "new"))
    tuned(store, key())
    assert not (tmp_path / "old").exists()
    assert (tmp_path / "new" / "subgraphs" / "store.sqlite").exists()


def test_the_users_cache_folder_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#178858: the setting was ignored."""
    monkeypatch.delenv("COEXEC_STORE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "mine"))
    made = tuned(open_store(strict=True), key())
    assert open_store(strict=True).checkout(made).is_relative_to(tmp_path / "mine")  # type: ignore[union-attr]
    assert not (tmp_path / "home").exists()


def test_a_changed_custom_op_is_not_served_its_old_graph(store: Store) -> None:
    """pytorch#144344: the compiled backward was stale after the op's Python had changed."""

    def environment_with(expression: str) -> object:
        space: dict[str, object] = {"torch": torch, "__name__": "users_module"}
        exec(f"def f(x: torch.Tensor) -> torch.Tensor: return {expression}", space)
        exec(f"def backward(ctx, grad): return {expression.replace('x', 'grad')}", space)
        op = torch.library.custom_op("coexec_symptom::f", space["f"], mutates_args=())  # type: ignore[arg-type]
        op.register_autograd(space["backward"])  # type: ignore[arg-type]
        return current_environment(custom_ops=["coexec_symptom::f"])

    old = environment_with("x * 2")
    store.decide(decision(key(), environment=old.digest), old)  # type: ignore[attr-defined,arg-type]
    assert store.lookup(key(), old) is not None  # type: ignore[arg-type]
    new = environment_with("x * 3")
    assert store.lookup(key(), new) is None  # type: ignore[arg-type]
    assert "op.coexec_symptom::f" in store.explain_miss(key(), new)  # type: ignore[arg-type]
    assert len(op_code_hash("coexec_symptom::f")) == 64


def test_machine_code_of_another_cpu_is_not_loaded(store: Store, tmp_path: Path) -> None:
    """docwire#235, adoptium-support#1507: AVX-512 code in a copied cache died with SIGILL."""
    tuned(store, key())
    shutil.copytree(store.location.folder, tmp_path / "copied")
    (tmp_path / "copied").chmod(0o700)
    there = Store(private_location(tmp_path / "copied"), strict=True)
    assert there.lookup(key(), HERE) is not None
    assert there.lookup(key(), elsewhere(cpu__features="avx2")) is None
    assert there.counters()["miss.other_environment"] == 1


def test_eighty_equal_layers_are_one_entry(serving: Store) -> None:
    """vllm#20451, pytorch#126205: 80 equal subgraphs missed the cache nearly every time."""
    mode = GraphMode()
    for number in range(8):
        block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        graph = torch.fx.symbolic_trace(block)
        for node in graph.graph.nodes:
            if node.op == "call_module":
                node.name = f"layers_{number}_{node.name}"
        subgraph = key_of_graph(graph, [torch.zeros(2, 4)], mode=mode)
        if number == 0:
            tuned(serving, subgraph)
        assert serving.lookup(subgraph, HERE) is not None
    assert len(serving.subgraphs()) == 1
    assert serving.counters() == {"hit": 9}


def test_a_warm_start_only_reads(store: Store, location: StoreLocation) -> None:
    """pytorch#172547: a full cache still cost a second. Here a warm process asks, and writes nothing."""
    made = [tuned(store, key("op", scale=number)) for number in range(5)]
    [store.checkout(one) for one in made]
    before = location.sqlite_file.read_bytes()  # type: ignore[union-attr]
    warm = Store(location, strict=True)
    writes: list[object] = []
    warm._write = lambda action, wait_s=None: writes.append(action)  # type: ignore[assignment,method-assign,misc,return-value]
    for number, one in enumerate(made):
        assert warm.put_subgraph(key("op", scale=number))
        assert warm.lookup(key("op", scale=number), HERE) == one
        assert warm.checkout(one) is not None
    assert writes == []
    assert location.sqlite_file.read_bytes() == before  # type: ignore[union-attr]
