"""The store against a few dictionaries: whatever happens to it, in any order, it says what the dictionaries say."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coexec.subgraphs.entries import ArtifactRef, Decision, Measurement
from coexec.subgraphs.location import private_location, shared_location
from coexec.subgraphs.store import Store
from coexec.subgraphs.transfer import export_store, import_store
from coexec.subgraphs.trust import Keyring
from tests.subgraphs.samples import HERE, decision, elsewhere, key, measurement

KEYS = st.builds(key, st.sampled_from(["relu", "gelu"]), st.sampled_from([1.0, 2.0]), st.sampled_from(["", "s0<=8"]))
ENVIRONMENTS = st.sampled_from([HERE, elsewhere(threads="1")])
WEIGHTS = st.sampled_from(["", "a" * 64, "b" * 64])
CONTENTS = st.sampled_from([b"one", b"two", b"three" * 1000])
Place = tuple[str, str, str, str]


class StoreMachine(RuleBasedStateMachine):
    """`decisions`, `subgraphs`, `measured` and `files` are the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="coexec-model-"))
        self.keyring = Keyring(self.folder / "keys")
        self.clock = itertools.count(1)
        self.forget_all()

    def forget_all(self) -> None:
        self.decisions: dict[Place, Decision] = {}
        self.subgraphs: dict[str, str] = {}  # digest -> digest of the program or ""
        self.measured: dict[str, Measurement] = {}
        self.files: dict[str, bytes] = {}

    @initialize(shared=st.booleans())
    def open(self, shared: bool) -> None:
        url = f"sqlite:///{self.folder}/team.sqlite"
        here = self.folder / "store"
        self.location = shared_location(url, here) if shared else private_location(here)
        self.store = Store(self.location, strict=True, keyring=self.keyring)

    @rule()
    def reopen(self) -> None:
        """As another process does."""
        self.store = Store(self.location, strict=True, keyring=self.keyring)

    @rule(subgraph=KEYS, program=st.none() | CONTENTS)
    def put_subgraph(self, subgraph, program) -> None:  # type: ignore[no-untyped-def]  # strategies only
        assert self.store.put_subgraph(subgraph, program=program)
        present = self.subgraphs.get(subgraph.digest, "")
        self.subgraphs[subgraph.digest] = present or (self.added(program) if program is not None else "")

    def added(self, content: bytes) -> str:
        digest = self.store.put_artifact(content)
        assert digest is not None
        self.files[digest] = content
        return digest

    @rule(subgraph=KEYS, environment=ENVIRONMENTS, constants=WEIGHTS, contents=st.lists(CONTENTS, max_size=2))
    def decide(self, subgraph, environment, constants, contents) -> None:  # type: ignore[no-untyped-def]  # strategies only
        refs = tuple(
            ArtifactRef(f"file{number}", self.added(content), len(content)) for number, content in enumerate(contents)
        )
        when = float(next(self.clock))
        made = decision(
            subgraph,
            environment=environment.digest,
            constants=constants,
            artifacts=refs,
            options={"n": when},
            decided_s=when,
        )
        assert self.store.decide(made, environment)
        self.decisions[made.subgraph, made.environment, made.shape_class, made.constants] = made

    @rule(subgraph=KEYS, environment=ENVIRONMENTS, constants=WEIGHTS)
    def lookup(self, subgraph, environment, constants) -> None:  # type: ignore[no-untyped-def]  # strategies only
        place = (subgraph.digest, environment.digest, subgraph.shape_class)
        own = self.decisions.get((*place, constants)) or self.decisions.get((*place, ""))
        others = [made for where, made in self.decisions.items() if where[:3] == place]
        expected = own or (max(others, key=lambda made: made.decided_s).recipe() if others else None)
        assert self.store.lookup(subgraph, environment, constants) == expected
        if expected is not None:
            self.check_files(expected)

    def check_files(self, made: Decision) -> None:
        folder = self.store.checkout(made)
        assert folder is not None
        expected = {ref.name: self.files[ref.digest] for ref in made.artifacts}
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected

    @precondition(lambda self: self.decisions)
    @rule(data=st.data())
    def forget_decision(self, data) -> None:  # type: ignore[no-untyped-def]  # strategies only
        place = data.draw(st.sampled_from(sorted(self.decisions)))
        assert self.store.forget_decision(self.decisions.pop(place))

    @rule(subgraph=KEYS, environment=ENVIRONMENTS, again=st.booleans())
    def measure(self, subgraph, environment, again) -> None:  # type: ignore[no-untyped-def]  # strategies only
        number = 0 if again else next(self.clock)
        made = measurement(subgraph, id=f"m{number}", measured_s=float(number + 1))
        made = replace(made, environment=environment.digest)
        assert self.store.record_measurement(made, environment)
        self.measured.setdefault(made.id, made)

    @rule()
    def prune_all_files(self) -> None:
        self.store.prune(max_bytes=0)
        self.decisions = {
            place: replace(made, artifacts=()) if made.artifacts else made for place, made in self.decisions.items()
        }
        self.subgraphs = dict.fromkeys(self.subgraphs, "")
        self.files = {}

    @rule()
    def wipe(self) -> None:
        shutil.rmtree(self.location.folder, ignore_errors=True)
        for file in self.folder.glob("team.sqlite*"):
            file.unlink()
        self.forget_all()

    @rule()
    def move_to_another_machine(self) -> None:
        """Export, and go on with the store that imported it."""
        file = self.folder / "export"
        export_store(self.store, file)
        named = {ref.digest for made in self.decisions.values() for ref in made.artifacts}
        named |= {program for program in self.subgraphs.values() if program}
        shutil.rmtree(self.location.folder)
        for database in self.folder.glob("team.sqlite*"):
            database.unlink()
        import_store(self.store, file)
        self.files = {digest: content for digest, content in self.files.items() if digest in named}
        # An export holds what belongs to stored subgraphs, and decisions.
        self.measured = {name: made for name, made in self.measured.items() if made.subgraph in self.subgraphs}

    @invariant()
    def holds_what_the_dictionaries_hold(self) -> None:
        if not hasattr(self, "store"):
            return
        assert {info.digest: info.program for info in self.store.subgraphs()} == self.subgraphs
        found = {(d.subgraph, d.environment, d.shape_class, d.constants): d for d in self.store.decisions()}
        assert found == self.decisions
        for digest in {made.subgraph for made in self.measured.values()} | self.subgraphs.keys():
            expected = {name: made for name, made in self.measured.items() if made.subgraph == digest}
            assert {made.id: made for made in self.store.measurements(digest)} == expected

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                report = self.store.verify()
                assert report is not None
                assert report.ok, report.problems
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


TestStoreAgainstDictionaries = StoreMachine.TestCase
TestStoreAgainstDictionaries.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
