"""A StoreReport as one HTML page that needs nothing else: no scripts, no fonts, no network."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from coexec.report.store_report import AttemptRow, StoreReport, SubgraphRow

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; color: #222; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
td, th { text-align: left; padding: .15em .8em .15em 0; vertical-align: top; border-bottom: 1px solid #eee; }
code, .number { font-family: ui-monospace, monospace; }
.number { text-align: right; white-space: nowrap; }
.bar { display: inline-block; height: .7em; background: #3b7dd8; margin-right: .4em; }
.slow { background: #c9c9c9; }
.failed { color: #b00020; }
summary { cursor: pointer; }
"""

BAR_PX_PER_X = 40
LONGEST_BAR_PX = 400


def html_page(report: StoreReport) -> str:
    """The whole page. Whatever the store holds is text: it is escaped."""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.made_s))
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>coexec store</title><style>{STYLE}</style></head>',
            f"<body><h1>coexec store</h1><p>{escape(report.url)}, {made}: {len(report.subgraphs)} subgraphs, "
            f"{len(report.waiting)} of them wait for <code>coexec tune</code>.</p>",
            "<h2>Backends</h2>",
            _backends(report),
            "<h2>Subgraphs</h2>",
            *(_subgraph(row) for row in report.subgraphs),
            "<h2>Environments</h2>",
            _environments(report),
            "</body></html>",
            "",
        ]
    )


def _backends(report: StoreReport) -> str:
    rows = [
        (
            escape(row.backend),
            _number(row.chosen),
            _number(row.tried),
            escape(", ".join(f"{number} {outcome}" for outcome, number in sorted(row.outcomes.items()))),
            _number(None if row.mean_speedup is None else f"{row.mean_speedup:.2f}x"),
            escape(_shortened(row.common_failure)),
        )
        for row in report.backends
    ]
    return _table(("backend", "chosen", "tried", "outcomes", "mean speedup", "most frequent failure"), rows)


def _subgraph(row: SubgraphRow) -> str:
    backends = ", ".join(dict.fromkeys(decision.backend for decision in row.decisions))
    chosen = backends if row.was_tuned else f"{backends}, not tuned".removeprefix(", ")
    fastest = next((f" {decision.speedup:.2f}x" for decision in row.decisions if decision.speedup), "")
    head = f"<code>{row.digest[:16]}</code> {escape(row.note)} ({row.n_ops} ops): <b>{escape(chosen)}</b>{fastest}"
    told = [decision.reason for decision in row.decisions[:1]] + [row.passed_over]
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in told if reason)
    attempts = _table(
        ("backend", "outcome", "speedup", "sizes", "detail"),
        [
            (
                escape(attempt.backend),
                _outcome(attempt),
                _bar(attempt.speedup),
                escape(attempt.shape_class or "static"),
                escape(_shortened(attempt.detail)),
            )
            for attempt in row.attempts
        ],
    )
    return f"<details><summary>{head}</summary>{reasons}{attempts if row.attempts else ''}</details>"


def _environments(report: StoreReport) -> str:
    rows = [
        (
            f"<code>{row.digest[:16]}</code>",
            _number(row.decisions),
            "<br>".join(escape(str(difference)) for difference in row.differences) or "the newest",
        )
        for row in report.environments
    ]
    return _table(("environment", "decisions", "what differs from the newest"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _outcome(attempt: AttemptRow) -> str:
    text = escape(attempt.outcome.value)
    return text if attempt.speedup else f'<span class="failed">{text}</span>'


def _bar(speedup: float | None) -> str:
    if speedup is None:
        return ""
    width = min(round(BAR_PX_PER_X * speedup), LONGEST_BAR_PX)
    kind = "bar" if speedup > 1 else "bar slow"
    return f'<span class="{kind}" style="width:{width}px"></span><span class="number">{speedup:.2f}x</span>'


def _number(value: object) -> str:
    return f'<span class="number">{"-" if value is None else escape(str(value))}</span>'


def _shortened(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
