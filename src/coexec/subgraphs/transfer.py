"""A tuned store as one file: export on the machine that tuned, import where a fleet must start warm.

The file is a zip, its parts stored uncompressed: `manifest.json` (what is inside, with size and SHA-256 of every part),
`manifest.sig` (the signature of exactly those bytes), `records.jsonl` and `artifacts/<digest>`. An import believes nothing
before the signature of a trusted key and every hash have been checked, and never uses a part's name as a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from coexec.subgraphs.artifacts import CHUNK_BYTES, hash_file
from coexec.subgraphs.entries import Decision, Measurement, canonical_json, is_digest
from coexec.subgraphs.environment import Environment, digest_of_environment
from coexec.subgraphs.errors import StoreError, TrustError
from coexec.subgraphs.key import SubgraphKey, digest_of_text
from coexec.subgraphs.records import decision_from_json, measurement_from_json
from coexec.subgraphs.store import Store
from coexec.subgraphs.trust import Signature

FORMAT = 1
_MANIFEST, _SIGNATURE, _RECORDS = "manifest.json", "manifest.sig", "records.jsonl"
_MANIFEST_LIMIT_BYTES = 64 << 20  # read before anything is trusted
