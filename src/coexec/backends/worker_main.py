"""The compile child: reads one job per line on stdin, compiles, checks and stores it, answers one line.

Started by :mod:`coexec.backends.worker` as `python -m coexec.backends.worker_main`. A job is
`{"job": 3, "spec": path, "snapshots": [path, ...], "timed": bool, "library": path | null}`; the spec is one segment, or
a list of observations of one at several sizes, each with its snapshot. A library that is given is the tuner's: it needs
no compiling and may be used once it was right on the snapshots. An answer is `{"job": 3, "key": ..., "failure": null |
{"kind", "reason"}, "report": {...} | null}`. Answers go to the pipe that was stdout; whatever compilers print goes to
stderr. The child ends, with its compilers, when its parent is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from coexec.intercept.guard import stand_guard

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 0.5
REASON_CHARS = 2000


def main(arguments: list[str] | None = None) -> int:
    """Serve jobs until stdin ends or the parent is gone."""
    parser = argparse.ArgumentParser(description="Compiles segments for one coexec process.")
    parser.add_argument("--parent", type=int, required=True, help="process to serve: the child ends with it")
    parser.add_argument("--die-with-thread", action="store_true", help="let the kernel tell when the parent ends")
    parser.add_argument("--memory-bytes", type=int, default=0, help="limit of private memory; 0: none")
    options = parser.parse_args(arguments)
    stand_guard(options.parent)
    _follow_parent(options.parent, options.die_with_thread)
    if options.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (options.memory_bytes, options.memory_bytes))
    answers = _take_stdout()
    _prepare_torch()
    for line in sys.stdin:
        answers.write(json.dumps(_serve(json.loads(line))) + "\n")
        answers.flush()
        gc.collect()
    return 0


def _follow_parent(parent: int, die_with_thread: bool) -> None:
    """End, and end the compilers of our process group, when the parent ends, even if it is killed.

    The kernel's signal comes when the *thread* that started us ends, so it is asked for only if that was the main
    thread; the watching thread covers the rest, and a guard the time in which we are stopped.
    """
    signal.signal(signal.SIGTERM, lambda *_: _end_group())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    if die_with_thread:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    _end_group()


def _end_group() -> None:
    if os.getpgrp() == os.getpid():  # we lead the group: only we and our compilers are in it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _take_stdout() -> TextIO:
    """Keep stdout's pipe for answers and send everything that is printed to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _prepare_torch() -> None:
    """One thread, and Inductor's own caches in our private folder instead of a shared temporary one."""
    import torch

    from coexec.config import private_cache_dir

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_cache_dir("inductor"))
    torch.set_num_threads(1)


def _serve(job: dict[str, Any]) -> dict[str, Any]:
    """Compile, check and store one segment. Every error is an answer."""
    from coexec.backends.cache import ArtifactCache
    from coexec.backends.key import artifact_key, key_text
    from coexec.backends.spec_json import from_json
    from coexec.backends.symbolic import unify

    try:
        form = json.loads(Path(job["spec"]).read_text())
        spec = unify([from_json(observed) for observed in form]) if isinstance(form, list) else from_json(form)
        key, text = artifact_key(spec), key_text(spec)
        refused, answer = _check_and_store(job, spec, key, text, ArtifactCache())
        answer = answer or _compile_and_store(job, spec, key, text, ArtifactCache(), refused)
    except Exception as error:
        return {"job": job["job"], "key": "", "failure": _failure("compile error", error), "report": None}
    return {"job": job["job"], "key": key, **answer}


def _check_and_store(
    job: dict[str, Any], spec: Any, key: str, text: str, cache: Any
) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Check the library that is given on live inputs, and note in the cache that it was right.

    Returns ({}, the answer), or, where there is none or it is no good, (why not, for the usual library's entry; None).
    """
    from coexec.backends.cache import PROGRAM, REFUSED, Artifact, digest_of

    if job.get("library") is None:
        return {}, None
    library = Path(job["library"])
    try:
        live = _live_inputs(job)
        report = _check(job, spec, library, live)
        known, program = cache.get(key), library.with_name(PROGRAM)
        if report is not None and report["accepted"] and isinstance(known, Artifact):
            meta = {**known.meta, "verified": True, "report": report}
            cache.put(key, text, known.library, meta, program if program.exists() else None)
            return {}, {"failure": None, "report": report}
        return {REFUSED: digest_of(library)}, None
    except Exception as error:  # a library that does not load, or raises
        print(f"the tuner's library is not used: {type(error).__name__}: {error}", file=sys.stderr)
        return {REFUSED: digest_of(library)}, None


def _compile_and_store(
    job: dict[str, Any], spec: Any, key: str, text: str, cache: Any, facts: dict[str, str]
) -> dict[str, Any]:
    from coexec.backends.cache import PROGRAM
    from coexec.backends.expressions import NotExpressibleError
    from coexec.backends.fed import NotLowerableError
    from coexec.backends.inductor import compile_segment, compile_symbolic
    from coexec.backends.leftovers import own_prefix
    from coexec.backends.symbolic import SymbolicSpec
    from coexec.config import private_cache_dir

    compile_it: Any = compile_symbolic if isinstance(spec, SymbolicSpec) else compile_segment

    with tempfile.TemporaryDirectory(prefix=own_prefix("job"), dir=private_cache_dir("compile")) as scratch:
        try:
            compiled = compile_it(spec, Path(scratch))
        except (NotLowerableError, NotExpressibleError) as error:
            op = {"op": error.op} if isinstance(error, NotLowerableError) else {}
            return _refuse(cache, key, text, {"kind": "not lowerable", "reason": str(error), **op})
        except Exception as error:
            return _refuse(cache, key, text, _failure("compile error", error))
        live = _live_inputs(job)
        report = _check(job, spec, compiled.library, live)
        if report is not None and not report["accepted"]:
            return _refuse(cache, key, text, {"kind": "wrong", "reason": "; ".join(report["problems"][:5])}, report)
        meta = {"verified": report is not None, "report": report, "compile_s": compiled.seconds, **compiled.facts}
        program, reason = _program(spec, live, Path(scratch) / PROGRAM)
        cache.put(key, text, compiled.library, {**meta, **_note(job), **reason, **facts}, program)
    return {"failure": None, "report": report}


def _note(job: dict[str, Any]) -> dict[str, str]:
    """Where the segment was met, as an entry of the cache."""
    from coexec.backends.cache import NOTE

    return {NOTE: job["note"]} if job.get("note") else {}


def _live_inputs(job: dict[str, Any]) -> list[tuple[list[Any], Any]]:
    """Per snapshot the inputs and the generator's state."""
    from coexec.backends.snapshot import read_snapshot

    return [read_snapshot(Path(snapshot)) for snapshot in job["snapshots"]]


def _observed(spec: Any) -> Any:
    from coexec.backends.symbolic import SymbolicSpec

    return spec.observed if isinstance(spec, SymbolicSpec) else (spec,)


def _program(spec: Any, live: list[tuple[list[Any], Any]], path: Path) -> tuple[Path | None, dict[str, str]]:
    """The segment for the tuner, written to `path`; None, and an entry that says why, if it cannot be stored."""
    from coexec.backends.candidates.program import ProgramError
    from coexec.backends.segment_program import SegmentProgram, observe, write_program

    passes = _observed(spec)
    if len(live) < len(passes):
        return None, {"not_tunable": "it was compiled without live inputs"}
    try:
        observed = (observe(one, inputs) for one, (inputs, _) in zip(passes, live, strict=False))
        write_program(SegmentProgram(tuple(observed)), path)
    except ProgramError as error:
        return None, {"not_tunable": str(error)}
    return path, {}


def _check(job: dict[str, Any], spec: Any, library: Path, live: list[tuple[list[Any], Any]]) -> dict[str, Any] | None:
    """Verify on the live inputs, if there are some: the report of the first that finds a problem, or of the last."""
    from coexec.backends.verify import verify

    report: dict[str, Any] | None = None
    for one, (inputs, generator_state) in zip(_observed(spec), live, strict=False):
        report = verify(one, library, inputs, generator_state, timed=bool(job.get("timed", True))).to_json()
        if not report["accepted"]:
            break
    return report


def _refuse(cache: Any, key: str, text: str, failure: dict[str, str], report: Any = None) -> dict[str, Any]:
    facts = {"report": report, "op": failure.get("op")}
    cache.put_failure(
        key, text, failure["kind"], failure["reason"], {name: fact for name, fact in facts.items() if fact}
    )
    return {"failure": failure, "report": report}


def _failure(kind: str, error: Exception) -> dict[str, str]:
    return {"kind": kind, "reason": f"{type(error).__name__}: {error}"[:REASON_CHARS]}


if __name__ == "__main__":
    sys.exit(main())
