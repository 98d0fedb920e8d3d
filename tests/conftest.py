"""Shared by all tests: the cache folder stays inside the checkout, and is kept between runs.

The native core takes about a minute to build; a test that needs an empty cache sets COEXEC_CACHE_DIR itself.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("COEXEC_CACHE_DIR", str(ROOT / "out" / "test-cache"))
os.environ.setdefault("COEXEC_KEEP", "1")  # small tensors: whether co-execution pays is not what tests are about
