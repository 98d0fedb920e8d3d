"""Small keys, environments and decisions for tests of the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coexec.subgraphs.entries import ArtifactRef, Decision, Measurement, Outcome
from coexec.subgraphs.environment import Environment, environment_of_entries
from coexec.subgraphs.key import SubgraphKey, key_of_text
from coexec.subgraphs.store import Store

HERE = environment_of_entries({"torch": "2.13.0", "threads": "2", "cpu.features": "avx2 avx512f"})


def key(name: str = "relu", scale: float = 1.0, shape_class: str = "") -> SubgraphKey:
    """A key with one op `name` and one attribute."""
    text = f"test 1\nin0: float32 [2]\n%0: aten.{name}.default | input=in0 | scale={scale}\noutput: [%0]\n"
    return replace(key_of_text(text, [f"aten.{name}.default"]), shape_class=shape_class)


def elsewhere(**changed: str) -> Environment:
    """The environment of the tests with some entries changed."""
    return environment_of_entries({**HERE.entries(), **{name.replace("__", "."): v for name, v in changed.items()}})


def decision(subgraph: SubgraphKey, backend: str = "onnxruntime", **fields: Any) -> Decision:
    """A decision for `subgraph` here."""
    fields.setdefault("environment", HERE.digest)
    return Decision(subgraph.digest, backend=backend, shape_class=subgraph.shape_class, **fields)


def measurement(subgraph: SubgraphKey, backend: str = "onnxruntime", **fields: Any) -> Measurement:
    """A good measurement of `subgraph` here."""
    fields = {"outcome": Outcome.OK, "median_s": 0.001, "samples": 9} | fields
    return Measurement(subgraph.digest, HERE.digest, backend, shape_class=subgraph.shape_class, **fields)


def publish(store: Store, content: bytes, name: str = "model.so") -> ArtifactRef:
    """Put `content` into `store`."""
    digest = store.put_artifact(content)
    assert digest is not None
    return ArtifactRef(name, digest, len(content))


def tuned(store: Store, subgraph: SubgraphKey, content: bytes = b"machine code", **fields: Any) -> Decision:
    """Store `subgraph` with a decision that has one artifact; returns the decision as looked up."""
    store.put_subgraph(subgraph, note="model.py:31")
    store.decide(decision(subgraph, artifacts=(publish(store, content),), **fields), HERE)
    found = store.lookup(subgraph, HERE, fields.get("constants", ""))
    assert found is not None
    return found
