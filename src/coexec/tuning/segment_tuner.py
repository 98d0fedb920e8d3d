"""Tunes one segment of co-execution: other ways to compile it, timed against the library that is compiled online.

Everything is as for graphs, but for what the candidates are measured against, and where the best so far begins: the
usual library serves already. It is taken from the store; where a variant has taken its place there, it is built again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from coexec.backends import variants
from coexec.backends.key import is_of_here
from coexec.backends.variants import CODE, USUAL
from coexec.subgraphs.entries import Decision, Outcome, SubgraphInfo
from coexec.subgraphs.errors import StoreError
from coexec.tuning.attempt import Attempt, BudgetSpentError, EndedError, Prepared, checked
from coexec.tuning.graph_tuner import GraphTuning, Tell, UntunableError, Workshop, claimed, stored_program
from coexec.tuning.queue import passed_over, segment_facts
from coexec.tuning.report import GraphReport
from coexec.tuning.standing import Best, Tried, published
from coexec.tuning.timing import EAGER, EagerSide, Track

NOTHING_FASTER = "no variant was faster than the usual library"


def tune_segment(shop: Workshop, info: SubgraphInfo, tell: Tell) -> GraphReport:
    """Tune one segment. Whatever is wrong with it is in the report. Errors: StoreError."""
    tools = shop.tools

    def tuned() -> GraphReport:
        if not is_of_here(info.text):
            raise UntunableError("it was compiled in another environment (`coexec db show --text` names it)")
        program = stored_program(shop.store, info, "run the step once more with an empty cache folder")
        tuning = SegmentTuning(shop, info, program, segment_facts(info, tools.threads), tell, tools.variants)
        if (reason := passed_over(info)) and shop.settings.subgraphs is None:
            return replace(tuning.report(), passed_over=True, reason=reason)
        return tuning.run()

    return claimed(shop, info, tuned)


class SegmentTuning(GraphTuning):
    """The tuning of one segment."""

    def run(self) -> GraphReport:
        """As for a graph; the usual library is there first."""
        if self.standing.pending(self.candidates) and self.standing.best.backend in (EAGER, USUAL):
            self.standing.best = self.standing.plain = self._usual_as_best()
        return super().run()

    def built(self, candidate: Tried, folder: Path) -> Prepared | Attempt:
        """Built and verified. Errors: UntunableError if not even the usual library is right on such inputs."""
        usual = self.usual
        found = super().built(candidate, folder)
        if isinstance(found, Prepared) and found.metadata.get(CODE, "") == usual.metadata.get(CODE):
            return Attempt(
                candidate.name, Outcome.UNAVAILABLE, "the compiler writes the same code as usual", build_s=found.build_s
            )
        return found

    def track(self) -> Track:
        """Against the usual library; a step calls both in the same way."""
        shop, threads = self.shop, self.facts.threads
        usual = EagerSide(shop.roster, self.program, threads, shop.settings.attempt_s, self.usual)
        return Track(self.program, usual, shop.roster, threads, shop.settings, self.left_s, serving_s=0.0)

    @cached_property
    def usual(self) -> Prepared:
        """The library that is compiled online, verified on the same inputs as the variants. Errors: UntunableError."""
        shop, program = self.shop, self.program
        try:
            if (stored := self._stored()) is not None:
                return checked(stored, program, shop.roster, self.facts.threads, shop.settings, self.left_s)
            return shop.shelf.find(self.name_on_shelf(variants.USUALLY)) or self._rebuilt()
        except BudgetSpentError as error:
            raise UntunableError(error.detail, out_of_budget=shop.out_of_budget()) from error
        except EndedError as error:
            raise UntunableError(f"its usual library cannot be timed: {error.outcome}: {error.detail}") from error

    def _stored(self) -> Prepared | None:
        """The one that the store serves, if no variant has taken its place."""
        decision = self._decision()
        if decision is None or decision.backend != USUAL or not decision.artifacts:
            return None
        try:
            folder = self.shop.store.checkout(decision)
        except StoreError as error:
            if not error.reason.startswith("artifact"):
                raise
            return None  # damaged: it is built again
        assert folder is not None, "a strict store raises instead"
        return Prepared(USUAL, folder, decision.options.get("metadata", {}), 0.0, "")

    def _rebuilt(self) -> Prepared:
        with self.shop.shelf.workplace() as folder:
            found = super().built(variants.USUALLY, folder)
            if isinstance(found, Attempt):
                if found.out_of_time:
                    raise BudgetSpentError
                raise EndedError(found.outcome, found.detail)
            return self.shop.shelf.put(self.name_on_shelf(variants.USUALLY), found)

    def _usual_as_best(self) -> Best:
        decision = self._decision()
        if decision is not None and decision.backend == USUAL and decision.artifacts:
            refs, metadata = decision.artifacts, decision.options.get("metadata", {})
        else:
            refs, metadata = published(self.shop.store, self.usual.folder), self.usual.metadata
        return Best(USUAL, 1.0, NOTHING_FASTER, {"metadata": dict(metadata)}, refs)

    def _decision(self) -> Decision | None:
        """The decision for this environment; None without one."""
        facts = self.facts
        found = self.shop.store.decisions(facts.subgraph)
        return next((decision for decision in found if decision.environment == facts.environment.digest), None)
