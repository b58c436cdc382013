"""`warren store`: what can be done with a data directory that no process owns."""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import warren
from warren.cli.tables import table_console
from warren.cli.view import copy_durable, find_roots, undisturbed, vhost_name, view
from warren.errors import QueueNotFoundError, StoreFormatError, WarrenError
from warren.storage.verify import Finding, Verification, verify_vhost

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

_PREVIEW_CHARACTERS = 60
_COLUMNS = ("ready", "unacked", "bytes", "q1", "q2", "delta", "q3", "q4", "RAM messages", "RAM bytes")

P = ParamSpec("P")
T = TypeVar("T")

Directory = Annotated[str, typer.Argument(metavar="DIR", help="A data directory: what warren.open was given.")]
OneVhost = Annotated[str, typer.Option("--vhost", help="The vhost to look at.")]
AnyVhost = Annotated[str | None, typer.Option("--vhost", help="One vhost only; all of them, if not given.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Format(StrEnum):
    text = "text"
    json = "json"


def _clear_errors(command: Callable[P, T]) -> Callable[P, T]:
    """What goes wrong is one line on stderr and exit code 1."""

    @functools.wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return command(*arguments, **options)
        except BrokenPipeError:
            raise  # the reader has seen enough; click ends quietly
        except (WarrenError, OSError) as error:
            typer.echo(f"warren: {error}", err=True)
            raise typer.Exit(1) from None

    return run


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal; the function takes bytes done and bytes in all."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _recovery_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each step of a recovery, on stderr, where that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"reading {what}")
            bar.update(tasks[what], completed=done, total=total)

        yield update


# ---- info ----


@app.command()
@_clear_errors
def info(directory: Directory, vhost: AnyVhost = None, as_json: AsJson = False) -> None:
    """Show the queues of a store: where their messages are, how many, how large. Nothing is changed."""
    stores = []
    for root in find_roots(directory, vhost):
        name = vhost_name(root)
        with _recovery_progress() as progress, view(directory, name, progress) as store:
            whole = {"directory": root, "last_stop": "clean" if store.engine.clean_start else "dirty", **store.info()}
            stores.append((whole, [store.queue(queue).info() for queue in store.queues()]))
    if as_json:
        typer.echo(json.dumps([{**whole, "queues": queues} for whole, queues in stores], default=str, indent=1))
        return
    for whole, queues in stores:
        _show_store(whole, queues)


def _show_store(whole: dict[str, Any], queues: list[dict[str, Any]]) -> None:
    console = table_console()
    stored = whole["persistent_store"]
    console.print(f"vhost [bold]{escape(whole['vhost'])}[/bold] in {escape(whole['directory'])}", highlight=False)
    console.print(
        f"last stop {whole['last_stop']}; message store: {stored['file_count']} files, "
        f"{decimal(stored['total_bytes'])}, {decimal(stored['valid_bytes'])} of them in use",
        highlight=False,
    )
    table = Table("queue", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for queue in queues:
        counts = [queue.get(key) for key in ("len", "pending_acks")]
        sizes = [queue.get("message_bytes")]
        containers = [queue.get(key) for key in ("q1", "q2", "delta", "q3", "q4", "ram_msg_count")]
        cells = [*map(_count, counts), *map(_size, sizes), *map(_count, containers), _size(queue.get("ram_bytes"))]
        table.add_row(escape(queue["name"]) + ("" if queue["durable"] else " (transient)"), *cells)
    console.print(table if queues else "no queues")
    for line in whole["damage"]:
        console.print(f"damage: {line['file']} at {line['offset']}: {line['why']}", markup=False, highlight=False)
    if whole["damage"]:
        console.print("warren store verify says more")


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    return "-" if value is None else decimal(value)


# ---- browse ----


@app.command()
@_clear_errors
def browse(
    directory: Directory,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="The name of a queue.")],
    vhost: OneVhost = "/",
    start_seq: Annotated[int, typer.Option(min=0, help="The first seq_id to show.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="How many messages to show; 0: all.")] = 20,
    format: Annotated[Format, typer.Option(help="One line a message, or one JSON object a line.")] = Format.text,
) -> None:
    """Show the messages of a queue, in order. Nothing is changed, nothing is handed out."""
    with _recovery_progress() as progress, view(directory, vhost, progress) as store:
        if queue not in store.queues():
            names = ", ".join(map(repr, store.queues())) or "none"
            raise QueueNotFoundError(f"no queue {queue!r} in vhost {vhost!r}; there is {names}")
        for message in store.queue(queue).browse(start_seq, limit or None, unacked=True):
            typer.echo(_as_text(message) if format is Format.text else _as_json(message))


def _as_text(message: warren.Message) -> str:
    marks = " redelivered" if message.redelivered else ""
    moment = _moment(message.published_at)
    return f"{message.seq_id:>10}  {moment}  {len(message.body):>9} B{marks}  {_preview(message.body)}"


def _preview(body: bytes) -> str:
    """The beginning of a body in characters that leave the terminal as it is."""
    text = body[: 4 * _PREVIEW_CHARACTERS].decode("utf-8", "replace")
    shown = "".join(character if character.isprintable() else "·" for character in text)
    return shown if len(shown) <= _PREVIEW_CHARACTERS else shown[: _PREVIEW_CHARACTERS - 1] + "…"


def _as_json(message: warren.Message) -> str:
    value: dict[str, Any] = {
        "seq_id": message.seq_id,
        "published_at": _moment(message.published_at),
        "expires_at": None if message.expires_at is None else _moment(message.expires_at),
        "redelivered": message.redelivered,
        "delivery_count": message.delivery_count,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "properties": message.properties,
    }
    try:
        value["body"] = message.body.decode("utf-8")
    except UnicodeDecodeError:
        value["body_base64"] = base64.b64encode(message.body).decode()
    return json.dumps(value, default=_json_value)


def _json_value(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


# ---- verify ----


@app.command()
@_clear_errors
def verify(directory: Directory, vhost: AnyVhost = None, as_json: AsJson = False) -> None:
    """Check every checksum of every file, and the files against each other. Nothing is opened or changed.

    Exit code 0: all is well; what a crash leaves by design is listed, and harmless. 1: there is damage, with file and
    offset, or the directory cannot be read.
    """
    verifications = _verify(directory, vhost)
    if as_json:
        typer.echo(json.dumps([_verification_json(each) for each in verifications], indent=1))
    else:
        for each in verifications:
            _show_verification(each)
    if any(each.damage for each in verifications):
        raise typer.Exit(1)


def _verify(directory: str, vhost: str | None) -> list[Verification]:
    verifications = []
    for root in find_roots(directory, vhost):
        with undisturbed(root), _progress(f"checking {vhost_name(root)}") as progress:
            verifications.append(verify_vhost(root, lambda _, done, total: progress(done, total)))
    return verifications


def _verification_json(verification: Verification) -> dict[str, Any]:
    return {
        "vhost": verification.vhost,
        "directory": verification.root,
        "damaged": bool(verification.damage),
        "counts": dict(verification.counts),
        "findings": [asdict(finding) for finding in verification.findings],
    }


def _show_verification(verification: Verification) -> None:
    console = table_console()
    counts = verification.counts
    console.print(f"vhost [bold]{escape(verification.vhost)}[/bold] in {escape(verification.root)}", highlight=False)
    rest = ", ".join(
        f"{_count(number)} {what}" for what, number in counts.items() if what not in ("files", "bytes") and number
    )
    console.print(f"read {_count(counts['files'])} files, {decimal(counts['bytes'])}: {rest or 'nothing in them'}")
    for title, findings in (
        ("damage", verification.damage),
        ("harmless", [finding for finding in verification.findings if finding.harmless]),
    ):
        if findings:
            console.print(_findings_table(title, findings))
    damage = len(verification.damage)
    console.print(f"[red]{damage} damaged places[/red]" if damage else "[green]no damage[/green]")


def _findings_table(title: str, findings: list[Finding]) -> Table:
    table = Table("file", "offset", "length", "queue", "seq_id", "what", title=title, title_justify="left")
    for finding in findings:
        table.add_row(
            escape(finding.file),
            str(finding.offset),
            str(finding.length),
            escape(finding.queue or ""),
            "" if finding.seq_id is None else str(finding.seq_id),
            escape(finding.why),
        )
    return table


# ---- snapshot and restore ----


@app.command()
@_clear_errors
def snapshot(
    directory: Directory,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A directory that is new or empty.")],
    vhost: AnyVhost = None,
) -> None:
    """Copy a store that no process owns to a data directory of its own. (A live one: Store.snapshot, from within.)"""
    with _progress("copying") as progress:
        count = copy_durable(directory, target, vhost, progress, lambda copy: None)
    typer.echo(f"{count} files in {target}; it opens as a store")


@app.command()
@_clear_errors
def restore(
    source: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="A snapshot, or a copy of one.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory that is new or empty.")],
    vhost: AnyVhost = None,
    check: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check the copy; damage ends the restore.")
    ] = True,
) -> None:
    """Make a data directory from a snapshot. The snapshot stays as it is."""

    def intact(copy: str) -> None:
        damage = [finding for each in _verify(copy, vhost) for finding in each.damage] if check else []
        if damage:
            first = damage[0]
            raise StoreFormatError(
                f"{source} is damaged in {len(damage)} places, first in {first.file} at {first.offset}: {first.why}. "
                f"Nothing was restored. See `warren store verify {source}`; --no-verify restores what is left"
            )

    with _progress("copying") as progress:
        count = copy_durable(source, os.fspath(directory), vhost, progress, intact)
    typer.echo(f"{count} files in {directory}; warren.open({directory!r}) opens it")
