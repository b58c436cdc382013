"""A broker that is used by chance: publishers, consumers with all kinds of prefetch, acks, nacks, cancels, closed channels,
lost connections, one seeded step after the other, against what must hold however it went.

1. Every message is settled once: what was acked never comes again, and what was not comes until it is.
2. No message waits while a consumer that could take it is idle.
3. No consumer and no channel holds more than its prefetch.
4. A message that was never handed out is not called redelivered.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pamqp.commands
import pika
import pika.exceptions
import pytest

from tests.broker_clients import RawClient, eventually, parameters, pump, settle, unique

PASSIVE = pamqp.commands.Exchange.Declare(exchange="amq.direct", passive=True)


@dataclass
class Line:
    """A channel with its consumers."""

    connection: pika.BlockingConnection
    address: str  # by which the broker knows it
    channel: Any
    global_prefetch: int
    next_prefetch: int = 0  # of consumers to come, where the channel has a limit too
    prefetch: dict[str, int] = field(default_factory=dict)  # consumer tag -> its limit
    held: dict[int, tuple[str, bytes]] = field(default_factory=dict)  # delivery tag -> consumer, body
    without_ack: set[str] = field(default_factory=set)


class Chaos:
    def __init__(self, broker, seed: int, arguments: dict[str, Any]) -> None:
        self.broker = broker
        self.chance = random.Random(seed)
        self.single = bool(arguments.get("x-single-active-consumer"))
        self.queue = unique()
        self.publisher = RawClient(broker)
        self.publisher.open(1)
        with pika.BlockingConnection(parameters(broker)) as connection:
            connection.channel().queue_declare(self.queue, durable=True, arguments=arguments)
        self.lines: list[Line] = []
        self.published = 0
        self.done: Counter[bytes] = Counter()
        self.seen: set[bytes] = set()

    def step(self) -> None:
        actions = [self.publish, self.publish, self.open, self.consume, self.consume, self.ack, self.ack, self.ack]
        actions += [self.nack, self.cancel, self.recover, self.leave, self.lose, self.get]
        self.chance.choice(actions)()
        self.settle()

    def settle(self) -> None:
        """Until nothing moves any more: what one channel gives back another one may get."""
        self.publisher.call(1, PASSIVE, "Exchange.DeclareOk")
        for line in self.lines:
            settle(line.channel)

    # ---- what is done ----

    def publish(self) -> None:
        count = self.chance.choice([1, 3, 300])
        bodies = [b"%d" % (self.published + number) for number in range(count)]
        self.published += count
        self.publisher.publish(1, self.queue, *bodies, delivery_mode=self.chance.choice([1, 2]))

    def open(self) -> None:
        if len(self.lines) < 4:
            connection = pika.BlockingConnection(parameters(self.broker))
            limit = self.chance.choice([0, 0, 1, 7, 400])
            address = connection._impl._transport._sock.getsockname()
            line = Line(connection, f"{address[0]}:{address[1]}", connection.channel(), limit)
            if limit:
                # In this order: one for consumers to come lifts that of the channel.
                line.next_prefetch = self.chance.choice([0, 1, 2, 50])
                line.channel.basic_qos(prefetch_count=line.next_prefetch)
                line.channel.basic_qos(prefetch_count=limit, global_qos=True)
            self.lines.append(line)

    def consume(self) -> None:
        if not self.lines:
            return
        line = self.chance.choice(self.lines)
        prefetch = self.chance.choice([0, 1, 2, 50])
        without_ack = self.chance.random() < 0.1
        if line.global_prefetch:
            prefetch = line.next_prefetch
        else:
            line.channel.basic_qos(prefetch_count=prefetch)
        tag = unique("consumer")
        line.prefetch[tag] = 0 if without_ack else prefetch
        if without_ack:
            line.without_ack.add(tag)

        def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            assert tag in line.prefetch, "a message for a consumer that was cancelled"
            self.delivered(method, body)
            if without_ack:
                self.done[body] += 1
            else:
                line.held[method.delivery_tag] = (tag, body)

        priority = self.chance.choice([0, 0, 5])
        line.channel.basic_consume(
            self.queue, on_message, auto_ack=without_ack, consumer_tag=tag, arguments={"x-priority": priority}
        )

    def delivered(self, method: Any, body: bytes) -> None:
        assert not self.done[body], f"{body!r} came after it was acked"
        assert body in self.seen or not method.redelivered
        assert body not in self.seen or method.redelivered
        self.seen.add(body)

    def get(self) -> None:
        if self.lines:
            line = self.chance.choice(self.lines)
            method, _, body = line.channel.basic_get(self.queue)
            if method is not None:
                self.delivered(method, body)
                line.held[method.delivery_tag] = ("", body)

    def _settle_some(self, how: str) -> None:
        busy = [line for line in self.lines if line.held]
        if not busy:
            return
        line = self.chance.choice(busy)
        tag = self.chance.choice(list(line.held))
        multiple = self.chance.random() < 0.5
        tags = [other for other in line.held if other <= tag] if multiple else [tag]
        for other in tags:
            _, body = line.held.pop(other)
            if how == "ack":
                self.done[body] += 1
        if how == "ack":
            line.channel.basic_ack(tag, multiple=multiple)
        else:
            line.channel.basic_nack(tag, multiple=multiple, requeue=True)

    def ack(self) -> None:
        self._settle_some("ack")

    def nack(self) -> None:
        self._settle_some("nack")

    def cancel(self) -> None:
        busy = [line for line in self.lines if line.prefetch]
        if busy:
            line = self.chance.choice(busy)
            tag = self.chance.choice(list(line.prefetch))
            line.channel.basic_cancel(tag)
            del line.prefetch[tag]

    def recover(self) -> None:
        if self.lines:
            line = self.chance.choice(self.lines)
            line.held.clear()
            line.channel.basic_recover(requeue=True)

    def leave(self) -> None:
        if self.lines:
            line = self.lines.pop(self.chance.randrange(len(self.lines)))
            # pika's close cancels consumers one by one and throws away what the next one is sent meanwhile; so do it here.
            # A channel that goes with all its consumers is what `lose` is for.
            for tag in list(line.prefetch):
                line.channel.basic_cancel(tag)
                del line.prefetch[tag]
                settle(line.channel)
            line.channel.close()
            line.connection.close()

    def lose(self) -> None:
        """A connection that breaks."""
        if self.lines:
            line = self.lines.pop(self.chance.randrange(len(self.lines)))
            line.connection._impl._transport._sock.shutdown(socket.SHUT_RDWR)
            with pytest.raises(pika.exceptions.AMQPError):
                pump(line.connection, lambda: False)
            eventually(lambda: line.address not in self.broker.peers())

    def close(self) -> None:
        self.publisher.socket.close()
        while self.lines:
            self.leave()

    # ---- what must hold ----

    def check(self) -> None:
        info = self.broker.queue_info(self.queue)
        held = sum(len(line.held) for line in self.lines)
        assert info["messages_unacknowledged"] == held
        assert info["messages_ready"] == self.published - held - sum(self.done.values())
        for line in self.lines:
            own = Counter(tag for tag, _ in line.held.values() if tag)
            assert not line.global_prefetch or own.total() <= line.global_prefetch
            assert all(not limit or own[tag] <= limit for tag, limit in line.prefetch.items())
        if info["messages_ready"] and not self.single:
            for line in self.lines:
                for tag in line.prefetch:
                    assert self.is_full(line, tag), f"{info['messages_ready']} messages wait, and {tag} is idle"

    def is_full(self, line: Line, tag: str) -> bool:
        if line.global_prefetch and len(line.held) >= line.global_prefetch:
            return True
        own = sum(consumer == tag for consumer, _ in line.held.values())
        return bool(line.prefetch[tag]) and own >= line.prefetch[tag]

    def finish(self) -> None:
        while self.lines:
            self.leave()
            self.settle()
        with pika.BlockingConnection(parameters(self.broker)) as connection:
            channel = connection.channel()
            while True:
                method, _, body = channel.basic_get(self.queue, auto_ack=True)
                if method is None:
                    break
                self.delivered(method, body)
                self.done[body] += 1
            channel.queue_delete(self.queue)
        assert self.done == Counter({b"%d" % number: 1 for number in range(self.published)})


@pytest.mark.parametrize(
    "arguments",
    [{}, {"x-max-priority": 3}, {"x-single-active-consumer": True}, {"x-backing-queue": "sqlite"}],
    ids=["plain", "priority", "single active", "sqlite"],
)
def test_however_it_is_used_every_message_is_settled_once_and_none_is_stuck(
    broker, seed, scale, arguments, record_property
):
    steps = scale.scale(2000)
    chaos = Chaos(broker, seed, arguments)
    with contextlib.closing(chaos):
        for _ in range(steps):
            chaos.step()
            chaos.check()
        chaos.finish()
    record_property("messages", chaos.published)
