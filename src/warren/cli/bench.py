"""`warren bench`: load for a broker, any that speaks AMQP 0-9-1, and what it made of it.

    warren bench --seconds 10                                  # one publisher, one consumer, as fast as it goes
    warren bench --persistent --confirm 1000 --ack-every 100   # what must not get lost
    warren bench --rate 10000 --seconds 30                     # how long a message takes
    warren bench --mode fill --messages 1000000 --persistent --confirm 1000 && warren bench --mode drain

docs/bench.md says what the figures mean. The work is done in `load.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from warren.amqp.bulk_client import Address, BrokerClosedError
from warren.cli.load import STAMP_BYTES, Crew, Load, LoadFailedError, crew, prepare_queues, remove_queues

_LOOK_SECONDS = 0.02
_SHOW_SECONDS = 0.5
_STALLED_SECONDS = 30.0
_RATES = ("published", "confirmed", "consumed")


class Mode(StrEnum):
    flow = "flow"
    fill = "fill"
    drain = "drain"


@dataclass
class Outcome:
    """What a load came to. Rates are messages a second, times milliseconds."""

    seconds: float
    counts: dict[str, int]
    rates: dict[str, float]
    confirm_times: dict[str, float] | None
    ages: dict[str, float] | None


def bench(
    url: Annotated[str, typer.Option(help="The broker.")] = "amqp://guest:guest@localhost:5672/%2F",
    mode: Annotated[
        Mode, typer.Option(help="flow: publish and consume; fill: publish only; drain: consume what is there.")
    ] = Mode.flow,
    publishers: Annotated[int, typer.Option(min=1, help="Connections that publish.")] = 1,
    consumers: Annotated[int, typer.Option(min=1, help="Connections that consume.")] = 1,
    queues: Annotated[int, typer.Option(min=1, help="Publishers and consumers are dealt to them in turn.")] = 1,
    queue: Annotated[str, typer.Option(help="What the names of the queues begin with.")] = "warren-bench",
    argument: Annotated[
        list[str] | None, typer.Option(help="Of the queues: x-queue-version=2. Can be given several times.")
    ] = None,
    size: Annotated[int, typer.Option(min=0, help="Bytes of a body.")] = 100,
    persistent: Annotated[bool, typer.Option("--persistent", help="Messages that survive a restart.")] = False,
    confirm: Annotated[int, typer.Option(min=0, help="Publishes that may be unconfirmed; 0: no confirms.")] = 0,
    prefetch: Annotated[int, typer.Option(min=0, max=65535, help="Messages without an ack; 0: any number.")] = 1000,
    ack_every: Annotated[int, typer.Option(min=0, help="Messages for one ack; 0: no acks.")] = 100,
    rate: Annotated[float, typer.Option(min=0, help="Messages a second in all; 0: as fast as it goes.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="How long; with --messages, at most.")] = 0,
    messages: Annotated[int, typer.Option(min=0, help="How many in all.")] = 0,
    warmup: Annotated[float, typer.Option(min=0, help="Seconds before counting begins.")] = 0,
    processes: Annotated[int, typer.Option(min=0, help="Of each kind; 0: half of the processors.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the queues. A fill always does.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Load a broker, any that speaks AMQP 0-9-1, and see how fast it is."""
    if rate and size < STAMP_BYTES:
        raise typer.BadParameter(f"with --rate a body carries its time: --size is at least {STAMP_BYTES}, not {size}")
    if prefetch and ack_every > prefetch:
        raise typer.BadParameter(
            f"--ack-every {ack_every} never comes with --prefetch {prefetch}: the broker stops after {prefetch}"
        )
    if messages and warmup:
        raise typer.BadParameter("--warmup goes with --seconds; a number of --messages is counted from the first")
    load = Load(
        url=url,
        mode=mode.value,
        publishers=publishers,
        consumers=consumers,
        queues=queues,
        queue=queue,
        arguments=_arguments(argument or []),
        size=size,
        persistent=persistent,
        confirm=confirm,
        prefetch=prefetch,
        ack_every=ack_every,
        rate=rate,
        messages=messages,
        processes=processes,
    )
    if not messages and not seconds and mode is not Mode.drain:
        seconds = 10.0
    try:
        outcome = measure(load, seconds, warmup, keep=keep, show=not as_json)
    except (BrokerClosedError, LoadFailedError, OSError, ValueError) as error:
        typer.echo(f"warren: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"load": asdict(load), **asdict(outcome)}))
    else:
        _show(load, outcome)


def _arguments(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise typer.BadParameter(f"{each!r} is no argument of a queue; write x-max-length=1000")
        words = {"true": True, "false": False}
        found[name] = int(value) if value.lstrip("-").isdigit() else words.get(value, value)
    return found


def measure(load: Load, seconds: float, warmup: float = 0, *, keep: bool = False, show: bool = False) -> Outcome:
    """Run a load to its end."""
    try:
        ready = asyncio.run(prepare_queues(load))
    except OSError as error:
        address = Address.parse(load.url)
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise LoadFailedError(
            f"no broker answers at {address.host}:{address.port}: {why}; start one with `warren serve`, or give another --url"
        ) from None
    whole = load.messages or (ready if load.mode == "drain" else 0)
    if load.mode == "drain" and not whole:
        raise LoadFailedError(f"nothing to drain: the queues {load.queue}-... are empty")
    try:
        with crew(load) as workers, _view(show) as view:
            outcome = _watch(workers, whole, seconds, warmup, view)
    finally:
        if load.mode == "flow" and not keep:
            asyncio.run(remove_queues(load))
    return outcome


def _watch(workers: Crew, whole: int, seconds: float, warmup: float, view: _View) -> Outcome:
    """From the start of the work to its end: by the clock, or by a number of messages."""
    load = workers.load
    begin = workers.go()
    if warmup:
        time.sleep(warmup)
    first, first_at = workers.counts(), time.monotonic()
    if not warmup:
        first_at = begin
    deadline = first_at + seconds if seconds else 0.0
    progress_at, progress = begin, 0
    finished = False
    while True:
        time.sleep(_LOOK_SECONDS)
        counts, now = workers.counts(), time.monotonic()
        view.update(counts, now)
        published = workers.publishers_done() and load.mode != "drain"
        finished = bool(whole) and (published if load.mode == "fill" else counts["consumed"] >= whole)
        if finished or (deadline and now >= deadline):
            break
        if sum(counts[name] for name in _RATES) > progress:
            progress_at, progress = now, sum(counts[name] for name in _RATES)
        elif now - progress_at > _STALLED_SECONDS:
            raise LoadFailedError(f"nothing moved for {_STALLED_SECONDS:.0f} s: {counts}")
    last, last_at = workers.counts(), time.monotonic()
    workers.stop()
    if finished:  # to the last message, or its confirm or ack, and not to when we saw it
        last = workers.counts()
        last_at = last["at"] / 1e6
    elapsed = max(last_at - first_at, 1e-6)
    rates = {name: (last[name] - first[name]) / elapsed for name in _RATES}
    rates["consumed_bytes"] = (last["consumed_bytes"] - first["consumed_bytes"]) / elapsed
    total = workers.counts()
    total.pop("at")
    return Outcome(
        elapsed,
        total,
        rates,
        workers.confirm_times.summary() if load.confirm and load.mode != "drain" else None,
        workers.ages.summary() if load.rate and load.mode == "flow" else None,
    )


# ---- what is shown ----


class _View:
    """The rates of the last moment, on a terminal."""

    def __init__(self, shown: bool) -> None:
        console = Console(stderr=True)
        self._live = Live(console=console, transient=True, auto_refresh=False) if shown and _is_terminal() else None
        self._last: dict[str, int] | None = None
        self._last_at = 0.0

    def __enter__(self) -> _View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, counts: dict[str, int], now: float) -> None:
        if self._live is None or now - self._last_at < _SHOW_SECONDS:
            return
        if self._last is not None:
            table = Table("", "messages/s", "messages", box=None, pad_edge=False)
            for name in _RATES:
                rate = (counts[name] - self._last[name]) / (now - self._last_at)
                table.add_row(name, f"{rate:>12,.0f}", f"{counts[name]:>14,}")
            waiting = counts["published"] - counts["consumed"]
            table.add_row("not consumed", "", f"{max(0, waiting):>14,}")
            self._live.update(table, refresh=True)
        self._last, self._last_at = counts, now


def _view(show: bool) -> _View:
    return _View(show)


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def _show(load: Load, outcome: Outcome) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=120)
    table = Table("", "messages/s", "messages", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in _RATES:
        if outcome.counts[name]:
            table.add_row(name, f"{outcome.rates[name]:,.0f}", f"{outcome.counts[name]:,}")
    for name in ("nacked", "redelivered"):
        if outcome.counts[name]:
            table.add_row(name, "", f"{outcome.counts[name]:,}")
    console.print(table)
    if outcome.confirm_times is not None or outcome.ages is not None:
        names = ("p50", "p95", "p99", "p99.9", "max")
        times = Table("milliseconds", *names, box=None, pad_edge=False)
        for column in times.columns[1:]:
            column.justify = "right"
        for label, found in (("to the confirm", outcome.confirm_times), ("to the consumer", outcome.ages)):
            if found is not None:
                times.add_row(label, *(f"{found[name]:.2f}" for name in names))
        console.print()
        console.print(times)
    kind = "persistent" if load.persistent else "transient"
    console.print(
        f"\n{load.mode}: {outcome.seconds:.2f} s, {load.size} B, {kind}, "
        f"{outcome.rates['consumed_bytes'] / 1e6:.1f} MB/s consumed"
    )
