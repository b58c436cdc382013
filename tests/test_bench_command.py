"""`warren bench` against a real broker: what it counts is what went through, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench import rabbitmq
from tests.broker_clients import unique
from warren.amqp.bulk_client import Batch, connect
from warren.cli.bench import Outcome, bench
from warren.cli.load import Histogram, Load
from warren.testing import running_broker

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "bench.md"


@pytest.fixture(scope="module")
def broker():
    with running_broker() as running:
        yield running


def run(broker, *arguments: object):
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, ["--url", broker if isinstance(broker, str) else broker.url, *map(str, arguments)])


def result_of(broker, *arguments: object) -> dict:
    result = run(broker, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_flow_counts_every_message_and_leaves_no_queue(broker):
    queue = unique("bench")
    found = result_of(
        broker, "--queue", queue, "--messages", 3001, "--persistent", "--confirm", 100, "--ack-every", 10, "--size", 16
    )
    counts = found["counts"]
    assert (counts["published"], counts["confirmed"], counts["consumed"]) == (3001, 3001, 3001)
    assert (counts["nacked"], counts["redelivered"], counts["consumed_bytes"]) == (0, 0, 3001 * 16)
    assert found["rates"]["consumed"] == pytest.approx(3001 / found["seconds"])
    assert 0 < found["confirm_times"]["p50"] <= found["confirm_times"]["max"]
    assert f"{queue}-0" not in broker.call(lambda: list(broker.broker.vhosts["/"].queues))


def test_a_backlog_is_filled_by_one_run_and_drained_by_the_next(broker):
    queue = unique("bench")
    options = ["--queue", queue, "--queues", 2]
    filled = result_of(
        broker,
        *options,
        "--mode",
        "fill",
        "--messages",
        1500,
        "--confirm",
        50,
        "--publishers",
        2,
        "--argument",
        "x-max-length=5000",
    )
    assert filled["counts"]["confirmed"] == 1500
    infos = [broker.queue_info(f"{queue}-{number}") for number in range(2)]
    assert [info["messages_ready"] for info in infos] == [750, 750]
    assert infos[0]["arguments"]["x-max-length"] == 5000
    drained = result_of(broker, *options, "--mode", "drain", "--consumers", 2, "--ack-every", 7)
    assert drained["counts"]["consumed"] == 1500
    assert drained["confirm_times"] is None
    assert [broker.queue_info(f"{queue}-{number}")["messages"] for number in range(2)] == [0, 0]
    again = run(broker, *options, "--mode", "drain")
    assert again.exit_code == 1
    assert "nothing to drain" in again.output


def test_with_a_rate_the_time_to_the_consumer_is_measured(broker):
    found = result_of(broker, "--queue", unique("bench"), "--rate", 2000, "--messages", 600, "--ack-every", 0)
    assert found["counts"]["consumed"] == 600
    assert found["seconds"] >= 600 / 2000 * 0.9
    ages = [found["ages"][part] for part in ("p50", "p95", "p99", "p99.9", "max")]
    assert ages == sorted(ages)
    assert 0 < ages[0] < 5000


def test_a_run_by_the_clock_ends_with_a_table(broker):
    result = run(
        broker, "--queue", unique("bench"), "--seconds", 0.3, "--confirm", 20, "--ack-every", 1, "--prefetch", 10
    )
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    shown = {words[0]: words[1:] for words in lines if words}
    assert set(shown) >= {"published", "confirmed", "consumed"}
    counts = {name: int(shown[name][1].replace(",", "")) for name in ("published", "confirmed", "consumed")}
    assert 0 < counts["consumed"] <= counts["published"] == counts["confirmed"]
    assert shown["milliseconds"] == ["p50", "p95", "p99", "p99.9", "max"]


def test_bodies_differ_from_message_to_message(broker):
    queue = unique("bench")
    result_of(broker, "--queue", queue, "--mode", "fill", "--messages", 300, "--size", 16)

    async def bodies() -> list[bytes]:
        found: list[bytes] = []
        enough = asyncio.Event()

        def came(batch: Batch) -> None:
            found.extend(batch.bodies or [])
            if len(found) >= 300:
                enough.set()

        async with await connect(broker.url) as connection:
            channel = await connection.channel()
            await channel.consume(f"{queue}-0", came, no_ack=True, collect=True)
            await asyncio.wait_for(enough.wait(), 20)
        return found

    assert len(set(asyncio.run(bodies()))) == 300


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rate", 10, "--size", 4], "--size is at least 8"),
        (["--ack-every", 100, "--prefetch", 10], "never comes with --prefetch 10"),
        (["--argument", "x-max-length"], "is no argument of a queue"),
        (["--messages", 10, "--warmup", 1], "--warmup goes with --seconds"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(arguments, text):
    result = run("amqp://localhost:1/", *arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())


def test_without_a_broker_the_error_is_one_line():
    with socket.socket() as probe:  # bound, not listening: nobody can be there
        probe.bind(("127.0.0.1", 0))
        result = run(f"amqp://127.0.0.1:{probe.getsockname()[1]}/", "--messages", 1)
    assert result.exit_code == 1
    assert result.output.startswith("warren: ")
    assert len(result.output.splitlines()) == 1


def test_the_words_of_a_broker_that_refuses_are_shown(broker):
    result = run(broker.vhost_url("/", password="wrong"), "--messages", 1)
    assert result.exit_code == 1
    assert "ACCESS_REFUSED" in result.output


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99, 0.999, 1.0]))
def test_a_quantile_is_that_of_the_sorted_values_but_for_the_width_of_a_bucket(values, part):
    whole, half = Histogram(), Histogram()
    for number, value in enumerate(values):
        (whole if number % 2 else half).add(value)
    whole.merge(half)
    exact = sorted(values)[max(0, -int(-part * len(values) // 1) - 1)]
    assert whole.quantile(part) <= exact <= whole.quantile(part) * 33 / 32 + 1


def test_the_document_knows_every_option_and_its_example_runs(broker, capsys):
    text = DOCUMENT.read_text()
    app = typer.Typer()
    app.command()(bench)
    for option in typer.main.get_command(app).params:
        if option.name not in ("install_completion", "show_completion"):
            assert option.opts[0] in text, option.opts
    code = text.partition("```python\n")[2].partition("```")[0]
    exec(compile(code.replace("amqp://guest:guest@127.0.0.1/", broker.url), str(DOCUMENT), "exec"), {})
    printed = capsys.readouterr().out
    assert b"one" in eval(printed.splitlines()[0].partition(" ")[2])


def test_publishers_and_consumers_are_dealt_to_queues_in_turn():
    load = Load("", queues=2, queue="q", processes=3)
    assert [load.queue_name(number) for number in range(4)] == ["q-0", "q-1", "q-0", "q-1"]
    assert [load.processes_for(count) for count in (1, 3, 8)] == [1, 3, 3]


# ---- beside RabbitMQ ----


def outcome(consumed: float, confirmed: float = 0, published: float = 1e9, p50: float | None = None) -> Outcome:
    rates = {"published": published, "confirmed": confirmed, "consumed": consumed, "consumed_bytes": 0.0}
    times = None if p50 is None else {"p50": p50, "p99": 2 * p50}
    return Outcome(1.0, {}, rates, times, None)


def test_the_table_has_medians_and_the_ratio_to_the_better_of_the_others():
    candidates = [rabbitmq.Candidate(name, "", {}) for name in ("Warren", "v1", "v2")]
    found = {
        "transient, 16 B": {
            "Warren": [outcome(900), outcome(1000), outcome(5000, published=1000)],
            "v1": [outcome(100)],
            "v2": [outcome(250)],
        },
        "fill, 16 B": {
            "Warren": [outcome(0, 600, p50=1.5)],
            "v1": [outcome(0, 300, p50=30)],
            "v2": [outcome(0, 200, p50=20)],
        },
    }
    assert rabbitmq.table(found, candidates)[2:] == [
        "| transient, 16 B | 1,000 | 100 | 250 | 4.0 x |",
        "| fill, 16 B | 600 | 300 | 200 | 2.0 x |",
    ]
    assert rabbitmq.confirm_table(found, candidates)[2:] == ["| fill, 16 B | 1.5 / 3.0 | 30.0 / 60.0 | 20.0 / 40.0 |"]


def test_a_scenario_runs_on_a_warren_of_its_own_which_ends_with_it(tmp_path):
    with rabbitmq.warren(tmp_path / "warren") as ours:
        fill = next(each for each in rabbitmq.scenarios(1 / 9000) if each.key == "fill")
        found = rabbitmq.run(fill, ours, 0)
        assert {name: each.counts["confirmed"] + each.counts["consumed"] for name, each in found.items()} == {
            "fill with confirms, 16 B": 400,
            "drain with acks, 16 B": 400,
        }
        assert found["fill with confirms, 16 B"].counts["checkpoints"] == 0  # the journal's first file has room
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        asyncio.run(connect(ours.url))


def test_checkpoints_are_counted_and_come_when_they_are_asked_for(tmp_path):
    with rabbitmq.warren(tmp_path / "warren") as ours:
        checkpoints = ours.checkpoints
        assert checkpoints is not None
        fill = next(
            each.load for each in rabbitmq.scenarios(1 / 180) if each.key == "fill"
        )  # a tenth of a journal file
        assert fill.messages == 20_000
        rabbitmq.measure(replace(fill, url=ours.url), 0)
        assert checkpoints.done() == 0
        deadline = time.monotonic() + 60
        with checkpoints.asked_for():
            while checkpoints.done() < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert checkpoints.done() >= 1


def test_the_report_says_where_checkpoints_were_too_few():
    runs = [outcome(1), outcome(1)]
    runs[0].counts["checkpoints"], runs[1].counts["checkpoints"] = 12, 10
    few = outcome(1)
    few.counts["checkpoints"] = 9
    found = {"transient, 16 B": {"Warren": [outcome(1)]}, "fill, 16 B": {"Warren": runs}, "drain": {"Warren": [few]}}
    assert rabbitmq.checkpoint_table(found, "Warren")[2:] == [
        "| fill, 16 B | 10 |",
        "| drain | 9 (**void: below 10**) |",
    ]
