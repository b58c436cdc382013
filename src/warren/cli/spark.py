"""`warren spark`: jobs over whole stores and queues, on a laptop or a cluster with the same command.

Exit codes: 0, all is well; 1, it is not, or the job failed; 2, a wrong command line, or Spark cannot run here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from warren.cli.broker import DEFAULT_URL
from warren.cli.tables import print_rows, table_console
from warren.cli.view import find_roots, undisturbed, vhost_name
from warren.errors import StoreLockedError, StorePathError, WarrenError
from warren.storage.running_node import node_of_vhost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from warren.pipeline.jobs.compact import CompactionPlan
    from warren.pipeline.jobs.origin import Origin
    from warren.pipeline.jobs.recover import Recovery
    from warren.pipeline.jobs.verify import SparkVerification

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

P = ParamSpec("P")
T = TypeVar("T")

_SHOWN_FINDINGS = 100
_SHOWN_FILES = 40

Directory = Annotated[str, typer.Argument(metavar="DIR", help="A data directory that no process owns, or a snapshot.")]
MaybeDirectory = Annotated[
    str | None, typer.Argument(metavar="[DIR]", help="A data directory that no process owns, or a snapshot.")
]
Master = Annotated[str, typer.Option(help="Where Spark runs: local[*], spark://host:7077, yarn, k8s://...")]
Conf = Annotated[list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark.")]
JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; -: to stdout.")]
AnyVhost = Annotated[str | None, typer.Option("--vhost", help="One vhost only; all of them, if not given.")]
OneVhost = Annotated[str, typer.Option("--vhost", help="The vhost.")]
Url = Annotated[str | None, typer.Option(help="Instead of a directory: the HTTP address of a running broker.")]
User = Annotated[
    str | None, typer.Option(help="Who asks the broker. His password is in WARREN_PASSWORD, or in a file.")
]
PasswordFile = Annotated[str | None, typer.Option(help="A file with the password.")]
TokenFile = Annotated[str | None, typer.Option(help="A file with a token, instead of user and password.")]
CaFile = Annotated[str | None, typer.Option("--ca-file", help="Certificates to trust, for https.")]

MASTER = "local[*]"


def _clear_errors(command: Callable[P, T]) -> Callable[P, T]:
    """What goes wrong is one line on stderr and exit code 1; 2, where Spark is not there."""

    @functools.wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        from warren.pipeline.session import SparkMissingError

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
                return command(*arguments, **options)
        except BrokenPipeError:
            raise  # the reader has seen enough; click ends quietly
        except SparkMissingError as error:
            typer.echo(f"warren: {error}", err=True)
            raise typer.Exit(2) from None
        except (WarrenError, OSError) as error:
            typer.echo(f"warren: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None

    return run


def _session(master: str, what: str, conf: list[str] | None) -> SparkSession:
    from warren.pipeline.session import spark_session

    settings = {}
    for each in conf or []:
        name, equals, value = each.partition("=")
        if not equals:
            raise typer.BadParameter(f"{each!r} is no setting; give name=value", param_hint="--conf")
        settings[name.strip()] = value.strip()
    console = Console(stderr=True)
    with console.status(f"starting Spark on {escape(master)}") if console.is_terminal else contextlib.nullcontext():
        return spark_session(master, f"warren {what}", settings)


def _check_targets(*paths: str | None) -> None:
    """Before the work, and not after it: can these files be written?"""
    for path in paths:
        if path is None or path == "-":
            continue
        parent = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(parent):
            raise StorePathError(f"cannot write {path}: there is no directory {parent}; make it, or write elsewhere")
        if os.path.isdir(path):
            raise StorePathError(f"cannot write {path}: it is a directory; give the path of a file")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise StorePathError(f"cannot write {path}: this user may not write to {parent}; write elsewhere")


@contextlib.contextmanager
def _written_to(path: str) -> Iterator[IO[str]]:
    """A file that is there whole or not at all; `-` is stdout."""
    if path == "-":
        yield sys.stdout
        return
    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def _write_json(path: str | None, result: Any) -> None:
    if path is not None:
        with _written_to(path) as file:
            json.dump(result, file, indent=1, default=str)
            file.write("\n")


def _of_each_vhost(
    what: str,
    doing: str,
    job: Callable[[SparkSession, str], T],
    directory: str,
    vhost: str | None,
    master: str,
    conf: list[str] | None,
    json_file: str | None,
) -> list[T]:
    """Run a job over the directory of one vhost, or of each, that nobody uses meanwhile."""
    from warren.pipeline.progress import job_progress
    from warren.pipeline.session import clear_errors

    roots = find_roots(directory, vhost)
    _check_targets(json_file)
    spark = _session(master, what, conf)
    found = []
    for root in roots:
        with _at_rest(root), job_progress(spark, f"{doing} {vhost_name(root)}"), clear_errors():
            found.append(job(spark, root))
    return found


@contextlib.contextmanager
def _at_rest(root: str) -> Iterator[None]:
    """Nobody else changes the files meanwhile."""
    try:
        with undisturbed(root):
            yield
    except StoreLockedError as error:
        if node_of_vhost(root) is not None:
            raise
        raise StoreLockedError(
            f"{error}. Stop the broker, or give the path of a snapshot; `report`, `sql` and `archive` read a running "
            "broker with --url"
        ) from None


# ---- verify ----


@app.command()
@_clear_errors
def verify(
    directory: Directory, vhost: AnyVhost = None, master: Master = MASTER, conf: Conf = None, json_file: JsonFile = None
) -> None:
    """Check every checksum of every file, and the files against each other, on Spark. Nothing is changed.

    Says the same as `warren store verify`. Exit code 0: all is well; what a crash leaves by design is listed, and harmless.
    """
    from warren.pipeline.jobs.verify import verify_on_spark

    found = _of_each_vhost("verify", "checking", verify_on_spark, directory, vhost, master, conf, json_file)
    _write_json(json_file, [_verification(each) for each in found])
    if json_file != "-":
        for each in found:
            _show_verification(each)
    if any(each.damage for each in found):
        raise typer.Exit(1)


def _verification(found: SparkVerification) -> dict[str, Any]:
    return {
        "vhost": found.vhost,
        "directory": found.root,
        "damaged": bool(found.damage),
        "counts": dict(found.counts),
        "seconds": round(found.seconds, 3),
        "messages_per_second": round(found.messages_per_second),
        "tasks": found.tasks,
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
    }


def _show_verification(found: SparkVerification) -> None:
    console = table_console()
    counts = found.counts
    console.print(f"vhost [bold]{escape(found.vhost)}[/bold] in {escape(found.root)}", highlight=False)
    console.print(
        f"{counts['files']:,} files, {decimal(counts['bytes'])}, {counts['messages']:,} messages in {found.seconds:.1f} s "
        f"({found.messages_per_second:,.0f} messages/s)",
        highlight=False,
    )
    for title, findings in (
        ("damage", found.damage),
        ("harmless", [finding for finding in found.findings if finding.harmless]),
    ):
        if not findings:
            continue
        table = Table("file", "offset", "length", "queue", "seq_id", "what", title=title, title_justify="left")
        for each in findings[:_SHOWN_FINDINGS]:
            seq_id = "" if each.seq_id is None else str(each.seq_id)
            cells = (each.file, str(each.offset), str(each.length), each.queue or "", seq_id, each.why)
            table.add_row(*map(escape, cells))
        console.print(table)
        if len(findings) > _SHOWN_FINDINGS:
            console.print(f"and {len(findings) - _SHOWN_FINDINGS:,} more; --json FILE has all of them")
    damage = len(found.damage)
    console.print(f"[red]{damage:,} damaged places[/red]" if damage else "[green]no damage[/green]")


# ---- recover ----


@app.command()
@_clear_errors
def recover(
    directory: Directory,
    vhost: AnyVhost = None,
    force: Annotated[
        bool, typer.Option("--force", help="Read everything, also of a store that was stopped cleanly.")
    ] = False,
    master: Master = MASTER,
    conf: Conf = None,
    json_file: JsonFile = None,
) -> None:
    """Recover a store after a crash, so that a broker then starts clean, at once.

    What comes of it is what a start of the broker would make of the store: damage is copied to quarantine/ and listed.
    Exit code 0: every vhost starts clean and nothing was damaged.
    """
    from warren.pipeline.jobs.recover import recover_on_spark
    from warren.pipeline.progress import job_progress
    from warren.pipeline.session import clear_errors

    names = [vhost_name(root) for root in find_roots(directory, vhost)]
    _check_targets(json_file)
    spark = _session(master, "recover", conf)
    found = []
    for name in names:
        with job_progress(spark, f"recovering {name}"), clear_errors():
            found.append(recover_on_spark(spark, directory, name, force=force))
    _write_json(json_file, [_recovery(each) for each in found])
    if json_file != "-":
        for each in found:
            _show_recovery(each)
    if any(_lost_something(each) for each in found):
        raise typer.Exit(1)


def _recovery(found: Recovery) -> dict[str, Any]:
    return {
        **dataclasses.asdict(found),
        "messages": found.messages,
        "messages_per_second": round(found.messages_per_second),
    }


def _lost_something(found: Recovery) -> bool:
    from warren.storage.recovery import TORN_END

    return any(line["why"] != TORN_END for line in found.damage)


def _show_recovery(found: Recovery) -> None:
    console = table_console()
    console.print(f"vhost [bold]{escape(found.vhost)}[/bold] in {escape(found.root)}", highlight=False)
    if found.was_clean:
        console.print("[green]it was stopped cleanly: nothing to do[/green] (--force reads it all the same)")
        return
    table = Table("queue", title_justify="left")
    table.add_column("messages", justify="right")
    for name, count in sorted(found.queues.items()):
        table.add_row(escape(name), f"{count:,}")
    console.print(table)
    for line in found.damage:
        text = f"quarantined: {line['file']} at {line['offset']}, {line['length']} bytes: {line['why']}"
        console.print(text, markup=False, highlight=False)
    console.print(
        f"[green]recovered {found.messages:,} messages from {found.segments:,} segments in {found.seconds:.1f} s; "
        "the next start is a clean one[/green]",
        highlight=False,
    )


# ---- compact ----


@app.command()
@_clear_errors
def compact(
    directory: Directory, vhost: AnyVhost = None, master: Master = MASTER, conf: Conf = None, json_file: JsonFile = None
) -> None:
    """Show which files of the message store would be merged, and what that frees. Nothing is changed: the broker does it."""
    from warren.pipeline.jobs.compact import compaction_plan

    plans = _of_each_vhost("compact", "reading", compaction_plan, directory, vhost, master, conf, json_file)
    _write_json(json_file, [_plan(each) for each in plans])
    if json_file != "-":
        for each in plans:
            _show_plan(each)


def _plan(plan: CompactionPlan) -> dict[str, Any]:
    files = [{**dataclasses.asdict(file), "garbage_bytes": file.garbage_bytes} for file in plan.files]
    summary = {
        "garbage_fraction": plan.garbage_fraction,
        "total_bytes": plan.total_bytes,
        "live_bytes": plan.live_bytes,
        "freed_bytes": plan.freed_bytes,
    }
    return {**dataclasses.asdict(plan), "files": files, **summary}


def _show_plan(plan: CompactionPlan) -> None:
    console = table_console()
    console.print(f"vhost [bold]{escape(plan.vhost)}[/bold] in {escape(plan.root)}", highlight=False)
    if plan.files:
        table = Table("file")
        for column in ("bytes", "records", "in use", "garbage", "of it"):
            table.add_column(column, justify="right")
        worst = sorted(plan.files, key=lambda file: -file.garbage_bytes)
        for file in worst[:_SHOWN_FILES]:
            share = file.garbage_bytes / file.record_bytes if file.record_bytes else 0.0
            sizes = (decimal(file.size), f"{file.records:,}", decimal(file.live_bytes), decimal(file.garbage_bytes))
            table.add_row(escape(file.file), *sizes, f"{share:.0%}")
        console.print(table)
        if len(worst) > _SHOWN_FILES:
            console.print(f"and {len(worst) - _SHOWN_FILES:,} more; --json FILE has all of them")
    for name in plan.dead:
        console.print(f"unlink {name}: nobody refers to anything in it", markup=False, highlight=False)
    for merge in plan.merges:
        text = f"merge {merge.left} and {merge.right}: copy {decimal(merge.copied_bytes)}, free {decimal(merge.freed_bytes)}"
        console.print(text, markup=False, highlight=False)
    console.print(
        f"{len(plan.files):,} files, {decimal(plan.total_bytes)} of records, {plan.garbage_fraction:.0%} of them garbage; "
        f"{decimal(plan.freed_bytes)} would be freed. Then: {plan.why_not}",
        markup=False,
        highlight=False,
    )


# ---- archive and replay ----


def _origin(**given: Any) -> Origin:
    from warren.pipeline.errors import PipelineError
    from warren.pipeline.jobs.origin import Origin

    try:
        origin = Origin(**given)
    except PipelineError as error:  # no place, or two
        typer.echo(f"warren: {error}", err=True)
        raise typer.Exit(2) from None
    origin.check()
    return origin


@app.command()
@_clear_errors
def archive(
    to: Annotated[str, typer.Option(metavar="DIR", help="The archive: a directory that executors can write to.")],
    path: Annotated[str | None, typer.Option(metavar="DIR", help="A data directory or a snapshot.")] = None,
    url: Url = None,
    vhost: OneVhost = "/",
    queue: Annotated[str | None, typer.Option(help="One queue.")] = None,
    queue_pattern: Annotated[
        str | None, typer.Option(help="Queues whose whole name matches; all, if not given.")
    ] = None,
    from_seq_id: Annotated[int | None, typer.Option(min=0, help="The first seq_id.")] = None,
    to_seq_id: Annotated[int | None, typer.Option(min=0, help="The seq_id behind the last one.")] = None,
    since: Annotated[str | None, typer.Option(help="Published at this time (ISO 8601) or later.")] = None,
    until: Annotated[str | None, typer.Option(help="Published before this time.")] = None,
    user: User = None,
    password_file: PasswordFile = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    master: Master = MASTER,
    conf: Conf = None,
    json_file: JsonFile = None,
) -> None:
    """Write the messages of queues to Parquet, by vhost, queue and day. The queues keep them.

    A run appears whole or not at all, beside the runs before it, with a ledger of what it holds.
    """
    origin = _origin(
        path=path,
        url=url,
        vhost=vhost,
        user=user,
        password_file=password_file,
        token_file=token_file,
        ca_file=ca_file,
    )
    _check_targets(json_file)
    spark = _session(master, "archive", conf)
    from warren.pipeline.jobs.archive import archive as write_archive
    from warren.pipeline.progress import job_progress

    with origin, job_progress(spark, f"archiving {origin.place}"):
        run = write_archive(
            spark,
            origin,
            to,
            queue=queue,
            queue_pattern=queue_pattern,
            from_seq_id=from_seq_id,
            to_seq_id=to_seq_id,
            since=since,
            until=until,
        )
    result = {
        **dataclasses.asdict(run),
        "messages": run.messages,
        "messages_per_second": round(run.messages_per_second),
    }
    _write_json(json_file, result)
    if json_file == "-":
        return
    console = table_console()
    table = Table("queue")
    for column in ("messages", "bytes", "first seq_id", "last seq_id"):
        table.add_column(column, justify="right")
    for each in run.queues:
        cells = (f"{each.messages:,}", decimal(each.bytes), f"{each.min_seq_id:,}", f"{each.max_seq_id:,}")
        table.add_row(escape(each.queue), *cells)
    console.print(table)
    console.print(
        f"run {run.run}: {run.messages:,} messages in {run.seconds:.1f} s ({run.messages_per_second:,.0f} messages/s), "
        f"in {run.directory}",
        markup=False,
        highlight=False,
    )


@app.command()
@_clear_errors
def replay(
    archive_directory: Annotated[str, typer.Argument(metavar="ARCHIVE", help="What `archive` was given as --to.")],
    url: Annotated[str, typer.Option(help="The HTTP address of the broker to publish to.")],
    vhost: OneVhost = "/",
    exchange: Annotated[str | None, typer.Option(help="Where to; if not given, where it was published to.")] = None,
    routing_key: Annotated[str | None, typer.Option(help="For all messages; if not given, each has its own.")] = None,
    run: Annotated[list[str] | None, typer.Option(help="A run of the archive; all of them, if not given.")] = None,
    from_queue: Annotated[str | None, typer.Option(help="Only what was in this queue.")] = None,
    from_vhost: Annotated[str | None, typer.Option(help="Only what was in this vhost.")] = None,
    user: User = None,
    password_file: PasswordFile = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    master: Master = MASTER,
    conf: Conf = None,
    json_file: JsonFile = None,
) -> None:
    """Publish an archive to a broker: all of it, each message once, with its properties, or nothing."""
    target = _origin(
        url=url, vhost=vhost, user=user, password_file=password_file, token_file=token_file, ca_file=ca_file
    )
    _check_targets(json_file)
    spark = _session(master, "replay", conf)
    from warren.pipeline.jobs.archive import replay as publish_archive
    from warren.pipeline.progress import job_progress

    began = time.monotonic()
    with job_progress(spark, f"publishing to {url}"):
        count = publish_archive(
            spark,
            archive_directory,
            target,
            exchange=exchange,
            routing_key=routing_key,
            runs=run,
            queue=from_queue,
            vhost=from_vhost,
        )
    seconds = time.monotonic() - began
    _write_json(json_file, {"messages": count, "seconds": round(seconds, 3), "url": url, "vhost": vhost})
    if json_file != "-":
        typer.echo(f"published {count:,} messages to {url} in {seconds:.1f} s")


# ---- report ----


@app.command()
@_clear_errors
def report(
    directory: MaybeDirectory = None,
    url: Url = None,
    vhost: OneVhost = "/",
    to: Annotated[str, typer.Option(metavar="FILE", help="The page to write.")] = "warren-report.html",
    user: User = None,
    password_file: PasswordFile = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    master: Master = MASTER,
    conf: Conf = None,
    json_file: JsonFile = None,
) -> None:
    """Write one HTML file that shows what is in the queues: depth, age, size, rate, garbage, hot keys, dead letters.

    It opens without network. No message is touched.
    """
    origin = _origin(
        path=directory,
        url=url,
        vhost=vhost,
        user=user,
        password_file=password_file,
        token_file=token_file,
        ca_file=ca_file,
    )
    _check_targets(to, json_file)
    spark = _session(master, "report", conf)
    from warren.pipeline.jobs.report import report_data
    from warren.pipeline.jobs.report_page import page
    from warren.pipeline.jobs.report_plots import plots
    from warren.pipeline.progress import job_progress

    with origin, job_progress(spark, f"counting {origin.place}"):
        data = report_data(spark, origin)
    with _written_to(to) as file:
        file.write(page(data, plots(data)))
    named = {"queues", "rates", "files", "keys", "deaths"}
    result = {
        name: [each._asdict() for each in getattr(data, name)] if name in named else getattr(data, name)
        for name in (field.name for field in dataclasses.fields(data))
    }
    _write_json(json_file, {**result, "messages": data.messages, "page": os.path.abspath(to)})
    if json_file != "-":
        typer.echo(f"{data.messages:,} messages in {len(data.queues):,} queues; the report is in {os.path.abspath(to)}")


# ---- sql ----


@app.command()
@_clear_errors
def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Every queue of the vhost is a table of its name.")],
    directory: MaybeDirectory = None,
    url: Url = None,
    vhost: OneVhost = "/",
    limit: Annotated[int, typer.Option(min=1, help="How many rows to show; a file gets all of them.")] = 100,
    csv_file: Annotated[
        str | None, typer.Option("--csv", metavar="FILE", help="Write the rows as CSV; -: to stdout.")
    ] = None,
    user: User = None,
    password_file: PasswordFile = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    master: Master = MASTER,
    conf: Conf = None,
    json_file: JsonFile = None,
) -> None:
    """Ask the queues of a store or of a running broker in SQL. No message is touched.

    warren spark sql "select routing_key, count(*) from orders group by 1" data/

    A result that is wider than the terminal is shown one record under the other.

    Odd names are quoted: `dead-letters`. Also there: warren_queues, warren_segments, warren_files, warren_journal.
    """
    origin = _origin(
        path=directory,
        url=url,
        vhost=vhost,
        user=user,
        password_file=password_file,
        token_file=token_file,
        ca_file=ca_file,
    )
    _check_targets(json_file, csv_file)
    spark = _session(master, "sql", conf)
    from warren.pipeline.jobs import sql as job
    from warren.pipeline.progress import job_progress
    from warren.pipeline.session import clear_errors

    with origin, job_progress(spark, "asking"), clear_errors():
        rows = job.query(spark, origin, query)
        to_file = json_file is not None or csv_file is not None
        result = (rows if to_file else rows.limit(limit + 1)).toArrow()
    for path, write in ((json_file, job.write_json), (csv_file, job.write_csv)):
        if path is not None:
            with _written_to(path) as file:
                write(result, file)
    if to_file:
        return
    console = table_console()
    cells = [
        [None if value is None else job.as_text(value) for value in row]
        for row in itertools.islice(job.rows_of(result), limit)
    ]
    print_rows(console, result.schema.names, cells)
    many = "1 row" if result.num_rows == 1 else f"{result.num_rows:,} rows"
    more = result.num_rows > limit
    console.print(f"the first {limit:,} rows; --limit shows more" if more else many, highlight=False)


# ---- init ----


@app.command()
@_clear_errors
def init(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory that is new or empty.")],
    queue: Annotated[str, typer.Option(help="The queue to read.")] = "orders",
    exchange: Annotated[str, typer.Option(help="The exchange to feed.")] = "amq.topic",
    url: Annotated[str, typer.Option(help="The broker's HTTP address; WARREN_URL counts more.")] = DEFAULT_URL,
    vhost: OneVhost = "/",
    json_file: JsonFile = None,
) -> None:
    """Write a project of Spark Declarative Pipelines: queue, streaming table, views, exchange. Runs as it is."""
    from warren.pipeline.jobs.project import write_project

    project = write_project(directory, queue=queue, url=url, vhost=vhost, exchange=exchange)
    _write_json(json_file, dataclasses.asdict(project))
    if json_file != "-":
        typer.echo(
            f"{', '.join(project.files)} in {project.directory}; then: cd there, ./pipeline dry-run, ./pipeline run"
        )
