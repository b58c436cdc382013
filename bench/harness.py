"""What every measurement needs: scratch directories, medians, the machine's facts, a table and a plot."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass
class Row:
    """One line of the table: what was measured, the figure, the target and whether it holds."""

    name: str
    figure: str
    target: str
    holds: bool
    values: dict[str, float] = field(default_factory=dict)  # for the plot: label -> number
    note: str = ""


@contextmanager
def scratch() -> Iterator[str]:
    """A directory on the disk that is measured: BENCH_DIR, or the place of temporary files.

    Its files are emptied at the end, and unlinked only when the program ends: for minutes after many were unlinked, ext4
    without a journal takes as long to make one new file as to write a megabyte, and the next row would be charged with it.
    """
    path = tempfile.mkdtemp(prefix="warren-bench-", dir=os.environ.get("BENCH_DIR"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    try:
        yield path
    finally:
        for directory, _, files in os.walk(path):
            for name in files:
                with contextlib.suppress(OSError):  # a socket, or gone already
                    os.truncate(os.path.join(directory, name), 0)


_PEERS = ("persist-queue", "litequeue", "diskcache", "sqlite", "pika")


def median(values: list[float]) -> float:
    return statistics.median(values)


def interleaved(repeat: int, runs: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Run all candidates one after the other, `repeat` times over, so that noise hits all alike; medians."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeat):
        for name, run in runs.items():
            value = run()
            taken[name].append(value)
            print(f"    {number + 1}/{repeat} {name}: {value:,.0f}", flush=True)
    return {name: median(values) for name, values in taken.items()}


def fdatasync_microseconds() -> tuple[float, float]:
    """p50 and p99 of an fdatasync after a small append, on the disk that is measured."""
    taken = []
    with scratch() as path:
        fd = os.open(os.path.join(path, "probe"), os.O_CREAT | os.O_WRONLY)
        for _ in range(1000):
            os.write(fd, b"x" * 200)
            begin = time.perf_counter()
            os.fdatasync(fd)
            taken.append((time.perf_counter() - begin) * 1e6)
        os.close(fd)
    taken.sort()
    return taken[500], taken[990]


def filesystem() -> str:
    with scratch() as path:
        out = subprocess.run(["df", "-T", path], capture_output=True, text=True, check=False).stdout
    return out.splitlines()[-1].split()[1] if out else "unknown"


def in_child(code: str, *arguments: str) -> dict[str, float]:
    """Run a measurement in a fresh process, which prints one JSON line last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=os.getcwd()
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def commit() -> str:
    out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return out.stdout.strip() or "unknown"


def write_report(rows: list[Row], command: str, repeat: int, p50: float, p99: float) -> Path:
    RESULTS.mkdir(exist_ok=True)
    stem = f"{time.strftime('%Y-%m-%d')}-{commit()}"
    void = " **The run is void: fdatasync below 50 us.**" if p50 < 50 else ""
    lines = [
        f"# Measurements, {time.strftime('%Y-%m-%d')}, commit {commit()}",
        "",
        f"`{command}`; median of {repeat}; {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{filesystem()}; fdatasync p50 {p50:.0f} us, p99 {p99:.0f} us in the same run.{void}",
        "",
        "| what | figure | target | holds |",
        "|---|---|---|---|",
    ]
    lines += [f"| {row.name} | {row.figure} | {row.target} | {'yes' if row.holds else '**no**'} |" for row in rows]
    lines += ["", f"![plot]({stem}.png)", ""]
    lines += [f"- {row.name}: {row.note}" for row in rows if row.note]
    path = RESULTS / f"{stem}.md"
    path.write_text("\n".join(lines) + "\n")
    (RESULTS / f"{stem}.json").write_text(json.dumps([row.__dict__ for row in rows], indent=1) + "\n")
    plot(rows, RESULTS / f"{stem}.png")
    return path


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    drawn = [row for row in rows if row.values]
    if not drawn:
        return
    columns = 2
    height = (len(drawn) + columns - 1) // columns
    figure, axes = plt.subplots(height, columns, figsize=(13, 2.6 * height), squeeze=False)
    for axis, row in zip(axes.flat, drawn, strict=False):
        labels = list(row.values)
        colors = ["#94a3b8" if label.lower().startswith(_PEERS) else "#c2410c" for label in labels]
        axis.barh(labels, list(row.values.values()), color=colors)
        axis.invert_yaxis()
        axis.set_title(row.name, fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        for place, value in enumerate(row.values.values()):
            axis.text(value, place, f" {value:,.0f}" if value >= 100 else f" {value:.3g}", va="center", fontsize=7)
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axis.margins(x=0.18)
    for axis in list(axes.flat)[len(drawn) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
