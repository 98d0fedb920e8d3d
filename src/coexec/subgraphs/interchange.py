"""The records of an export as JSON lines: one object per line. The reader refuses what the writer does not write."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from coexec.subgraphs.entries import (
    ArtifactRef,
    Decision,
    Measurement,
    Outcome,
    SubgraphInfo,
    canonical_json,
    is_digest,
)
from coexec.subgraphs.environment import Environment, environment_of_text
from coexec.subgraphs.errors import TrustError
from coexec.subgraphs.key import SubgraphKey, digest_of_text


@dataclass(slots=True)
class Records:
    """Everything an export holds besides artifacts."""

    keys: list[tuple[SubgraphKey, str, str]] = field(default_factory=list)  # key, note, digest of the program or ""
    environments: dict[str, Environment] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    def artifact_digests(self) -> set[str]:
        """Digests of all artifacts that the records name."""
        programs = {program for _, _, program in self.keys if program}
        return programs | {ref.digest for decision in self.decisions for ref in decision.artifacts}


def dump_subgraph(info: SubgraphInfo, outline: str, *, with_program: bool) -> str:
    """One line for a subgraph."""
    program = info.program if with_program else ""
    fields = {"digest": info.digest, "text": info.text, "n_ops": info.n_ops, "note": info.note}
    return _line("subgraph", fields | {"outline": outline, "program": program})


def dump_environment(environment: Environment) -> str:
    """One line for an environment."""
    return _line("environment", {"text": environment.text})


def dump_decision(decision: Decision) -> str:
    """One line for a decision."""
    return _line("decision", asdict(decision))


def dump_measurement(measurement: Measurement) -> str:
    """One line for a measurement."""
    return _line("measurement", asdict(measurement))


def _line(kind: str, fields: dict[str, Any]) -> str:
    return canonical_json({"kind": kind, **fields}) + "\n"


def load_records(text: str) -> Records:
    """Read the lines back. Errors: TrustError for anything that is not as the writer makes it."""
    records = Records()
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            _load_line(records, json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise TrustError(f"line {number} of the records is not readable ({error!r:.200}); export again") from error
    return records


def _load_line(records: Records, fields: dict[str, Any]) -> None:
    kind = fields.pop("kind")
    if kind == "subgraph":
        records.keys.append(_subgraph(fields))
    elif kind == "environment":
        environment = environment_of_text(fields["text"])
        records.environments[environment.digest] = environment
    elif kind == "decision":
        refs = tuple(ArtifactRef(**ref) for ref in fields.pop("artifacts"))
        records.decisions.append(Decision(**fields, artifacts=refs))
    elif kind == "measurement":
        records.measurements.append(Measurement(**fields | {"outcome": Outcome(fields["outcome"])}))
    else:
        raise ValueError(f"unknown kind {kind!r}")


def _subgraph(fields: dict[str, Any]) -> tuple[SubgraphKey, str, str]:
    text, program = str(fields["text"]), str(fields["program"])
    key = SubgraphKey(digest_of_text(text), text, str(fields["outline"]), int(fields["n_ops"]))
    if key.digest != fields["digest"] or not is_digest(key.outline) or (program and not is_digest(program)):
        raise ValueError(f"subgraph {str(fields['digest'])[:16]} does not match its text")
    return key, str(fields["note"]), program
