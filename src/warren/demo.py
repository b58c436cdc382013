"""The library at work, in about ten seconds.

    1  a queue grows far over its share of RAM and is drained again: its messages move q1 -> q2 -> delta -> q3 -> q4
    2  a process that publishes with confirms is killed, and everything that was confirmed is there
    3  rates, measured here and now

Runs in a terminal, or with plain lines where there is none. Exit code 1 if a confirmed message was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

import warren

CONTAINERS = (
    ("q1", "green", "in RAM, the tail"),
    ("q2", "yellow", "body on disk"),
    ("delta", "blue", "all on disk"),
    ("q3", "yellow", "body on disk"),
    ("q4", "green", "in RAM, the head"),
)
BODY = b"a message of one hundred bytes, more or less ".ljust(100, b".")
DEEPEST = 60_000  # messages in the queue when it is drained
BAR_WIDTH = 40
PLAIN_LINES_PER_SECOND = 2
PLAIN_WIDTH = 120
CONFIRMED_AT_ONCE = 50


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m warren.demo", description="A short demonstration of Warren.")
    parser.add_argument("--seconds", type=float, default=10.0, help="about how long it takes (default: 10)")
    parser.add_argument("--publish", metavar="DIR", help=argparse.SUPPRESS)  # what the process does that is killed
    options = parser.parse_args(arguments)
    if options.publish is not None:
        _publish_until_killed(options.publish)
    console = Console()
    return _Demo(console if console.is_terminal else Console(width=PLAIN_WIDTH), options.seconds).run()


@dataclass(slots=True)
class _Frame:
    """One picture of the queue."""

    title: str
    info: dict[str, Any]
    moved: int  # messages, since this step began
    seconds: float


class _Demo:
    def __init__(self, console: Console, seconds: float) -> None:
        self._console = console
        self._seconds = seconds

    def run(self) -> int:
        self._say("[bold]Warren[/bold] - durable queues in your process")
        with tempfile.TemporaryDirectory(prefix="warren-demo-") as directory:
            self._breathe(Path(directory, "deep"))
            lost = self._crash(Path(directory, "crash"))
            self._measure(Path(directory, "rates"))
        self._console.print(Rule())
        if lost:
            self._say(f"[bold red]{lost} confirmed messages were lost[/bold red]: this is a bug, please report it")
            return 1
        self._say("Next: [bold]README.md[/bold] for the ten lines that do this in your program, `warren store --help`.")
        return 0

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    # -- 1: a deep queue in little RAM -------------------------------------------------------------------------------

    def _breathe(self, directory: Path) -> None:
        self._console.print(Rule("a queue deeper than its RAM"))
        batch = max(50, DEEPEST // 300)
        with warren.open(directory, durability="os") as store:
            queue = store.queue("orders")
            with self._live() as show:
                begun = time.monotonic()
                for number in range(0, DEEPEST, batch):
                    queue.publish_many([BODY] * batch)
                    show(_Frame("publishing", queue.info(), number + batch, time.monotonic() - begun))
                    self._pace(begun, (number + batch) / DEEPEST, self._seconds * 0.2)
                deepest = queue.info()
                begun, taken = time.monotonic(), 0
                while messages := queue.get_many(batch):
                    queue.ack_many(messages)
                    taken += len(messages)
                    show(_Frame("consuming", queue.info(), taken, time.monotonic() - begun))
                    self._pace(begun, taken / DEEPEST, self._seconds * 0.2)
        self._say(
            f"{DEEPEST:,} messages, {decimal(deepest['message_bytes'])}: at the deepest point "
            f"{deepest['ram_msg_count']:,} of them ({decimal(deepest['ram_bytes'])}) were whole in RAM"
        )

    @staticmethod
    def _pace(begun: float, fraction: float, seconds: float) -> None:
        """Slow enough to be seen."""
        time.sleep(max(0.0, begun + fraction * seconds - time.monotonic()))

    @contextlib.contextmanager
    def _live(self) -> Iterator[Callable[[_Frame], None]]:
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=20) as live:
                yield lambda frame: live.update(self._picture(frame))
            return
        printed = -1.0

        def show(frame: _Frame) -> None:
            nonlocal printed
            now = time.monotonic()
            if now - printed >= 1 / PLAIN_LINES_PER_SECOND:
                printed = now
                self._say(_plain(frame))

        yield show

    def _picture(self, frame: _Frame) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", style="bold")
        table.add_column(width=BAR_WIDTH)
        table.add_column(justify="right", width=len(f"{DEEPEST:,}"))
        table.add_column(style="dim")
        for name, colour, meaning in CONTAINERS:
            count = frame.info[name]
            filled = -(-count * BAR_WIDTH // DEEPEST)
            bar = Text("█" * filled, style=colour) + Text("·" * (BAR_WIDTH - filled), style="dim")
            table.add_row(name, bar, f"{count:,}", meaning)
        foot = Text.assemble(
            (f"{frame.title} ", "bold"),
            f"{frame.moved / max(frame.seconds, 1e-6):,.0f}/s, slowly   ready {frame.info['len']:,}   in RAM ",
            (f"{frame.info['ram_msg_count']:,} messages, {decimal(frame.info['ram_bytes'])}", "green"),
        )
        return Panel(Group(table, Text(), foot), title="publish -> q1 -> q2 -> delta -> q3 -> q4 -> get", expand=False)

    # -- 2: kill -9 --------------------------------------------------------------------------------------------------

    def _crash(self, directory: Path) -> int:
        self._console.print(Rule("kill -9 of a process that publishes with confirms"))
        lost = confirmed = 0
        rounds = 3
        for number in range(rounds):
            confirmed = max(confirmed, _run_and_kill(directory, self._seconds * 0.06))
            begun = time.monotonic()
            with warren.open(directory) as store:
                recovery = time.monotonic() - begun
                found = {int(message.body) for message in store.queue("ledger").browse()}
            missing = sum(1 for body in range(confirmed) if body not in found)
            lost += missing
            colour = "red" if missing else "green"
            self._say(
                f"kill {number + 1} of {rounds}: confirmed {confirmed:,}, found {len(found):,} after "
                f"{recovery * 1000:.0f} ms of recovery, [bold {colour}]lost {missing}[/bold {colour}]"
            )
        return lost

    # -- 3: rates ----------------------------------------------------------------------------------------------------

    def _measure(self, directory: Path) -> None:
        self._console.print(Rule("rates on this machine, 100-byte messages, persistent"))
        table = Table("what", "messages/s")
        table.columns[1].justify = "right"
        budget = self._seconds * 0.05
        with warren.open(directory / "os", durability="os") as store:
            queue = store.queue("q")
            bodies = [BODY] * 1000
            table.add_row("publish_many, 1,000 at a time", _rate(budget, lambda: len(queue.publish_many(bodies))))
            table.add_row("get_many + ack_many", _rate(budget, lambda: _consume(queue)))
            queue.purge()
            table.add_row("publish, one at a time", _rate(budget, lambda: _single(queue)))
        with warren.open(directory / "fsync") as store:
            queue = store.queue("q")
            table.add_row("publish + sync, one thread waiting for its disk", _rate(budget, lambda: _safe(store, queue)))
            table.add_row("publish + sync, 32 threads", _threads_rate(budget, 32, lambda: _safe(store, queue)))
        self._console.print(table)


def _plain(frame: _Frame) -> str:
    parts = "  ".join(f"{name} {frame.info[name]:>6,}" for name, _, _ in CONTAINERS)
    return f"{frame.title:<10}  {parts}  ready {frame.info['len']:>6,}  RAM {decimal(frame.info['ram_bytes'])}"


def _publish_until_killed(directory: str) -> None:
    """Publish numbers; print how many are confirmed, each time the store says so."""
    with warren.open(directory) as store:
        queue = store.queue("ledger")
        number = max((int(message.body) + 1 for message in queue.browse()), default=0)
        while True:
            queue.publish_many([b"%d" % n for n in range(number, number + CONFIRMED_AT_ONCE)])
            number += CONFIRMED_AT_ONCE
            store.sync()
            print(number, flush=True)


def _run_and_kill(directory: Path, seconds: float) -> int:
    """How many messages were confirmed before the process was killed."""
    command = [sys.executable, "-m", "warren.demo", "--publish", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]  # it is at work
        timer = threading.Timer(seconds, process.send_signal, [signal.SIGKILL])
        timer.start()
        lines += process.stdout.readlines()
        timer.join()
    whole = [line for line in lines if line.endswith("\n")]
    return int(whole[-1]) if whole else 0


def _consume(queue: warren.Queue) -> int:
    messages = queue.get_many(1000)
    queue.ack_many(messages)
    return len(messages)


def _single(queue: warren.Queue) -> int:
    for _ in range(100):
        queue.publish(BODY)
    return 100


def _safe(store: warren.Store, queue: warren.Queue) -> int:
    queue.publish(BODY)
    store.sync()
    return 1


def _rate(seconds: float, step: Callable[[], int]) -> str:
    """Steps return how many messages they moved; 0 ends it early."""
    begun = time.perf_counter()
    count = 0
    while (elapsed := time.perf_counter() - begun) < seconds and (moved := step()):
        count += moved
    return f"{count / max(elapsed, 1e-9):,.0f}"


def _threads_rate(seconds: float, number: int, step: Callable[[], int]) -> str:
    counts = [0] * number
    begun = time.perf_counter()

    def run(index: int) -> None:
        while time.perf_counter() - begun < seconds:
            counts[index] += step()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"{sum(counts) / (time.perf_counter() - begun):,.0f}"


if __name__ == "__main__":
    sys.exit(main())
