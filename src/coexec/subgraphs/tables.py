"""The tables as the newest migration leaves them. Only this folder knows SQL; `migrations` makes them, step by step."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

metadata = MetaData()

schema = Table(
    "coexec_schema",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),  # one row per applied migration
    Column("applied_s", Float(53), nullable=False),
)

subgraph = Table(
    "coexec_subgraph",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("outline", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Column("n_ops", Integer, nullable=False),
    Column("note", Text, nullable=False),
    Column("program", String(64), nullable=False),
    Column("key_id", String(64), nullable=False),  # signature of the program statement, "" in a private store
    Column("signature", Text, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("used_s", Float(53), nullable=False),
    Column("run_s", Float(53)),
    Column("runs", BigInteger, nullable=False, server_default="0"),
    Index("coexec_subgraph_outline", "outline"),
)

environment = Table(
    "coexec_environment",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("text", Text, nullable=False),
    Column("created_s", Float(53), nullable=False),
)

measurement = Table(
    "coexec_measurement",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("subgraph", String(64), nullable=False),
    Column("environment", String(64), nullable=False),
    Column("shape_class", String(255), nullable=False),
    Column("backend", String(100), nullable=False),
    Column("options", Text, nullable=False),  # JSON
    Column("outcome", String(20), nullable=False),
    Column("detail", Text, nullable=False),
    Column("median_s", Float(53)),
    Column("spread_s", Float(53)),
    Column("samples", Integer, nullable=False),
    Column("eager_s", Float(53)),
    Column("compile_s", Float(53)),
    Column("measured_s", Float(53), nullable=False),
    Index("coexec_measurement_subgraph", "subgraph", "environment"),
)

decision = Table(
    "coexec_decision",
    metadata,
    Column("subgraph", String(64), primary_key=True),
    Column("environment", String(64), primary_key=True),
    Column("shape_class", String(255), primary_key=True),
    Column("constants", String(64), primary_key=True),
    Column("backend", String(100), nullable=False),
    Column("options", Text, nullable=False),  # JSON
    Column("artifacts", Text, nullable=False),  # JSON [[name, digest, size], ...]: one row is the whole, atomic entry
    Column("speedup", Float(53)),
    Column("reason", Text, nullable=False),
    Column("decided_s", Float(53), nullable=False),
    Column("used_s", Float(53), nullable=False),
    Column("checksum", String(64), nullable=False),
    Column("key_id", String(64), nullable=False),
    Column("signature", Text, nullable=False),
)

artifact = Table(  # shared stores only: in a private store the files are the truth
    "coexec_artifact",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("used_s", Float(53), nullable=False),
)

artifact_chunk = Table(
    "coexec_artifact_chunk",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
)
