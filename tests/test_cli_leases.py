"""`warren leases` and `warren snapshots`, against a broker."""

from __future__ import annotations

import json

import pika
import pytest
from typer.testing import CliRunner

from tests.test_pipeline_api import Client, publish
from warren.cli.main import app
from warren.testing import running_broker


@pytest.fixture(scope="module")
def running():
    with running_broker(http=True) as broker:
        yield broker


@pytest.fixture
def warren(running):
    def run(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*arguments, "--url", running.http_url], env={"COLUMNS": "200"})
        assert done.exit_code == code, done.output
        return done.output

    return run


@pytest.fixture
def leased(running):
    """A lease that has two of three messages."""
    connection = pika.BlockingConnection(pika.URLParameters(running.url))
    channel = connection.channel()
    channel.queue_declare("orders", durable=True)
    publish(channel, 3)
    ask = Client(running.http_url)
    epoch = ask("leases/open", vhost="/", lease="etl", owner="a query", queues=["orders"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=2)
    yield ask
    channel.queue_purge("orders")
    connection.close()


def test_leases_are_shown_requeued_and_released(warren, leased):
    shown = warren("leases", "list")
    assert all(word in shown for word in ("etl", "active", "orders", "a query"))
    [found] = json.loads(warren("leases", "list", "--json"))
    assert (found["lease"], found["messages"]) == ("etl", 2)
    refused = warren("leases", "release", "etl", code=1)
    assert "2 messages checked out" in refused
    assert "2 messages of lease 'etl' are ready again" in warren("leases", "requeue", "etl")
    assert "released" in warren("leases", "release", "etl")
    assert "There are no leases" in warren("leases", "list")
    assert "no lease 'etl'" in warren("leases", "requeue", "etl", code=1)


def test_a_lease_is_released_with_what_it_holds(warren, leased):
    assert "2 messages are ready again" in warren("leases", "release", "etl", "--requeue")


def test_snapshots_are_shown_and_released(warren, running, leased):
    taken = leased("snapshots/take", vhost="/", queues=["orders"], ttl=60)
    assert taken["id"] in warren("snapshots", "list")
    for environment in ({"COLUMNS": "80"}, {"COLUMNS": "60", "FORCE_COLOR": "1"}):  # a pipe, and a narrow terminal
        done = CliRunner().invoke(app, ["snapshots", "list", "--url", running.http_url], env=environment)
        assert taken["id"] in done.output
    [found] = json.loads(warren("snapshots", "list", "--json"))
    assert found["messages"] == 3
    assert "released" in warren("snapshots", "release", taken["id"])
    assert "There are no snapshots" in warren("snapshots", "list")
    warren("leases", "release", "etl", "--requeue")


def test_a_broker_that_is_down_or_a_wrong_password_is_one_line(warren, running):
    assert "user or password is wrong" in warren("leases", "list", "--password", "wrong", code=1)
    done = CliRunner().invoke(app, ["leases", "list", "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert "warren serve" in done.output
