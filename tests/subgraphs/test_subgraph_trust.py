"""What a store believes: nothing that somebody else could have written, unless a trusted key has signed it."""

from __future__ import annotations

import ast
import base64
import json
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from coexec.subgraphs import rows
from coexec.subgraphs.entries import ArtifactRef, Decision
from coexec.subgraphs.errors import TrustError
from coexec.subgraphs.location import StoreLocation, private_location
from coexec.subgraphs.store import Store
from coexec.subgraphs.trust import Keyring, Signature, ensure_private_folder, statement_bytes
from tests.subgraphs.samples import HERE, decision, key, publish, tuned

SOURCE = Path(__file__).resolve().parents[2] / "src" / "coexec" / "subgraphs"


# The private folder --------------------------------------------------------------------------------------------------


def test_a_new_store_is_closed_to_others(store: Store, location: StoreLocation) -> None:
    store.checkout(tuned(store, key()))
    for path in (location.folder, *location.folder.rglob("*")):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert {path.name for path in location.folder.iterdir()} >= {"store.sqlite", "artifacts"}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(TrustError, match="writable by others"):
        Store(private_location(folder), strict=True).lookup(key(), HERE)
    serving = Store(private_location(folder))
    assert serving.lookup(key(), HERE) is None
    assert serving.counters() == {"fault.untrusted": 1}


def test_a_folder_that_others_could_only_read_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o755)
    ensure_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "store").symlink_to(tmp_path / "real")
    with pytest.raises(TrustError, match="symbolic link"):
        ensure_private_folder(tmp_path / "store")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(TrustError, match="belongs to user"):
        ensure_private_folder(folder)


# Keys and signatures -------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_and_only_its_user_can_read_it(keyring: Keyring) -> None:
    assert keyring.create() == keyring.create() == keyring.public_key()
    assert stat.S_IMODE((keyring.folder / "signing_key").stat().st_mode) == 0o600
    assert stat.S_IMODE(keyring.folder.stat().st_mode) == 0o700


def test_a_signature_holds_for_exactly_one_statement(keyring: Keyring) -> None:
    keyring.create()
    statement: dict[str, object] = {"kind": "decision", "subgraph": "a" * 64, "backend": "x"}
    signature = keyring.sign(statement)
    keyring.check(statement, signature)
    with pytest.raises(TrustError, match="altered or forged"):
        keyring.check({**statement, "backend": "y"}, signature)


def test_a_strangers_signature_counts_once_the_stranger_is_trusted(keyring: Keyring, tmp_path: Path) -> None:
    stranger = Keyring(tmp_path / "stranger")
    public = stranger.create()
    statement: dict[str, object] = {"kind": "decision", "subgraph": "a" * 64}
    signature = stranger.sign(statement)
    with pytest.raises(TrustError, match="not trusted"):
        keyring.check(statement, signature)
    keyring.trust(public, "a colleague")
    keyring.trust(public, "a colleague")
    keyring.check(statement, signature)
    assert (keyring.folder / "trusted_keys").read_text() == f"{public} a colleague\n"


@pytest.mark.parametrize(
    "value", ["", "no base64!", base64.b64encode(b"x" * 64).decode(), base64.b64encode(b"x").decode()]
)
def test_what_is_no_signature_is_refused(value: str, keyring: Keyring) -> None:
    keyring.create()
    signature = keyring.sign({})
    assert signature is not None
    with pytest.raises(TrustError):
        keyring.check({}, Signature(signature.key_id, value))


def test_what_is_not_signed_is_refused(keyring: Keyring) -> None:
    with pytest.raises(TrustError, match="not signed"):
        keyring.check({"kind": "decision"}, None)
    assert keyring.sign({"kind": "decision"}) is None


@pytest.mark.parametrize("text", ["", "short", "ssh-ed25519 AAAA", base64.b64encode(b"x" * 31).decode()])
def test_what_is_no_public_key_is_not_trusted(text: str, keyring: Keyring) -> None:
    with pytest.raises(TrustError, match="no public key"):
        keyring.trust(text)


def test_a_key_file_that_others_can_write_is_not_believed(keyring: Keyring, tmp_path: Path) -> None:
    keyring.trust(Keyring(tmp_path / "stranger").create())
    (keyring.folder / "trusted_keys").chmod(0o666)
    with pytest.raises(TrustError, match="writable by others"):
        keyring.trusted()


def test_comments_and_broken_lines_in_the_trusted_keys_are_skipped(keyring: Keyring, tmp_path: Path) -> None:
    public = Keyring(tmp_path / "stranger").create()
    keyring.trust(public)
    (keyring.folder / "trusted_keys").write_text(f"# our team\nnonsense\n\n{public} one # two\n")
    assert len(keyring.trusted()) == 1


def test_statements_are_spelled_in_one_way_only() -> None:
    assert statement_bytes({"b": 1, "a": [1, "é"]}) == statement_bytes({"a": [1, "é"], "b": 1})
    assert statement_bytes({"a": "1"}) != statement_bytes({"a": 1})


# A shared store ------------------------------------------------------------------------------------------------------


def trust_each_other(one: Store, other: Store) -> None:
    one.keyring.trust(other.keyring.create())
    other.keyring.trust(one.keyring.create())


def test_a_team_shares_decisions_artifacts_and_programs(shared: Store, teammate: Store) -> None:
    trust_each_other(shared, teammate)
    content = os.urandom(9 << 20)
    made = tuned(shared, key(), content)
    shared.put_subgraph(key("gelu"), program=b"graph")
    assert teammate.lookup(key(), HERE) == made
    folder = teammate.checkout(made)
    assert folder is not None
    assert folder.is_relative_to(teammate.location.folder)
    assert (folder / "model.so").read_bytes() == content
    program = teammate.program(key("gelu").digest)
    assert program is not None
    assert program.read_bytes() == b"graph"
    assert teammate.verify().ok  # type: ignore[union-attr]


def test_a_decision_of_an_untrusted_writer_is_refused(shared: Store, teammate: Store) -> None:
    tuned(shared, key())
    with pytest.raises(TrustError, match="not trusted"):
        teammate.lookup(key(), HERE)
    serving = Store(teammate.location, keyring=teammate.keyring)
    assert serving.lookup(key(), HERE) is None
    assert serving.decisions() == ()
    assert serving.counters() == {"fault.untrusted": 2}


def tamper(store: Store, statement: str, *values: object) -> None:
    file = store.location.sqlite_file
    assert file is not None
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute(statement, values).rowcount > 0
        connection.commit()


def reseal(store: Store) -> None:
    """An attacker can compute checksums: make all of them match again."""
    for row in store._open()[0].read(rows.decision_rows):
        fields = row._asdict()
        refs = tuple(ArtifactRef(*ref) for ref in json.loads(fields.pop("artifacts")))
        options = json.loads(fields.pop("options"))
        names = ("subgraph", "environment", "backend", "shape_class", "constants", "speedup", "reason", "decided_s")
        forged = Decision(**{name: fields[name] for name in names}, options=options, artifacts=refs)
        tamper(store, "UPDATE coexec_decision SET checksum = ? WHERE subgraph = ?", forged.checksum(), row.subgraph)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("backend", "evil"),
        ("options", '{"library":"/tmp/evil.so"}'),
        ("artifacts", "[]"),
        ("speedup", 99.0),
        ("decided_s", 1.0),
        ("shape_class", ""),
    ],
)
def test_a_forged_column_of_a_decision_is_refused(column: str, value: object, shared: Store, teammate: Store) -> None:
    trust_each_other(shared, teammate)
    tuned(shared, key(shape_class="s0<=8"), speedup=1.5)
    tamper(shared, f"UPDATE coexec_decision SET {column} = ?", value)
    reseal(shared)
    with pytest.raises(TrustError, match="altered or forged"):
        teammate.lookup(key() if column == "shape_class" else key(shape_class="s0<=8"), HERE)


def test_a_signed_decision_moved_to_another_graph_is_refused(shared: Store, teammate: Store) -> None:
    trust_each_other(shared, teammate)
    tuned(shared, key("relu"))
    tamper(shared, "UPDATE coexec_decision SET subgraph = ?", key("gelu").digest)
    reseal(shared)
    with pytest.raises(TrustError, match="altered or forged"):
        teammate.lookup(key("gelu"), HERE)


def test_an_unsigned_decision_is_refused(shared: Store, teammate: Store) -> None:
    trust_each_other(shared, teammate)
    tuned(shared, key())
    tamper(shared, "UPDATE coexec_decision SET signature = '', key_id = ''")
    with pytest.raises(TrustError, match="not signed"):
        teammate.lookup(key(), HERE)


def test_forged_content_of_a_shared_artifact_is_refused(shared: Store, teammate: Store) -> None:
    trust_each_other(shared, teammate)
    made = tuned(shared, key(), b"good code")
    tamper(shared, "UPDATE coexec_artifact_chunk SET content = ?", b"evil code")
    found = teammate.lookup(key(), HERE)
    assert found == made
    serving = Store(teammate.location, keyring=teammate.keyring)
    assert serving.checkout(made) is None
    assert serving.counters() == {"fault.artifact altered": 1}
    assert list((teammate.location.folder / "artifacts").rglob("?" * 64)) == []
    assert [problem.kind for problem in teammate.verify().problems] == ["artifact"]  # type: ignore[union-attr]


def test_another_graphs_program_is_refused(shared: Store, teammate: Store) -> None:
    trust_each_other(shared, teammate)
    shared.put_subgraph(key("relu"), program=b"relu graph")
    shared.put_subgraph(key("gelu"), program=b"gelu graph")
    tamper(
        shared,
        "UPDATE coexec_subgraph SET (program, signature) = "
        "(SELECT program, signature FROM coexec_subgraph WHERE digest = ?) WHERE digest = ?",
        key("gelu").digest,
        key("relu").digest,
    )
    with pytest.raises(TrustError, match="altered or forged"):
        teammate.program(key("relu").digest)


def test_repair_of_a_shared_store_removes_what_cannot_be_trusted(shared: Store, teammate: Store) -> None:
    trust_each_other(shared, teammate)
    tuned(shared, key("relu"))
    tuned(shared, key("gelu"))
    tamper(shared, "UPDATE coexec_decision SET backend = 'evil' WHERE subgraph = ?", key("relu").digest)
    assert len(teammate.verify(repair=True).problems) == 1  # type: ignore[union-attr]
    assert teammate.verify().ok  # type: ignore[union-attr]
    assert teammate.lookup(key("gelu"), HERE) is not None


def test_pruning_a_shared_store_keeps_signed_recipes(shared: Store, teammate: Store) -> None:
    trust_each_other(shared, teammate)
    made = tuned(shared, key(), b"x" * 100)
    teammate.prune(max_bytes=0)
    assert shared.lookup(key(), HERE) == made.recipe()
    assert Store(shared.location, keyring=shared.keyring).checkout(made) is not None  # the own verified copy
    fresh = Store(teammate.location, keyring=teammate.keyring)
    assert fresh.checkout(made) is None
    assert fresh.counters() == {"fault.artifact missing": 1}


def test_a_private_store_needs_no_keys(store: Store, keyring: Keyring) -> None:
    tuned(store, key())
    assert not keyring.folder.exists()


def test_decisions_of_ones_own_need_no_further_trust(shared: Store) -> None:
    made = tuned(shared, key())
    assert shared.lookup(key(), HERE) == made
    assert shared.decide(decision(key(), "eager", artifacts=(publish(shared, b"z"),)), HERE)


# Nothing is unpickled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(SOURCE.glob("*.py")), ids=lambda file: file.name)
def test_nothing_in_the_database_can_unpickle(file: Path) -> None:
    """Not by pickle, not by what is built on it (torch.load, shelve, joblib), not by evaluating text."""
    words = {"pickle", "cloudpickle", "dill", "shelve", "joblib", "marshal", "PickleType"}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {part for alias in node.names for part in alias.name.split(".")}
            names |= set((getattr(node, "module", None) or "").split("."))
            assert not names & words, f"{file.name}:{node.lineno}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"torch.load", "eval", "exec", "np.load", "numpy.load"}, f"{file.name}:{node.lineno}"
