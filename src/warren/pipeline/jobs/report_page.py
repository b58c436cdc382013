"""The page of a report: one file, no script, nothing from elsewhere. A table beside every plot says the same in numbers."""

from __future__ import annotations

import datetime
import html
from collections.abc import Sequence

from rich.filesize import decimal

import warren
from warren.pipeline.jobs.report import ReportData

_ROWS = 50  # of a table; the rest is counted
_NARROW_COLUMNS = 5  # a table with more gets more room

_CSS = """
:root { color-scheme: light dark; --paper: #fbfaf8; --ink: #23211e; --soft: #6d6860; --line: #d9d4cb; --card: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16171a; --ink: #e6e3dd; --soft: #9d988f; --line: #3a3b40; --card: #1e2024; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 80rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 0 0 .2rem; }
p { margin: 0 0 .8rem; color: var(--soft); overflow-wrap: anywhere; }
.numbers { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; padding: 0; list-style: none; }
.numbers li { flex: 1 1 8rem; background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .6rem .9rem; }
.numbers b { display: block; font-size: 1.4rem; font-variant-numeric: tabular-nums; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; margin: 0 0 1rem; }
.beside { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 1.2rem; align-items: start; }
.wide { grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); }
.beside > :only-child { grid-column: 1 / -1; }
svg { display: block; width: 100%; height: auto; font-family: system-ui, sans-serif; }
.scroll { overflow: auto; max-height: 30rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { position: sticky; top: 0; background: var(--card); font-weight: 600; }
th:first-child, td:first-child, .name { text-align: left; }
td:first-child, td.name { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
footer { color: var(--soft); font-size: .85rem; }
@media (max-width: 52rem) { .beside, .wide { grid-template-columns: minmax(0, 1fr); } body { padding: .7rem; } }
"""

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""


def page(data: ReportData, plots: dict[str, str]) -> str:
    """The HTML of a report."""
    title = f"vhost {data.vhost}"
    moment = datetime.datetime.fromtimestamp(data.made_at, datetime.UTC).isoformat(sep=" ", timespec="seconds")
    parts = [
        _HEAD,
        f"<title>{_text(title)}: Warren</title>\n<style>{_CSS}</style>\n</head>\n<body>\n",
        f"<h1>{_text(title)}</h1>\n<p>{_text(data.place)}, {_text(moment)}</p>\n",
        _numbers(data),
        *(_section(plots.get(name), *rest) for name, rest in _sections(data)),
        f"<footer>warren {_text(warren.__version__)}, counted on Spark in {data.seconds:.1f} s</footer>\n",
        "</body>\n</html>\n",
    ]
    return "".join(parts)


_Section = tuple[str, str, Sequence[str], Sequence[Sequence[str]]]


def _sections(data: ReportData) -> list[tuple[str, _Section]]:
    return [
        ("depth", ("Depth", "Messages in each queue.", _QUEUE_COLUMNS, _queue_rows(data))),
        ("age", ("Age", "How long ago the messages were published.", ("age", "messages"), _counts(data.ages))),
        ("size", ("Size", "Bytes of the bodies.", ("size", "messages"), _counts(data.sizes))),
        ("rate", _rate_section(data)),
        ("garbage", _garbage_section(data)),
        ("keys", _keys_section(data)),
        ("deaths", _deaths_section(data)),
    ]


_QUEUE_COLUMNS = ("queue", "ready", "unacked", "bytes", "oldest", "mean size", "largest", "redelivered")


def _queue_rows(data: ReportData) -> list[Sequence[str]]:
    return [
        (
            queue.queue,
            f"{queue.ready:,}",
            f"{queue.unacked:,}",
            decimal(queue.bytes),
            span(queue.oldest_seconds),
            "" if queue.mean_size is None else decimal(round(queue.mean_size)),
            "" if queue.largest is None else decimal(queue.largest),
            f"{queue.redelivered:,}",
        )
        for queue in data.queues
    ]


def _rate_section(data: ReportData) -> _Section:
    busiest = sorted(data.rates, key=lambda rate: (-rate.messages, rate.at))[:_ROWS]
    rows = [
        (
            datetime.datetime.fromtimestamp(rate.at, datetime.UTC).isoformat(sep=" ", timespec="seconds")[:19],
            f"{rate.messages:,}",
            f"{rate.messages / data.rate_seconds:,.1f}",
        )
        for rate in busiest
    ]
    text = f"Messages that are still there, by when they were published, in steps of {span(data.rate_seconds)}; UTC."
    return ("Publish rate", text, (f"busiest {span(data.rate_seconds)} from", "messages", "messages/s"), rows)


def _garbage_section(data: ReportData) -> _Section:
    rows = [
        (file.file, decimal(file.bytes), decimal(file.live_bytes), decimal(file.garbage_bytes)) for file in data.files
    ]
    text = (
        f"Files with large bodies; {data.garbage_fraction:.0%} of their records is referred to by no message any more."
    )
    return ("Garbage", text, ("file", "bytes", "in use", "garbage"), rows)


def _keys_section(data: ReportData) -> _Section:
    rows = [
        (key.routing_key, key.exchange or "(default)", f"{key.messages:,}", decimal(key.bytes)) for key in data.keys
    ]
    return (
        "Hot routing keys",
        "What the messages were published with.",
        ("routing key", "exchange", "messages", "bytes"),
        rows,
    )


def _deaths_section(data: ReportData) -> _Section:
    rows = [(each.reason, each.queue, f"{each.messages:,}", f"{each.deaths:,}") for each in data.deaths]
    text = "Why messages that are here left another queue, by their x-death header."
    return ("Dead letters", text, ("reason", "died in", "messages", "deaths"), rows)


def _numbers(data: ReportData) -> str:
    oldest = max((queue.oldest_seconds for queue in data.queues if queue.oldest_seconds is not None), default=None)
    numbers = [
        ("queues", f"{len(data.queues):,}"),
        ("messages", f"{data.messages:,}"),
        ("bytes", decimal(data.bytes)),
        ("oldest message", span(oldest) or "none"),
        ("garbage", f"{data.garbage_fraction:.0%}"),
        ("dead letters", f"{sum(each.messages for each in data.deaths):,}"),
    ]
    items = "".join(f"<li><b>{_text(value)}</b>{_text(name)}</li>" for name, value in numbers)
    return f'<ul class="numbers">{items}</ul>\n'


def _section(svg: str | None, title: str, text: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heading = f"<section>\n<h2>{_text(title)}</h2>\n<p>{_text(text)}</p>\n"
    if not rows:
        return f"{heading}<p>There is nothing to show.</p>\n</section>\n"
    plot = f"<div>{svg}</div>\n" if svg is not None else ""
    kind = "beside wide" if len(columns) > _NARROW_COLUMNS else "beside"
    return f'{heading}<div class="{kind}">\n{plot}{_table(columns, rows)}</div>\n</section>\n'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    named = {"queue", "exchange", "died in"}  # columns of names are to the left
    marks = [' class="name"' if column in named else "" for column in columns]
    head = "".join(f"<th{mark}>{_text(column)}</th>" for column, mark in zip(columns, marks, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{_text(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>\n"
        for row in rows[:_ROWS]
    )
    more = f"<p>and {len(rows) - _ROWS:,} more</p>" if len(rows) > _ROWS else ""
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>{more}</div>\n'


def _counts(buckets: Sequence[tuple[str, int]]) -> list[Sequence[str]]:
    return [(name, f"{count:,}") for name, count in buckets] if any(count for _, count in buckets) else []


def span(seconds: float | None) -> str:
    """A length of time in the unit that fits.

    >>> span(5400)
    '1.5 h'
    """
    if seconds is None:
        return ""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _text(value: str) -> str:
    """For the page; what does not print is a dot."""
    plain = "".join(character if character.isprintable() else "·" for character in value)
    return html.escape(plain)
