"""MetaSchedule: searches schedules for each task of a module until the budget ends, in processes of its own."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tvm import relax, transform

from coexec.backends.candidates.candidate import CandidateError
from coexec.backends.candidates.tvm.intrinsics import preload

RECORDS = {"database_workload.json": "schedule_workloads.json", "database_tuning_record.json": "schedule_records.json"}
"""MetaSchedule's names -> ours, in the artifact: a later search can start from them."""

TRIALS_PER_ROUND = 16
TRIAL_TIMEOUT_S = 60


def search(name: str, module: Any, target: Any, folder: Path, search_s: float) -> tuple[Any, dict[str, object]]:
    """(the module with the best schedules found, facts). Errors: CandidateError if no trial succeeded."""
    preload()
    from tvm.s_tir import meta_schedule

    module = _lowered(module, target)
    tasks = meta_schedule.relax_integration.extract_tasks(module, target, {})
    if not tasks:
        raise CandidateError(name, "nothing in the graph has a schedule to search")
    with tempfile.TemporaryDirectory() as work:
        rounds = _rounds(meta_schedule, module, target, work, search_s, len(tasks))
        found = _count_records(Path(work))
        if not found:
            raise CandidateError(name, f"no trial of {rounds} rounds succeeded; the log is on stderr")
        with target:
            module = relax.transform.MetaScheduleApplyDatabase(work)(module)
        for theirs, ours in RECORDS.items():
            shutil.copyfile(Path(work) / theirs, folder / ours)
    return module, {"tasks": len(tasks), "rounds": rounds, "records": found}


def _lowered(module: Any, target: Any) -> Any:
    passes = [relax.transform.DecomposeOpsForInference(), relax.transform.CanonicalizeBindings()]
    with target:
        return transform.Sequential([*passes, relax.get_pipeline("zero")])(module)


def _rounds(meta_schedule: Any, module: Any, target: Any, work: str, search_s: float, n_tasks: int) -> int:
    """Rounds of a few trials for every task, as long as another one is likely to end in time; at least one."""
    start, rounds, longest = time.monotonic(), 0, 0.0
    while rounds == 0 or time.monotonic() - start + longest < search_s:
        began = time.monotonic()
        meta_schedule.relax_integration.tune_relax(
            mod=module,
            params={},
            target=target,
            work_dir=work,
            max_trials_global=TRIALS_PER_ROUND * n_tasks if rounds else n_tasks * 4,
            max_trials_per_task=TRIALS_PER_ROUND if rounds else 4,
            num_trials_per_iter=TRIALS_PER_ROUND if rounds else 4,
            builder=meta_schedule.builder.LocalBuilder(max_workers=2, timeout_sec=TRIAL_TIMEOUT_S, initializer=preload),
            runner=meta_schedule.runner.LocalRunner(timeout_sec=TRIAL_TIMEOUT_S, initializer=preload),
            cost_model="xgb" if importlib.util.find_spec("xgboost") else "random",
            seed=rounds,
        )
        rounds, longest = rounds + 1, max(longest, time.monotonic() - began)
    return rounds


def _count_records(work: Path) -> int:
    path = work / "database_tuning_record.json"
    return sum(1 for line in path.open() if line.strip()) if path.exists() else 0
