"""Releasing a lease while a query takes it: either it is gone, or it is the query's with all that it has checked out."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.test_pipeline_api import Client, ask, channel, publish, ready, rows_of, running
from warren.testing import RunningBroker

__all__ = ["ask", "channel", "running"]  # fixtures

SECONDS = 30


class Gate:
    """Holds the first commit that comes up, until it is let through."""

    def __init__(self, running: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        commits = running.broker.vhosts["/"].commits
        real = commits.safe

        async def safe() -> None:
            if not self.reached.is_set():
                self.reached.set()
                assert await asyncio.to_thread(self.open.wait, SECONDS)
            await real()

        monkeypatch.setattr(commits, "safe", safe)


@pytest.fixture
def checked_out(channel, ask: Client) -> int:
    """The epoch of lease etl, which has three messages."""
    publish(channel, 3)
    epoch = ask("leases/open", vhost="/", lease="etl", owner="a", pattern="orders")["epoch"]
    assert ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0)["rows"] == 3
    return epoch


def test_a_lease_that_a_query_opens_while_it_is_released_stays_with_what_it_checked_out(
    running, channel, ask, checked_out, monkeypatch
):
    gate = Gate(running, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(ask.ask, "leases/release", vhost="/", lease="etl", requeue=True)
        assert gate.reached.wait(SECONDS)
        opened = ask("leases/open", vhost="/", lease="etl", owner="b", pattern="orders", takeover=True)
        taken = ask("leases/next", vhost="/", lease="etl", epoch=opened["epoch"], start=opened["floor"])
        assert taken["rows"] == 3
        gate.open.set()
        status, answer = releasing.result(SECONDS)
    assert (status, answer["error"]) == (409, "held")
    assert "opened by another query (b) while it was released" in answer["reason"]
    [lease] = ask("leases/list", vhost="/")["leases"]
    assert (lease["owner"], lease["messages"]) == ("b", 3)
    assert rows_of(ask, opened["epoch"], taken["end"], taken["end"]) == [b"0", b"1", b"2"]
    done = ask("leases/next", vhost="/", lease="etl", epoch=opened["epoch"], start=taken["end"])
    assert done["rows"] == ready(channel) == 0, "and its next request acks them"


def test_a_lease_that_nobody_opens_meanwhile_is_released_also_by_two_at_once(
    running, channel, ask, checked_out, monkeypatch
):
    gate = Gate(running, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(ask, "leases/release", vhost="/", lease="etl", requeue=True)
        assert gate.reached.wait(SECONDS)
        assert ask("leases/release", vhost="/", lease="etl", requeue=True) == {"requeued": 0, "released": True}
        gate.open.set()
        assert releasing.result(SECONDS) == {"requeued": 3, "released": True}
    assert ask("leases/list", vhost="/")["leases"] == []
    assert ready(channel) == 3
