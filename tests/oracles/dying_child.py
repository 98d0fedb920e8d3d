"""A child that judges one sample and dies, or hangs, in the next: for the test of processes.py."""

from __future__ import annotations

import faulthandler
import os
import sys
import time

from tests.oracles.processes import begin, end
from tests.oracles.verdict import SAME, Verdict

if __name__ == "__main__":
    begin("first")
    end(Verdict("first", SAME))
    if sys.argv[1] == "between":
        sys.exit(3)
    begin("second one")
    if sys.argv[1] == "crash":
        os.abort()
    if sys.argv[1] == "hang":
        faulthandler.dump_traceback_later(0.2, exit=True)
        time.sleep(30)
    end(Verdict("second one", SAME))
