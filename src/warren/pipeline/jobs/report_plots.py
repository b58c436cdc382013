"""The plots of a report, as SVG to be put into a page.

Drawn once for light and dark: ink and lines are colours of the page (CSS variables), bars have colours that are seen on
both. Text stays text, so that it can be searched and read aloud. Names are anything that a client chose: nothing in them
is taken for a formula, and what does not print is a dot.
"""

from __future__ import annotations

import datetime
import html
import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

from warren.pipeline.errors import PipelineError
from warren.pipeline.jobs.report import TOP, ReportData

try:
    import matplotlib
    import matplotlib.dates
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator
except ImportError as error:
    raise PipelineError(f"the report is drawn with matplotlib: `pip install matplotlib` ({error})") from None

_dates: Any = matplotlib.dates  # has no types
INK, LINE = "#010203", "#040506"  # stand for colours of the page
_BLUE, _ORANGE, _RED, _GREEN = "#4c8bd0", "#e8912d", "#d9534f", "#3a9a76"
_WIDTH, _HEIGHT, _BAR = 5.0, 2.5, 0.24  # inches
_LONGEST_NAME = 24
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "warren",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": LINE,
}


def shown(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name in characters that print, as long as there is room for.

    >>> shown("a\\nb")
    'a·b'
    """
    text = "".join(character if character.isprintable() else "·" for character in name[: longest + 1])
    return text if len(text) <= longest else text[: longest - 1] + "…"


def plots(data: ReportData) -> dict[str, str]:
    """SVG by the name of its section; sections that have nothing to draw are left out."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # It only measures the text; the reader's browser has the letters.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        made = {
            "depth": _depth(data),
            "age": _columns([name for name, _ in data.ages], [count for _, count in data.ages], "age", _BLUE),
            "size": _columns([name for name, _ in data.sizes], [count for _, count in data.sizes], "size", _GREEN),
            "rate": _rate(data),
            "garbage": _garbage(data),
            "keys": _keys(data),
            "deaths": _deaths(data),
        }
    return {name: svg for name, svg in made.items() if svg is not None}


def _depth(data: ReportData) -> str | None:
    queues = [queue for queue in data.queues[:TOP] if queue.ready + queue.unacked]
    bars = [
        ("ready", [queue.ready for queue in queues], _BLUE),
        ("unacked", [queue.unacked for queue in queues], _ORANGE),
    ]
    return _stacked([queue.queue for queue in queues], bars, "messages", "depth of the queues")


def _garbage(data: ReportData) -> str | None:
    files = data.files[:TOP]
    bars = [
        ("in use", [file.live_bytes for file in files], _BLUE),
        ("garbage", [file.garbage_bytes for file in files], _RED),
    ]
    return _stacked([file.file for file in files], bars, "bytes", "garbage in the files of the message store")


def _keys(data: ReportData) -> str | None:
    names = [f"{key.exchange or '(default)'}: {key.routing_key}" for key in data.keys]
    return _stacked(names, [("messages", [key.messages for key in data.keys], _BLUE)], "messages", "hot routing keys")


def _deaths(data: ReportData) -> str | None:
    deaths = data.deaths[:TOP]
    names = [f"{death.reason} in {death.queue}" for death in deaths]
    return _stacked(names, [("messages", [death.messages for death in deaths], _RED)], "messages", "dead letters")


def _stacked(names: Sequence[str], bars: Sequence[tuple[str, Sequence[int], str]], unit: str, title: str) -> str | None:
    """Lying bars, the first name on top."""
    if not names or not any(value for _, values, _ in bars for value in values):
        return None
    figure, axes = _figure(max(1.2, 0.7 + _BAR * len(names)))
    places = range(len(names))
    left = [0] * len(names)
    for label, values, colour in bars:
        axes.barh(places, values, left=left, color=colour, label=label, height=0.72)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_yticks(places, [shown(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="x", alpha=0.5)
    if len(bars) > 1:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(bars), borderaxespad=0.2)
    return _svg(figure, title)


def _columns(names: Sequence[str], values: Sequence[int], title: str, colour: str) -> str | None:
    """Standing bars."""
    if not any(values):
        return None
    figure, axes = _figure(_HEIGHT)
    axes.bar(range(len(names)), values, color=colour, width=0.8)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    _count_axis(axes)
    return _svg(figure, f"messages by {title}")


def _rate(data: ReportData) -> str | None:
    if not data.rates:
        return None
    figure, axes = _figure(_HEIGHT)
    times = _dates.date2num([datetime.datetime.fromtimestamp(rate.at, datetime.UTC) for rate in data.rates])
    values = [rate.messages / data.rate_seconds for rate in data.rates]
    if len(times) == 1:
        axes.bar(times, values, width=data.rate_seconds / 86400, color=_BLUE)
    else:
        axes.fill_between(times, values, step="post", color=_BLUE, alpha=0.35)
        axes.step(times, values, where="post", color=_BLUE)
    locator = _dates.AutoDateLocator(maxticks=6)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(_dates.ConciseDateFormatter(locator))
    _count_axis(axes, "messages/s")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    return _svg(figure, "publish rate over time")


def _count_axis(axes: Axes, unit: str = "messages") -> None:
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", alpha=0.5)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    return figure, axes


def _svg(figure: Figure, title: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    text = f'{head} role="img" aria-label="{html.escape(title)}">{rest}'
    return text.replace(INK, "var(--ink)").replace(LINE, "var(--line)")
