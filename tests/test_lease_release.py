"""Releasing a lease while a query takes it: either it is gone, or it is the query's with all that it has checked out. And
those who knew it before it was released."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.test_pipeline_api import Client, ask, channel, publish, ready, rows_of, running
from warren.kernel.journal_codec import LEASE
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


def test_the_checkpoint_of_a_released_lease_acks_nothing_of_a_new_one_of_its_name(channel, ask):
    """Both count their checkouts from 1, so an old offset may be one that the new lease knows."""
    publish(channel, 3)
    old = ask("leases/open", vhost="/", lease="etl", owner="a", queues=["orders"])
    assert ask("leases/next", vhost="/", lease="etl", epoch=old["epoch"], start=0)["end"] == 1
    ask("leases/release", vhost="/", lease="etl", requeue=True)
    gone = {"vhost": "/", "lease": "etl", "owner": "a", "queues": ["orders"], "takeover": True, "born": old["born"]}
    status, answer = ask.ask("leases/open", **gone)
    assert (status, answer["error"]) == (409, "data_loss")
    assert ask("leases/list", vhost="/")["leases"] == [], "it is not made again for who cannot use it"
    new = ask("leases/open", vhost="/", lease="etl", owner="b", queues=["orders"])
    assert ask("leases/next", vhost="/", lease="etl", epoch=new["epoch"], start=0)["end"] == 1
    status, answer = ask.ask("leases/open", **gone)
    assert (status, answer["error"]) == (409, "data_loss")
    assert "is not the one that the checkpoint knows" in answer["reason"]
    assert rows_of(ask, new["epoch"], 1, 1) == [b"0", b"1", b"2"], "its query goes on"
    assert ask("leases/open", **{**gone, "born": new["born"]})["next"] == 2, "which may also be restarted"


def test_a_lease_whose_record_was_damaged_is_gone_on_with_by_the_checkpoint_that_knows_it(running, channel, ask):
    publish(channel, 3)
    said = {"vhost": "/", "lease": "etl", "queues": ["orders"]}
    opened = ask("leases/open", **said, owner="a")
    ask("leases/next", vhost="/", lease="etl", epoch=opened["epoch"], start=0)
    store = running.broker.vhosts["/"].store
    with store.lock:
        store.ledger.put(LEASE, "etl", None)
    again = ask("leases/open", **said, owner="a", takeover=True, born=opened["born"])
    assert (again["born"], again["next"]) == (opened["born"], 2)
    assert rows_of(ask, again["epoch"], 1, 1) == [b"0", b"1", b"2"]


def test_a_lease_on_a_pattern_whose_user_is_gone_is_released_by_who_may_configure_it(running, channel, ask):
    users = running.broker.users
    for user, configure in (("ann", ""), ("bob", "^other")):
        users.add_user(user, "pw")
        users.set_permissions(user, "/", configure, "", ".*")
    ann, bob = Client(running.http_url, "ann", "pw"), Client(running.http_url, "bob", "pw")
    ann("leases/open", vhost="/", lease="etl", owner="a", pattern="order.*")
    users.delete_user("ann")
    assert bob.ask("leases/release", vhost="/", lease="etl")[0] == 403
    assert bob("leases/list", vhost="/")["leases"] == []
    assert [lease["lease"] for lease in ask("leases/list", vhost="/")["leases"]] == ["etl"]
    assert ask("leases/release", vhost="/", lease="etl") == {"requeued": 0, "released": True}
