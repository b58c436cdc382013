"""The pipeline at work: a shop's orders flow through a broker into a lake, exactly once, while the broker is killed.

    publisher -> exchange shop       -> queue lake   -> Spark, lease lake   -> Parquet: orders, and poison set aside
              -> exchange shop.later -> queue totals -> Spark, lease totals -> exchange results -> queue countries
                                     -> queue audit     keeps a copy of everything, for the ledger and the report

Some orders are published with a delay, some bodies are poison: no JSON, or none of an order. In the middle the process that
holds the queues is killed with SIGKILL. In the end a ledger is drawn up: everything that was published is in the lake or set
aside as poison, nothing is there twice, and the totals of the countries are those of the lake.

    python -m examples.demo --orders 20000

Shows itself in a terminal, or as plain lines where there is none. Exit code 0: the ledger balances; 1: it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pika.exceptions
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from warren.amqp.bulk_client import BrokerClosedError, Channel, connect, encoded_properties
from warren.errors import WarrenError
from warren.pipeline.session import SparkMissingError, clear_message, spark_session

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery
    from pyspark.sql.streaming.state import GroupState

COUNTRIES = {"de": 30, "fr": 22, "pl": 15, "nl": 12, "at": 9, "dk": 7, "pt": 5}  # and how much each orders
SHOWN = ("lake", "totals", "audit", "countries")
ZONES = ("q1", "q2", "delta", "q3", "q4")  # of a queue, from its tail to its head
ARTICLES = ("book", "chair", "lamp", "pen", "rug", "table")
ORDER = "number bigint, customer string, country string, article string, cents bigint"
POISON = (b"\xff\xfe\x00 not even text", b'{"number": 1, "customer": "cut o', b'{"ping": true}', b"")
POISON_SHARE = 0.01
DELAYED_SHARE = 0.05
DELAYED_UNTIL = 0.4  # of the flow: they are safe when the broker is killed
HELD_AT = 0.45  # until Spark has written its first rows: the kill is to meet streams that run
KILLED_AT = 0.5
DELAYS_MS = (500, 8000)

CHUNK = 100  # orders that are confirmed together
START_SECONDS = 60
PATIENCE_SECONDS = 180  # until everything is in the lake
PICTURES_PER_SECOND = 4
PLAIN_SECONDS = 2.0  # between two lines, while something happens;
IDLE_SECONDS = 15.0  # else
PLAIN_WIDTH = 130
READY = re.compile(r"ready: AMQP on ([\w.]+:\d+), status page on (http://[\w.]+:\d+)")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Warren's pipeline at work.")
    parser.add_argument("--orders", type=int, default=20_000, help="how many to publish (default: 20000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long that takes (default: 20)")
    parser.add_argument("--to", metavar="DIR", help="where the lake and the report go (default: a new directory)")
    options = parser.parse_args(arguments)
    if options.orders < 1:
        parser.error(f"--orders is {options.orders}; it is 1 or more")
    place = Path(options.to or tempfile.mkdtemp(prefix="warren-demo-")).resolve()
    if (place / "checkpoints").exists():
        parser.error(f"--to: {place} has another run in it, of a broker that is gone; give a new directory")
    place.mkdir(parents=True, exist_ok=True)
    console = Console()
    demo = Demo(console if console.is_terminal else Console(width=PLAIN_WIDTH), place, options.orders, options.seconds)
    try:
        return demo.run()
    except SparkMissingError as error:
        console.print(f"demo: {error}", markup=False, highlight=False)
        return 2
    except WarrenError as error:
        console.print(f"demo: {error}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130


# ---- the broker ----


@dataclass(frozen=True, slots=True)
class Broker:
    """`warren serve`, in processes of its own."""

    amqp_url: str
    http_url: str

    def status(self) -> dict[str, Any]:
        """Of the vhost; empty while it is down."""
        try:
            with urllib.request.urlopen(f"{self.http_url}/api/status", timeout=5) as answer:
                vhosts = json.load(answer)["vhosts"]
        except (OSError, ValueError):
            return {}
        return next((vhost for vhost in vhosts if vhost["name"] == "/"), {})

    def kill(self) -> int | None:
        """The vhost's process, as a power cut would; its id. None: it does not answer now."""
        pid = self.status().get("pid")
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid

    def declare(self) -> None:
        with contextlib.closing(pika.BlockingConnection(pika.URLParameters(self.amqp_url))) as connection:
            channel = connection.channel()
            later = {"x-delayed-type": "topic"}
            channel.exchange_declare("shop", "topic", durable=True)
            channel.exchange_declare("shop.later", "x-delayed-message", durable=True, arguments=later)
            channel.exchange_declare("results", "topic", durable=True)
            for queue in ("lake", "totals", "audit"):
                channel.queue_declare(queue, durable=True)
                for exchange in ("shop", "shop.later"):
                    channel.queue_bind(queue, exchange, "order.#")
            channel.queue_declare("countries", durable=True)
            channel.queue_bind("countries", "results", "country.#")


@contextlib.contextmanager
def serving(data: Path) -> Iterator[Broker]:
    log = data.parent / "broker.log"
    command = [sys.executable, "-m", "warren.cli.main", "serve", "--data-dir", str(data)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WARREN_")}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, "--amqp-port", "0", "--http-port", "0"],
            stdout=output,
            stderr=output,
            env={**environment, "NO_COLOR": "1"},
            start_new_session=True,  # Ctrl-C is for the demonstration, which then stops the broker
        ) as process,
    ):
        try:
            deadline = time.monotonic() + START_SECONDS
            while (found := READY.search(log.read_text())) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise WarrenError(f"the broker did not start; {log} says why")
                time.sleep(0.05)
            yield Broker(f"amqp://guest:guest@{found[1]}/", found[2])
        finally:
            process.terminate()
            process.wait(START_SECONDS)


# ---- orders ----


@dataclass(frozen=True, slots=True)
class Order:
    """One message of the flow: an order, or what looks like one."""

    number: int
    country: str
    body: bytes
    delay_ms: int  # 0: none


def make_orders(count: int, chance: random.Random) -> list[Order]:
    customers = [f"customer-{number}" for number in range(max(5, count // 40))]
    homes = dict(
        zip(customers, chance.choices(list(COUNTRIES), list(COUNTRIES.values()), k=len(customers)), strict=True)
    )
    orders = []
    for number in range(count):
        customer = chance.choice(customers)
        country = homes[customer]
        if chance.random() < POISON_SHARE:
            orders.append(Order(number, country, chance.choice(POISON), 0))
            continue
        order = {
            "number": number,
            "customer": customer,
            "country": country,
            "article": chance.choice(ARTICLES),
            "cents": chance.randrange(199, 50_000),
        }
        late = number < count * DELAYED_UNTIL and chance.random() < DELAYED_SHARE
        delay_ms = chance.randrange(*DELAYS_MS) if late else 0
        orders.append(Order(number, country, json.dumps(order).encode(), delay_ms))
    return orders


class Publisher:
    """Publishes the flow, with confirms, in a thread of its own. What was not confirmed when the connection was lost is
    published again; its numbers (`x-publishing-id`) tell the broker what it has already."""

    def __init__(self, url: str, orders: list[Order], seconds: float) -> None:
        self._url = url
        self._orders = orders
        self._seconds = seconds
        self.confirmed = 0
        self.lost_connections = 0
        self.go_on = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._publish())
        except BaseException as error:
            self.failure = error

    async def _publish(self) -> None:
        while self.confirmed < len(self._orders):
            try:
                async with await connect(self._url, name="shop") as connection:
                    channel = await connection.channel()
                    await channel.confirm_select()
                    while self.confirmed < len(self._orders):
                        if self.confirmed >= len(self._orders) * HELD_AT:
                            await asyncio.to_thread(self.go_on.wait)
                        chunk = self._orders[self.confirmed : self.confirmed + CHUNK]
                        for order in chunk:
                            _send(channel, order)
                        await channel.settled()
                        self.confirmed += len(chunk)
                        await asyncio.sleep(self._seconds * len(chunk) / len(self._orders))
            except (OSError, BrokerClosedError):
                self.lost_connections += 1
                await asyncio.sleep(0.1)


def _send(channel: Channel, order: Order) -> None:
    headers: dict[str, Any] = {"x-delay": order.delay_ms}
    if not order.delay_ms:
        headers = {"x-producer-name": "shop", "x-publishing-id": order.number + 1}
    properties = encoded_properties(
        delivery_mode=2, content_type="application/json", message_id=str(order.number), headers=headers
    )
    exchange = "shop.later" if order.delay_ms else "shop"
    key = f"order.{order.country}"
    channel.send(channel.encode([order.body], exchange=exchange, routing_key=key, properties=properties), 1)


class Dashboard:
    """A consumer of the results, as any AMQP client is one: the last total of every country."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.totals: dict[str, tuple[int, int]] = {}
        threading.Thread(target=self._run, name="dashboard", daemon=True).start()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                self._consume()
            time.sleep(0.2)

    def _consume(self) -> None:
        with contextlib.closing(pika.BlockingConnection(pika.URLParameters(self._url))) as connection:
            channel = connection.channel()
            queue = channel.queue_declare("", exclusive=True).method.queue
            channel.queue_bind(queue, "results", "country.#")
            for _, _, body in channel.consume(queue, auto_ack=True):
                total = json.loads(body)
                self.totals[total["country"]] = total["orders"], total["cents"]


# ---- Spark ----


def parsed(messages: DataFrame) -> DataFrame:
    """Messages with the order in them; `error` says why there is none."""
    from pyspark.sql.functions import col, from_json, lit, when

    body = from_json(col("body").cast("string"), ORDER).alias("order")
    rows = messages.select("seq_id", "message_id", "published_at", "body", body)
    whole = col("order.number").isNotNull() & col("order.country").isNotNull() & col("order.cents").isNotNull()
    why = when(whole, lit(None)).when(col("body") == b"", "it is empty").otherwise("it is no order in JSON")
    kind = when(whole, lit("order")).otherwise(lit("poison"))
    return rows.withColumn("error", why.cast("string")).withColumn("kind", kind)


def running_totals(
    key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:  # of one country, whenever it had orders
    import pandas as pd

    orders, cents = state.get if state.exists else (0, 0)
    for frame in frames:
        orders, cents = orders + len(frame), cents + int(frame["cents"].sum())
    state.update((orders, cents))
    yield pd.DataFrame({"country": [key[0]], "orders": [orders], "cents": [cents]})


class Streams:
    """The two queries, and how far they are."""

    def __init__(self, spark: SparkSession, broker: Broker, place: Path) -> None:
        self._spark = spark
        self._broker = {"url": broker.http_url, "user": "guest", "password": "guest"}
        self._rows: dict[str, dict[int, int]] = {"lake": {}, "totals": {}}  # by query and batch
        self.lake_path = str(place / "lake")
        checkpoints = place / "checkpoints"
        self._queries = {
            "lake": self._into_lake(str(checkpoints / "lake")),
            "totals": self._into_exchange(str(checkpoints / "totals")),
        }

    def _orders(self, queue: str) -> DataFrame:
        source = self._spark.readStream.format("warren").options(**self._broker, queue=queue, lease=queue)
        return parsed(source.option("columns", "seq_id,message_id,published_at,body").load())

    def _into_lake(self, checkpoint: str) -> StreamingQuery:
        sink = self._orders("lake").writeStream.format("parquet").partitionBy("kind")
        return (
            sink.options(path=self.lake_path, checkpointLocation=checkpoint).trigger(processingTime="1 second").start()
        )

    def _into_exchange(self, checkpoint: str) -> StreamingQuery:
        from pyspark.sql.functions import concat, lit, struct, to_json

        sold = self._orders("totals").where("kind = 'order'").select("order.country", "order.cents")
        totals = sold.groupBy("country").applyInPandasWithState(
            running_totals,
            "country string, orders bigint, cents bigint",
            "orders bigint, cents bigint",
            "append",
            "NoTimeout",
        )
        messages = totals.select(
            to_json(struct("*")).alias("body"),
            concat(lit("country."), "country").alias("routing_key"),
            lit("application/json").alias("content_type"),
        )
        sink = messages.writeStream.format("warren").options(**self._broker, exchange="results")
        return sink.option("checkpointLocation", checkpoint).trigger(processingTime="1 second").start()

    def rows(self, name: str) -> int:
        """That a query has read, in batches that are durable."""
        query = self._queries[name]
        error = query.exception()
        if error is not None:
            raise WarrenError(f"the stream {name} has failed: {clear_message(error)}")
        for progress in query.recentProgress:
            self._rows[name][progress["batchId"]] = progress["numInputRows"]
        return sum(self._rows[name].values())

    def stop(self) -> None:
        for query in self._queries.values():
            query.stop()

    def lake(self) -> DataFrame:
        return self._spark.read.parquet(self.lake_path)

    def audited(self) -> int:
        """Messages in the queue that keeps everything."""
        audit = self._spark.read.format("warren").options(**self._broker, queue="audit", columns="message_id").load()
        return audit.distinct().count()

    def published_totals(self) -> DataFrame:
        """What is in the queue of the results; nothing is consumed."""
        from pyspark.sql.functions import col, from_json

        messages = self._spark.read.format("warren").options(**self._broker, queue="countries").load()
        total = from_json(col("body").cast("string"), "country string, orders bigint, cents bigint")
        return messages.select("seq_id", total.alias("total")).select("seq_id", "total.*")


# ---- what is shown ----


@dataclass(slots=True)
class Picture:
    """One look at everything."""

    seconds: float
    state: str
    published: int
    queues: list[dict[str, Any]]
    lake: int
    rate: float
    totals: dict[str, tuple[int, int]]
    killed: str
    orders: int  # that there will be

    def plain(self) -> str:
        depth = "  ".join(f"{queue['name']} {_depth(queue):,}" for queue in self.queues) or "broker down"
        return (
            f"published {self.published:,}  [{depth}]  lake {self.lake:,} ({self.rate:,.0f}/s)  "
            f"countries {len(self.totals)}, {sum(orders for orders, _ in self.totals.values()):,} orders"
        )

    def panel(self) -> RenderableType:
        wide = max(6, len(f"{self.orders:,}"))
        queues = _table(("queue", 9), ("ready", wide), ("checked out", 11), *((zone, wide) for zone in ZONES))
        for queue in self.queues:
            counts = (queue["messages_ready"], queue["messages_unacknowledged"], *(queue[zone] for zone in ZONES))
            queues.add_row(queue["name"], *(f"{count:,}" for count in counts))
        if not self.queues:
            queues.add_row(Text(self.state, style="bold red"))
        for _ in range(len(SHOWN) - max(1, len(self.queues))):  # what is below stays where it is
            queues.add_row()
        countries = _table(("country", 9), ("orders", 10), ("revenue", 16))
        for country in COUNTRIES:
            orders, cents = self.totals.get(country, (0, 0))
            countries.add_row(country, f"{orders:,}", f"{cents / 100:,.2f}")
        flow = Text.assemble(
            ("published ", "bold"),
            f"{self.published:,} of {self.orders:,}   ",
            ("in the lake ", "bold"),
            (f"{self.lake:,}", "green"),
            f" ({self.rate:,.0f}/s)   {self.seconds:.0f} s",
        )
        note = Text(self.killed, style="bold red") if self.killed else Text("Spark writes its first rows", style="dim")
        note = note if self.killed or not self.lake else Text()
        parts: list[RenderableType] = [flow, Text(), queues, Text(), countries, Text(), note]
        return Panel(Group(*parts), title="orders -> broker -> Spark -> Parquet, and back", width=100)


def _table(*columns: tuple[str, int]) -> Table:
    """Numbers come and go; the columns stay where they are, and fit into a terminal of 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
    for number, (name, width) in enumerate(columns):
        table.add_column(name, width=width, justify="right" if number else "left")
    return table


def _depth(queue: dict[str, Any]) -> int:
    return int(queue["messages_ready"]) + int(queue["messages_unacknowledged"])


# ---- the demonstration ----


class Demo:
    def __init__(self, console: Console, place: Path, orders: int, seconds: float) -> None:
        self._console = console
        self._place = place
        self._orders = make_orders(orders, random.Random())
        self._seconds = seconds
        self._killed = ""

    def run(self) -> int:
        self._say("[bold]Warren[/bold] - a queue is a table, a stream and a broker")
        with self._console.status("starting Spark") if self._console.is_terminal else contextlib.nullcontext():
            spark = spark_session("local[2]", "demo", {"spark.sql.shuffle.partitions": "2"})
        try:
            with (
                tempfile.TemporaryDirectory(prefix="warren-demo-data-") as directory,
                serving(Path(directory, "data")) as broker,
            ):
                broker.declare()
                streams = Streams(spark, broker, self._place)
                try:
                    self._flow(broker, streams)
                finally:
                    streams.stop()
                balanced = self._ledger(streams)
                self._report(spark, broker)
        finally:
            spark.stop()
        return 0 if balanced else 1

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _flow(self, broker: Broker, streams: Streams) -> None:
        self._console.print(Rule("a flow of orders, and a kill -9 in the middle"))
        publisher = Publisher(broker.amqp_url, self._orders, self._seconds)
        dashboard = Dashboard(broker.amqp_url)
        publisher.start()
        begun = time.monotonic()
        history: list[tuple[float, int]] = []
        with self._live() as show:
            while True:
                now = time.monotonic()
                status = broker.status()
                lake = streams.rows("lake")
                history = [(at, rows) for at, rows in history if now - at < 5] + [(now, lake)]
                passed = now - history[0][0]
                show(
                    Picture(
                        now - begun,
                        status.get("state", "down"),
                        publisher.confirmed,
                        [queue for queue in status.get("queues", []) if queue["name"] in SHOWN],
                        lake,
                        (lake - history[0][1]) / passed if passed else 0.0,
                        dict(dashboard.totals),
                        self._killed,
                        len(self._orders),
                    )
                )
                if publisher.failure is not None:
                    raise WarrenError(f"the publisher has failed: {publisher.failure}") from publisher.failure
                if lake:
                    publisher.go_on.set()
                half = publisher.confirmed >= len(self._orders) * KILLED_AT
                if half and not self._killed and (pid := broker.kill()) is not None:
                    self._killed = f"killed: process {pid}, which holds the queues, after {now - begun:.1f} s"
                    if not self._console.is_terminal:
                        self._say(self._killed)
                if publisher.done and self._arrived(status, streams):
                    return
                if now - begun > self._seconds + PATIENCE_SECONDS:
                    self._say("[bold red]not everything has arrived; the ledger says what is missing[/bold red]")
                    return
                time.sleep(1 / PICTURES_PER_SECOND)

    def _arrived(self, status: dict[str, Any], streams: Streams) -> bool:
        """Everything is behind the streams, and acked."""
        depths = {queue["name"]: _depth(queue) for queue in status.get("queues", [])}
        enough = all(streams.rows(name) >= len(self._orders) for name in ("lake", "totals"))
        return enough and depths.get("lake") == 0 and depths.get("totals") == 0

    @contextlib.contextmanager
    def _live(self) -> Iterator[Callable[[Picture], None]]:
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=PICTURES_PER_SECOND) as live:
                yield lambda picture: live.update(picture.panel())
            return
        printed, said = -IDLE_SECONDS, ""

        def show(picture: Picture) -> None:
            nonlocal printed, said
            line = picture.plain()
            if picture.seconds - printed >= (IDLE_SECONDS if line == said else PLAIN_SECONDS):
                printed, said = picture.seconds, line
                self._console.print(f"{picture.seconds:6.1f} s  {line}", markup=False, highlight=False)

        yield show

    # -- the ledger --------------------------------------------------------------------------------------------------

    def _ledger(self, streams: Streams) -> bool:
        self._console.print(Rule("the ledger"))
        lake = streams.lake().selectExpr("message_id", "kind", "order.country", "order.cents", "error").collect()
        orders = [row for row in lake if row.kind == "order"]
        poison = [row for row in lake if row.kind == "poison"]
        found = {row.message_id for row in lake}
        expected_poison = {str(order.number) for order in self._orders if order.body in POISON}
        totals: dict[str, tuple[int, int]] = {}
        results = streams.published_totals().orderBy("seq_id").collect()
        for row in results:
            totals[row.country] = row.orders, row.cents
        sold = {country: [row.cents for row in orders if row.country == country] for country in totals}
        checks = [
            ("published and confirmed", len(self._orders), None),
            ("  of them with a delay", sum(1 for order in self._orders if order.delay_ms), None),
            ("in the queue audit", streams.audited(), len(self._orders)),
            ("orders in the lake", len(orders), len(self._orders) - len(expected_poison)),
            ("poison set aside", len({row.message_id for row in poison} & expected_poison), len(expected_poison)),
            ("missing", len(self._orders) - len(found), 0),
            ("in the lake twice", len(lake) - len(found), 0),
            (f"orders in the last totals of {len(totals)} countries", sum(n for n, _ in totals.values()), len(orders)),
            ("cents in them", sum(cents for _, cents in totals.values()), sum(row.cents for row in orders)),
            ("countries with another total in the lake", _different(totals, sold), 0),
            ("totals published twice", len(results) - len({(row.country, row.orders) for row in results}), 0),
        ]
        table = Table("what", "found", "expected", "")
        table.columns[1].justify = table.columns[2].justify = "right"
        balanced = True
        for what, number, expected in checks:
            good = expected is None or number == expected
            balanced = balanced and good
            mark = "" if expected is None else "[green]ok[/green]" if good else "[bold red]no[/bold red]"
            table.add_row(what, f"{number:,}", "" if expected is None else f"{expected:,}", mark)
        self._console.print(table)
        self._say(self._killed or "[red]nothing was killed[/red]")
        self._say(
            "[bold green]the ledger balances[/bold green]: exactly once, through a kill -9"
            if balanced
            else "[bold red]the ledger does not balance[/bold red]: this is a bug, please report it"
        )
        return balanced

    def _report(self, spark: SparkSession, broker: Broker) -> None:
        from warren.pipeline.jobs.origin import Origin
        from warren.pipeline.jobs.report import report_data
        from warren.pipeline.jobs.report_page import page
        from warren.pipeline.jobs.report_plots import plots

        secret = self._place / "password"
        secret.write_text("guest")
        try:
            data = report_data(spark, Origin(url=broker.http_url, user="guest", password_file=str(secret)))
        finally:
            secret.unlink()
        path = self._place / "report.html"
        path.write_text(page(data, plots(data)), encoding="utf-8")
        self._say(f"the lake:   {self._place / 'lake'}")
        self._say(f"the report: {path}")


def _different(totals: dict[str, tuple[int, int]], sold: dict[str, list[int]]) -> int:
    return sum(1 for country, total in totals.items() if total != (len(sold[country]), sum(sold[country])))


if __name__ == "__main__":
    sys.exit(main())
