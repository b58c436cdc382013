"""The broker's side of the pipeline over HTTP: snapshots, leases, stages, tickets. No Spark here."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from typer.testing import CliRunner

from warren.cli.main import app
from warren.testing import RunningBroker, running_broker


class Client:
    """Asks as a driver does."""

    def __init__(self, url: str, user: str = "guest", password: str = "guest", token: str | None = None) -> None:
        self.url = url
        basic = base64.b64encode(f"{user}:{password}".encode()).decode()
        self.authorization = f"Bearer {token}" if token else f"Basic {basic}"

    def __call__(self, request: str, /, **arguments: Any) -> Any:
        status, answer = self.ask(request, **arguments)
        assert status == 200, answer
        return answer

    def ask(self, request: str, /, **arguments: Any) -> tuple[int, Any]:
        call = urllib.request.Request(
            f"{self.url}/api/pipeline/{request}",
            json.dumps(arguments).encode(),
            {"Authorization": self.authorization, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(call, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


@pytest.fixture
def running() -> Iterator[RunningBroker]:
    with running_broker(http=True) as broker:
        yield broker


@pytest.fixture
def ask(running: RunningBroker) -> Client:
    return Client(running.http_url)


@pytest.fixture
def channel(running: RunningBroker) -> Iterator[Any]:
    connection = pika.BlockingConnection(pika.URLParameters(running.url))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("orders", durable=True)
    yield channel
    connection.close()


def publish(channel: Any, count: int, queue: str = "orders", *, first: int = 0, persistent: bool = True) -> list[bytes]:
    bodies = [b"%d" % number for number in range(first, first + count)]
    for body in bodies:
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2 if persistent else 1))
    return bodies


def ready(channel: Any, queue: str = "orders") -> int:
    return int(channel.queue_declare(queue, durable=True, passive=True).method.message_count)


def numbers(ranges: str) -> list[int]:
    data = base64.b64decode(ranges)
    flat = struct.unpack(f"<{len(data) // 8}Q", data)
    return [seq for first, count in zip(flat[::2], flat[1::2], strict=True) for seq in range(first, first + count)]


def rows_of(ask: Client, epoch: int, first: int, last: int, lease: str = "etl") -> list[bytes]:
    """What an executor reads of these checkouts, by files."""
    from warren.pipeline.parts import StreamPart
    from warren.pipeline.rows import read_part

    said = ask("leases/describe", vhost="/", lease=lease, epoch=epoch, first=first, last=last)
    bodies: list[bytes] = []
    for checkout in said["checkouts"]:
        for stream in checkout["streams"]:
            plan = ask(
                "leases/plan",
                ticket=said["ticket"],
                number=checkout["number"],
                sid=stream["sid"],
                first=0,
                stop=1 << 60,
            )
            found: list[bytes] = []
            for part in plan["parts"]:
                for batch in read_part(plan["root"], StreamPart.from_json(part), ["seq_id", "body"]):
                    found += batch.column("body").to_pylist()
            assert len(found) == stream["count"]
            bodies += found
    return bodies


# -- who may ask ---------------------------------------------------------------------------------------------------------


def test_nobody_is_answered_without_a_name_and_a_password(running):
    for client in (Client(running.http_url, password="wrong"), Client(running.http_url, token="abc.def")):
        status, answer = client.ask("leases/list")
        assert status == 401
        assert answer["error"] == "unauthorized"


def test_a_token_stands_for_its_user(running, ask):
    token = ask("token")["token"]
    assert Client(running.http_url, token=token)("leases/list") == {"leases": []}


def test_a_user_sees_only_the_queues_that_he_may_read(running, channel, ask):
    channel.queue_declare("secret", durable=True)
    running.broker.users.add_user("ann", "pw")
    running.broker.users.set_permissions("ann", "/", "", "", "^orders$")
    ann = Client(running.http_url, "ann", "pw")
    assert list(ann("tap/status", vhost="/", pattern=".*")["queues"]) == ["orders"]
    status, answer = ann.ask("snapshots/take", vhost="/", queues=["secret"])
    assert (status, answer["error"]) == (403, "forbidden")
    assert "secret" in answer["reason"]
    status, answer = ann.ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["secret"])
    assert status == 403


def test_a_request_that_does_not_exist_or_lacks_something_says_so(ask):
    assert ask.ask("leases/opne", vhost="/")[0] == 404
    status, answer = ask.ask("leases/open", vhost="/", lease="etl")
    assert status == 400
    assert "owner" in answer["reason"]
    status, answer = ask.ask("leases/open", vhost="/", lease="etl", owner="q", queues=["ordres"])
    assert status == 404
    assert "ordres" in answer["reason"]


def test_an_expression_that_may_take_for_ever_is_refused(ask):
    for pattern in ("(a+)+$", "(a|b*)*c", "(?:x{2,}y)+", "(.|x)*!", "(.*){12}!", ".*.*.*.*.*!", "[", "a" * 2000):
        status, answer = ask.ask("tap/status", vhost="/", pattern=pattern)
        assert (status, answer["error"]) == (400, "bad_request"), pattern
    assert ask("tap/status", vhost="/", pattern="(eu|us)[.][a-z]+(-[0-9]{4})?.*")["queues"] == {}


def test_a_lease_cannot_be_taken_over_by_who_may_not_read_what_it_holds(running, channel, ask):
    channel.queue_declare("other", durable=True)
    publish(channel, 3)
    epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0)
    running.broker.users.add_user("bob", "pw")
    running.broker.users.set_permissions("bob", "/", ".*", ".*", "^other$")
    bob = Client(running.http_url, "bob", "pw")
    status, answer = bob.ask("leases/open", vhost="/", lease="etl", owner="q2", queues=["other"], takeover=True)
    assert (status, answer["error"]) == (403, "forbidden")
    for request in ("leases/next", "leases/heartbeat", "leases/describe"):
        more = {"leases/next": {"start": 1}, "leases/describe": {"first": 1, "last": 1}}.get(request, {})
        assert bob.ask(request, vhost="/", lease="etl", epoch=epoch, **more)[0] == 403
    assert rows_of(ask, epoch, 1, 1) == [b"0", b"1", b"2"]
    assert ask("leases/heartbeat", vhost="/", lease="etl", epoch=epoch) == {"active": True}


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_checkout_is_frozen_read_as_often_as_wanted_and_acked_by_the_next_request(channel, ask):
    bodies = publish(channel, 10)
    opened = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])
    assert opened["floor"] == 0
    epoch = opened["epoch"]
    first = ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=4)
    assert (first["end"], first["rows"], first["ready"]) == (1, 4, 6)
    again = ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=100)
    assert (again["end"], again["rows"]) == (1, 4)
    assert rows_of(ask, epoch, 1, 1) == bodies[:4]
    assert rows_of(ask, epoch, 1, 1) == bodies[:4]
    second = ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=1)
    assert (second["end"], second["rows"], second["ready"]) == (2, 6, 0)
    assert rows_of(ask, epoch, 2, 2) == bodies[4:]
    idle = ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=2)
    assert (idle["end"], idle["rows"]) == (2, 0)
    status = ask("tap/status", vhost="/", queues=["orders"])["queues"]["orders"]
    assert (status["ready"], status["unacknowledged"]) == (0, 0)


def test_other_consumers_get_what_is_not_checked_out_and_a_purge_leaves_the_rest(channel, ask):
    publish(channel, 10)
    epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=4)
    _, _, body = channel.basic_get("orders", auto_ack=True)
    assert body == b"4"
    channel.queue_purge("orders")
    assert rows_of(ask, epoch, 1, 1) == [b"0", b"1", b"2", b"3"]


def test_checkouts_survive_a_restart(tmp_path):
    with running_broker(str(tmp_path), http=True) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        publish(channel, 10)
        ask = Client(broker.http_url)
        epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
        ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=4)
        connection.close()
    with running_broker(str(tmp_path), http=True) as broker:
        ask = Client(broker.http_url)
        (lease,) = ask("leases/list")["leases"]
        assert (lease["state"], lease["messages"], lease["checkouts"]) == (
            "active",
            4,
            [1],
        )  # its holder has its time again
        opened = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"], takeover=True)
        assert opened["ready"] == 6
        again = ask("leases/next", vhost="/", lease="etl", epoch=opened["epoch"], start=0)
        assert (again["end"], again["rows"]) == (1, 4)
        assert rows_of(ask, opened["epoch"], 1, 1) == [b"0", b"1", b"2", b"3"]


def test_who_opens_a_lease_fences_the_one_before(channel, ask):
    publish(channel, 3)
    first = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
    status, answer = ask.ask("leases/open", vhost="/", lease="etl", owner="q2", queues=["orders"])
    assert (status, answer["error"]) == (409, "held")
    assert "q1" in answer["reason"]
    ask("leases/open", vhost="/", lease="etl", owner="q2", queues=["orders"], takeover=True)
    for request in ("leases/next", "leases/heartbeat"):
        arguments = {"start": 0} if request == "leases/next" else {}
        status, answer = ask.ask(request, vhost="/", lease="etl", epoch=first, **arguments)
        assert (status, answer["error"]) == (409, "fenced")


def test_an_offset_that_was_settled_or_never_was_is_data_loss(channel, ask):
    publish(channel, 3)
    epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=1)
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=1, max_rows=1)
    for start in (0, 9):
        status, answer = ask.ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=start)
        assert (status, answer["error"]) == (409, "data_loss")
    status, answer = ask.ask("leases/describe", vhost="/", lease="etl", epoch=epoch, first=1, last=1)
    assert (status, answer["error"]) == (409, "data_loss")


def test_a_requeued_lease_gives_its_messages_back_in_their_place(channel, ask):
    bodies = publish(channel, 6)
    epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=3)
    status, answer = ask.ask("leases/release", vhost="/", lease="etl")
    assert status == 409
    assert "3 messages" in answer["reason"]
    assert ask("leases/requeue", vhost="/", lease="etl") == {"requeued": 3}
    assert [channel.basic_get("orders", auto_ack=True)[2] for _ in range(6)] == bodies
    assert ask("leases/release", vhost="/", lease="etl")["released"]
    assert ask("leases/list") == {"leases": []}


def test_a_lease_on_many_queues_takes_from_each(channel, ask):
    for queue in ("a.1", "a.2", "b"):
        channel.queue_declare(queue, durable=True)
        publish(channel, 4, queue, first=ord(queue[-1]) * 100)
    epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", pattern="a[.].*")["epoch"]
    first = ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=4)
    said = ask("leases/describe", vhost="/", lease="etl", epoch=epoch, first=1, last=first["end"])
    taken = {stream["queue"]: stream["count"] for stream in said["checkouts"][0]["streams"]}
    assert taken == {"a.1": 2, "a.2": 2}
    rest = ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=1)
    assert rest["rows"] == 4
    assert ready(channel, "b") == 4


def test_a_checkout_has_at_most_so_many_bytes_and_waits_for_the_least_number_of_rows(channel, ask):
    for _ in range(5):
        channel.basic_publish("", "orders", bytes(1000), pika.BasicProperties(delivery_mode=2))
    epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
    assert ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, min_rows=6)["rows"] == 0
    assert ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_bytes=2500, min_rows=5)["rows"] == 2


def test_large_and_transient_messages_are_part_of_a_checkout(channel, ask):
    bodies = [b"x" * 10_000, b"small", b"y" * 10_000, b"tiny"]
    for number, body in enumerate(bodies):
        channel.basic_publish("", "orders", body, pika.BasicProperties(delivery_mode=2 if number < 2 else 1))
    epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0)
    assert sorted(rows_of(ask, epoch, 1, 1)) == sorted(bodies)


def test_a_priority_queue_gives_the_highest_first(channel, ask):
    channel.queue_declare("urgent", durable=True, arguments={"x-max-priority": 5})
    for number in range(6):
        channel.basic_publish("", "urgent", b"%d" % number, pika.BasicProperties(delivery_mode=2, priority=number % 3))
    epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["urgent"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=2)
    assert sorted(rows_of(ask, epoch, 1, 1)) == [b"2", b"5"]


def test_a_queue_that_is_not_durable_cannot_be_leased(channel, ask):
    channel.queue_declare("fleeting", durable=False)
    status, answer = ask.ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["fleeting"])
    assert status == 400
    assert "durable" in answer["reason"]


def test_a_ticket_is_good_for_its_checkouts_only(channel, ask):
    publish(channel, 4)
    epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0, max_rows=2)
    said = ask("leases/describe", vhost="/", lease="etl", epoch=epoch, first=1, last=1)
    sid = said["checkouts"][0]["streams"][0]["sid"]
    place = {"sid": sid, "first": 0, "stop": 100}
    assert ask.ask("leases/plan", ticket=said["ticket"], number=2, **place)[0] == 403
    assert ask.ask("leases/plan", ticket=said["ticket"][:-3] + "abc", number=1, **place)[0] == 401
    assert ask.ask("leases/plan", number=1, **place)[0] == 401


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_counts_what_is_ready_and_unacked_at_one_instant_under_load(running, channel, ask):
    stop = threading.Event()

    def load() -> None:
        connection = pika.BlockingConnection(pika.URLParameters(running.url))
        busy = connection.channel()
        number = 0
        while not stop.is_set():
            busy.basic_publish("", "orders", b"x" * 50, pika.BasicProperties(delivery_mode=1 + number % 2))
            if number % 3 == 0:
                busy.basic_get("orders", auto_ack=number % 2 == 0)
            number += 1
        connection.close()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(5):
            said = ask("snapshots/take", vhost="/", queues=["orders"], ttl=60)
            assert snapshot_rows(said) == sum(said["queues"]["orders"].values())
    finally:
        stop.set()
        thread.join()


def snapshot_rows(said: dict[str, Any]) -> int:
    from warren.pipeline.rows import count_part
    from warren.pipeline.store_view import open_view

    view = open_view(said["path"], said["vhost"])
    return sum(count_part(view.root, part) for part in view.parts({"queuePattern": ".*"}))


def test_a_snapshot_is_listed_kept_alive_and_released(channel, ask):
    publish(channel, 3)
    said = ask("snapshots/take", vhost="/", ttl=60)
    (listed,) = ask("snapshots/list")["snapshots"]
    assert (listed["id"], listed["messages"]) == (said["id"], 3)
    before = listed["until"]
    time.sleep(0.01)
    assert ask("snapshots/heartbeat", vhost="/", id=said["id"])["until"] > before
    assert ask("snapshots/release", vhost="/", id=said["id"]) == {"released": True}
    assert ask("snapshots/list") == {"snapshots": []}
    assert ask.ask("snapshots/heartbeat", vhost="/", id=said["id"])[0] == 404


def test_the_list_has_the_snapshots_that_are_the_users_own_or_of_queues_that_he_may_read(running, channel, ask):
    channel.queue_declare("secret", durable=True)
    running.broker.users.add_user("ann", "pw")
    running.broker.users.set_permissions("ann", "/", "", "", "^orders$")
    ann = Client(running.http_url, "ann", "pw")
    both = ask("snapshots/take", vhost="/", queues=["orders", "secret"], ttl=60)["id"]
    readable = ask("snapshots/take", vhost="/", queues=["orders"], ttl=60)["id"]
    own = ann("snapshots/take", vhost="/", queues=["orders"], ttl=60)["id"]

    def listed(client: Client) -> list[str]:
        return [one["id"] for one in client("snapshots/list")["snapshots"]]

    assert (listed(ask), listed(ann)) == ([both, readable, own], [readable, own])
    running.broker.users.set_permissions("ann", "/", "", "", "^other$")
    assert listed(ann) == [own]


def test_the_snapshots_of_a_group_are_released_together_and_only_those_of_the_user(running, channel, ask):
    running.broker.users.add_user("ann", "pw")
    running.broker.users.set_permissions("ann", "/", "", "", ".*")
    ann = Client(running.http_url, "ann", "pw")
    for client, group in ((ask, "job"), (ask, "job"), (ask, None), (ann, "job")):
        client("snapshots/take", vhost="/", queues=["orders"], ttl=60, group=group)
    assert ask("snapshots/release", vhost="/", group="job") == {"released": 2}
    left = [(one["user"], one["group"]) for one in ask("snapshots/list")["snapshots"]]
    assert left == [("guest", None), ("ann", "job")]
    assert ask("snapshots/release", vhost="/", group="job") == {"released": 0}
    for wrong in ({}, {"id": "x", "group": "job"}):
        assert ask.ask("snapshots/release", vhost="/", **wrong)[0] == 400


def test_a_snapshot_has_the_queues_that_were_asked_for_and_no_others(channel, ask):
    channel.queue_declare("other", durable=True)
    publish(channel, 3)
    publish(channel, 5, "other")
    said = ask("snapshots/take", vhost="/", queues=["orders"], ttl=60)
    assert list(said["queues"]) == ["orders"]
    assert snapshot_rows(said) == 3


# -- stages ------------------------------------------------------------------------------------------------------------


def stage(
    root: str, rows: list[tuple[str, str, bytes]], writer: str = "guest:w", batch: str = "0", **place: int
) -> str:
    """As the data server does it: (exchange, routing key, body)."""
    from warren.queueing.properties import build_head
    from warren.storage.stage_file import StageWriter

    made = StageWriter(root, writer, batch, place.get("partition", 0), place.get("attempt", 0))
    heads = [build_head(exchange, key, {"delivery_mode": 2}) for exchange, key, _ in rows]
    made.add(heads, [body for _, _, body in rows], {exchange for exchange, _, _ in rows})
    made.finish()
    return made.name


@pytest.fixture
def root(running: RunningBroker) -> str:
    return str(running.broker.vhosts["/"].store.root)


def drain(channel: Any, queue: str = "orders") -> list[bytes]:
    bodies = []
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return bodies
        bodies.append(body)


def test_a_decided_batch_is_published_once_however_often_it_is_decided(channel, ask, root):
    names = [stage(root, [("", "orders", b"%d-%d" % (part, n)) for n in range(5)], partition=part) for part in range(2)]
    orphan = stage(root, [("", "orders", b"of a killed attempt")], attempt=1)
    done = ask("stages/decide", vhost="/", writer="w", batch="0", stages=names)
    assert done == {"decided": True, "duplicate": False, "released": True, "count": 10, "unroutable": 0}
    again = stage(root, [("", "orders", b"repeated")])
    assert ask("stages/decide", vhost="/", writer="w", batch="0", stages=[again])["duplicate"]
    assert sorted(drain(channel)) == sorted(b"%d-%d" % (part, n) for part in range(2) for n in range(5))
    assert [name for _, _, names in os.walk(os.path.join(root, "stages")) for name in names] == [], orphan


def test_stages_go_through_exchanges_with_their_properties(channel, ask, root):
    channel.exchange_declare("topics", "topic", durable=True)
    channel.queue_bind("orders", "topics", "eu.#")
    name = stage(root, [("topics", "eu.paid", b"1"), ("topics", "us.paid", b"2"), ("topics", "eu", b"3")])
    ask("stages/decide", vhost="/", writer="w", batch="7", stages=[name])
    method, properties, body = channel.basic_get("orders", auto_ack=True)
    assert (method.exchange, method.routing_key, properties.delivery_mode, body) == ("topics", "eu.paid", 2, b"1")
    assert drain(channel) == [b"3"]


def test_a_batch_to_an_exchange_that_is_not_there_or_not_allowed_publishes_nothing(running, channel, ask, root):
    names = [stage(root, [("", "orders", b"1")]), stage(root, [("nowhere", "k", b"2")], partition=1)]
    status, answer = ask.ask("stages/decide", vhost="/", writer="w", batch="0", stages=names)
    assert (status, answer["error"]) == (404, "not_found")
    assert "nowhere" in answer["reason"]
    running.broker.users.add_user("ann", "pw")
    running.broker.users.set_permissions("ann", "/", "", "^mine$", ".*")
    name = stage(root, [("", "orders", b"1")], writer="ann:w")
    status, answer = Client(running.http_url, "ann", "pw").ask(
        "stages/decide", vhost="/", writer="w", batch="0", stages=[name]
    )
    assert (status, answer["error"]) == (403, "forbidden")
    assert drain(channel) == []


def test_stages_are_of_their_writer_and_nowhere_else(running, channel, ask, root):
    name = stage(root, [("", "orders", b"1")], writer="guest:other")
    for request in ("stages/drop", "stages/decide"):
        batch = {"batch": "0"} if request == "stages/decide" else {}
        assert ask.ask(request, vhost="/", writer="w", stages=[name], **batch)[0] == 400
    assert ask.ask("stages/decide", vhost="/", writer="w", batch="0", stages=["../../x.stage"])[0] == 409
    twice = stage(root, [("", "orders", b"2")])
    assert ask.ask("stages/decide", vhost="/", writer="w", batch="0", stages=[twice, twice])[0] == 400
    assert "/stages/%2E%2E/" in os.path.join(root, "stages", stage(root, [], writer="..", batch="../.."))
    assert ask("stages/decide", vhost="/", writer="w", batch="0", stages=[twice])["count"] == 1
    running.broker.users.add_user("eve", "pw")
    running.broker.users.set_permissions("eve", "/", ".*", ".*", ".*")
    eve = Client(running.http_url, "eve", "pw")
    assert eve("stages/decide", vhost="/", writer="w", batch="9", stages=[])["count"] == 0  # a writer of her own
    assert ask("stages/status", vhost="/", writer="w") == {"decided": "0", "pending": 0, "unroutable": 0}
    assert drain(channel) == [b"2"]


def test_a_full_queue_that_rejects_holds_the_batch_back_until_there_is_room(channel, ask, root):
    channel.queue_declare("small", durable=True, arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
    name = stage(root, [("", "small", b"%d" % n) for n in range(7)])
    taken: list[bytes] = []
    result: list[Any] = []
    decide = threading.Thread(
        target=lambda: result.append(ask("stages/decide", vhost="/", writer="w", batch="0", stages=[name]))
    )
    decide.start()
    deadline = time.monotonic() + 30
    while len(taken) < 7 and time.monotonic() < deadline:
        taken += drain(channel, "small")
        time.sleep(0.01)
    decide.join()
    assert taken == [b"%d" % n for n in range(7)]
    assert result[0]["released"]


def test_a_release_that_was_cut_off_goes_on_where_it_was(tmp_path, monkeypatch):
    from warren.vhost import stages

    monkeypatch.setattr(stages, "_ROWS", 10)
    with running_broker(str(tmp_path), http=True) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        channel.queue_declare("small", durable=True, arguments={"x-max-length": 25, "x-overflow": "reject-publish"})
        root = str(broker.broker.vhosts["/"].store.root)
        name = stage(root, [("", "small", b"%d" % n) for n in range(60)])
        monkeypatch.setattr(stages, "_WAIT_SECONDS", 0.3)
        done = Client(broker.http_url)("stages/decide", vhost="/", writer="w", batch="0", stages=[name])
        assert not done["released"]
        connection.close()
    with running_broker(str(tmp_path), http=True) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        taken: list[bytes] = []
        deadline = time.monotonic() + 30
        while len(taken) < 60 and time.monotonic() < deadline:
            taken += drain(channel, "small")
            time.sleep(0.01)
        assert taken == [b"%d" % n for n in range(60)]
        connection.close()


def test_staged_rows_for_a_delayed_exchange_wait_their_time(channel, ask, root):
    from warren.queueing.properties import build_head
    from warren.storage.stage_file import StageWriter

    channel.exchange_declare("later", "x-delayed-message", durable=True, arguments={"x-delayed-type": "fanout"})
    channel.queue_bind("orders", "later")
    made = StageWriter(root, "guest:w", "0", 0, 0)
    heads = [build_head("later", "k", {"delivery_mode": 2, "headers": {"x-delay": delay}}) for delay in (300, 1)]
    made.add(heads, [b"second", b"first"], {"later"})
    made.finish()
    ask("stages/decide", vhost="/", writer="w", batch="0", stages=[made.name])
    taken: list[bytes] = []
    deadline = time.monotonic() + 30
    while len(taken) < 2 and time.monotonic() < deadline:
        taken += drain(channel)
        time.sleep(0.01)
    assert taken == [b"first", b"second"]


# -- the data server -----------------------------------------------------------------------------------------------------


def test_the_data_server_comes_back_on_the_port_that_tasks_know(tmp_path):
    """Unless somebody else took it meanwhile, as a test that runs beside this one may do once, but not again and again."""
    urls: list[str] = []
    for _ in range(6):
        with running_broker(str(tmp_path), http=True) as broker:
            urls.append(Client(broker.http_url)("stages/open", vhost="/", writer="w")["data_url"])
        if urls[-2:-1] == urls[-1:]:
            return
    raise AssertionError(f"a port of its own each time: {urls}")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for certificates: apt-get install openssl")
def test_http_is_over_tls_with_the_certificate_of_amqp(tmp_path):
    import pyarrow as pa

    from warren.pipeline.broker_client import BrokerClient, Credentials
    from warren.pipeline.sink import SinkSettings, _Stages

    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", "key.pem", "-out", "cert.pem", *subject]
    subprocess.run(made, check=True, capture_output=True, cwd=tmp_path)
    tls = {"certfile": str(tmp_path / "cert.pem"), "keyfile": str(tmp_path / "key.pem"), "port": 0, "http": True}
    with running_broker(http=True, tls=tls) as broker:
        assert broker.http_url.startswith("https://")
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        publish(channel, 3)
        connection.close()
        guest = Credentials(user="guest", password="guest")
        with BrokerClient(broker.http_url, guest, ca_file=str(tmp_path / "cert.pem")) as client:
            opened = client.call("leases/open", vhost="/", lease="etl", owner="q", queues=["orders"])
            client.call("leases/next", vhost="/", lease="etl", epoch=opened["epoch"], start=0)
            said = client.call("leases/describe", vhost="/", lease="etl", epoch=opened["epoch"], first=1, last=1)
            assert said["data_url"].startswith("https://")
            place = {"number": 1, "sid": said["checkouts"][0]["streams"][0]["sid"], "first": 0, "stop": 1 << 60}
            asked = {**place, "columns": ["body"]}
            batches = list(client.stream(said["data_url"], "/checkouts/read", said["ticket"], asked))
        assert [body for batch in batches for body in batch.column("body").to_pylist()] == [b"0", b"1", b"2"]
        options = {"url": broker.http_url, "routingKey": "orders", "caFile": str(tmp_path / "cert.pem")}
        driver = _Stages(SinkSettings.from_options(options), "w", guest)
        task = pickle.loads(pickle.dumps(driver))
        rows = pa.RecordBatch.from_pydict({"body": [b"3", b"4"]})
        driver.decide("q.0", [task.stage("q.0", 0, 1, iter([rows]))])
        assert broker.queue_info("orders")["messages_ready"] == 2
        commands = (["leases", "list"], ["snapshots", "list"], ["leases", "release", "etl", "--requeue"])
        for command in commands:
            done = CliRunner().invoke(app, [*command, "--url", broker.http_url])
            assert (done.exit_code, "--ca-file" in done.output) == (1, True), done.output
        for command in commands:
            trusted = ["--url", broker.http_url, "--ca-file", str(tmp_path / "cert.pem")]
            done = CliRunner().invoke(app, [*command, *trusted])
            assert done.exit_code == 0, done.output


# -- what a rival found --------------------------------------------------------------------------------------------------


def test_a_query_of_a_released_lease_does_not_fit_a_new_one_of_its_name(channel, ask):
    publish(channel, 3)
    old = ask("leases/open", vhost="/", lease="etl", owner="a", queues=["orders"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=old, start=0)
    ticket = ask("leases/describe", vhost="/", lease="etl", epoch=old, first=1, last=1)["ticket"]
    ask("leases/release", vhost="/", lease="etl", requeue=True)
    publish(channel, 3, first=3)
    new = ask("leases/open", vhost="/", lease="etl", owner="b", queues=["orders"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=new, start=0)
    assert ask.ask("leases/next", vhost="/", lease="etl", epoch=old, start=1)[0] == 409
    assert ask.ask("leases/plan", ticket=ticket, number=1, sid=256, first=0, stop=9)[0] == 409
    assert len(rows_of(ask, new, 1, 1)) == 6


def test_the_head_of_a_row_decides_where_it_goes_and_who_may_send_it_there(running, channel, ask):
    """A user who may write to one exchange stages rows whose heads name others."""
    import pyarrow as pa

    from warren.pipeline.broker_client import BrokerClient
    from warren.queueing.properties import build_head

    channel.exchange_declare("mine", "fanout", durable=True)
    running.broker.users.add_user("eve", "pw")
    running.broker.users.set_permissions("eve", "/", "", "^mine$", "")
    eve = Client(running.http_url, "eve", "pw")
    opened = eve("stages/open", vhost="/", writer="w", batch="0")
    head = build_head("", "orders", {"delivery_mode": 2})
    rows = pa.RecordBatch.from_pydict(
        {"head": pa.array([head], pa.binary()).dictionary_encode(), "body": [b"smuggled"]}
    )
    with BrokerClient(running.http_url) as client:
        query = {"batch": "0", "partition": 0, "attempt": 0}
        staged = client.upload(opened["data_url"], "/stages", opened["ticket"], [rows], query)
    status, answer = eve.ask("stages/decide", vhost="/", writer="w", batch="0", stages=[staged["name"]])
    assert (status, answer["error"]) == (403, "forbidden")
    assert drain(channel) == []


@pytest.mark.parametrize("columns", ["other", "null head", "null in the dictionary", "null body"])
def test_rows_that_are_none_are_not_staged(running, ask, columns):
    import pyarrow as pa

    from warren.pipeline.broker_client import BrokerClient
    from warren.pipeline.errors import BrokerError

    head = pa.array([b"head"], pa.binary()).dictionary_encode()
    bodies = pa.array([None if columns == "null body" else b"body"], pa.binary())
    if columns == "null head":
        head = pa.array([None], pa.binary()).dictionary_encode()
    elif columns == "null in the dictionary":
        head = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array([None], pa.binary()))
    elif columns == "other":
        head = head.dictionary_decode()
    rows = pa.RecordBatch.from_arrays([head, bodies], ["head", "body"])
    opened = ask("stages/open", vhost="/", writer="w", batch="0")
    query = {"batch": "0", "partition": 0, "attempt": 0}
    with BrokerClient(running.http_url) as client, pytest.raises(BrokerError, match="to be staged") as refused:
        client.upload(opened["data_url"], "/stages", opened["ticket"], [rows], query)
    assert refused.value.code == "bad_request"


def test_a_ticket_of_one_queue_does_not_read_the_journal_records_of_another(running, channel, ask):
    import base64 as b64

    from warren.pipeline.broker_client import BrokerClient
    from warren.pipeline.errors import PipelineError
    from warren.pipeline.store_view import open_view

    channel.queue_declare("secret", durable=True)
    channel.basic_publish("", "secret", b"TOP SECRET", pika.BasicProperties(delivery_mode=2))
    publish(channel, 1)
    whole = ask("snapshots/take", vhost="/", ttl=60)
    [theirs] = open_view(whole["path"], "/").parts({"queue": "secret"})
    mine = ask("snapshots/take", vhost="/", queues=["orders"], ttl=60)
    [own] = open_view(mine["path"], "/").parts({"queue": "orders"})
    forged = {**own.to_json(), "rows": b64.b64encode(theirs.rows).decode(), "only": None}
    assert theirs.rows
    with BrokerClient(running.http_url) as client, pytest.raises(PipelineError):
        list(client.stream(mine["data_url"], "/snapshots/read", mine["ticket"], {"part": forged, "columns": ["body"]}))


def test_a_topic_that_the_user_may_not_write_to_is_refused_in_a_batch_too(running, channel, ask, root):
    channel.exchange_declare("news", "topic", durable=True)
    running.broker.users.add_user("ann", "pw")
    running.broker.users.set_permissions("ann", "/", "", "^news$", "")
    running.broker.users.set_topic_permissions("ann", "/", "news", "^ann[.]", ".*")
    ann = Client(running.http_url, "ann", "pw")
    good, bad = (stage(root, [("news", key, b"x")], writer="ann:w") for key in ("ann.1", "boss.1"))
    status, answer = ann.ask("stages/decide", vhost="/", writer="w", batch="0", stages=[bad])
    assert (status, answer["error"]) == (403, "forbidden")
    assert "boss.1" in answer["reason"]
    assert ann("stages/decide", vhost="/", writer="w", batch="1", stages=[good])["count"] == 1


def test_wrong_types_and_large_bodies_are_refused_at_once(running, channel, ask):
    assert ask.ask("leases/open", vhost="/", lease=["x"], owner="a", queues=["orders"])[0] == 400
    assert ask.ask("leases/next", vhost="/", lease="x", epoch=1, start="a")[0] in (400, 404)
    request = urllib.request.Request(f"{running.http_url}/api/pipeline/leases/plan", b" " * 100_000)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    with caught.value as error:
        assert error.code == 400
    token = ask("token")["token"]
    assert Client(running.http_url, token=token).ask("token")[0] == 403


def test_a_queue_that_is_down_is_not_taken_for_a_deleted_one(running, channel, ask):
    publish(channel, 3)
    epoch = ask("leases/open", vhost="/", lease="etl", owner="a", pattern=".*")["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0)
    vhost = running.broker.vhosts["/"]
    for _ in range(6):
        running.call(lambda: vhost.queue_crashed(vhost.queues["orders"], RuntimeError("a test")))
    status, answer = ask.ask("leases/describe", vhost="/", lease="etl", epoch=epoch, first=1, last=1)
    assert (status, answer["error"]) == (503, "unavailable")


def test_a_queue_that_expires_when_unused_stays_while_a_lease_is_on_it(running, channel, ask):
    channel.queue_declare("brief", durable=True, arguments={"x-expires": 1500})
    channel.basic_publish("", "brief", b"x", pika.BasicProperties(delivery_mode=2))
    epoch = ask("leases/open", vhost="/", lease="etl", owner="a", queues=["brief"])["epoch"]
    ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        ask("leases/heartbeat", vhost="/", lease="etl", epoch=epoch)
        time.sleep(0.1)
    assert rows_of(ask, epoch, 1, 1) == [b"x"]


def test_a_backup_has_the_stages_that_were_decided(running, channel, root, tmp_path):
    stage(root, [("", "orders", b"1")])
    target = running.broker.vhosts["/"].store.snapshot(str(tmp_path / "copy"))
    assert len(os.listdir(os.path.join(target, "stages", "guest%3Aw"))) == 1


@pytest.mark.parametrize("request_name", ["leases/describe", "snapshots/take"])
def test_a_directory_of_the_same_name_elsewhere_is_not_taken_for_the_brokers(tmp_path, monkeypatch, request_name):
    from warren.pipeline.broker_client import sees_files

    for place in ("broker", "spark"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "broker")
    with running_broker("data", http=True) as broker:
        ask = Client(broker.http_url)
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("orders", durable=True)
            publish(channel, 3)
        if request_name == "leases/describe":
            epoch = ask("leases/open", vhost="/", lease="etl", owner="q1", queues=["orders"])["epoch"]
            ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0)
            said = ask(request_name, vhost="/", lease="etl", epoch=epoch, first=1, last=1)
            root = said["root"]
        else:
            said = ask(request_name, vhost="/", queues=["orders"])
            root = os.path.join(said["path"], "vhosts", os.listdir(os.path.join(said["path"], "vhosts"))[0])
        shutil.copytree(tmp_path / "broker" / "data" / "vhosts", tmp_path / "spark" / "data" / "vhosts")
        monkeypatch.chdir(tmp_path / "spark")
        assert os.path.isabs(root)
        assert sees_files(root, said["host"])
        assert not sees_files(root.replace("/broker/", "/spark/"), said["host"])
        assert not sees_files(os.path.relpath(root, tmp_path / "broker"), said["host"])
