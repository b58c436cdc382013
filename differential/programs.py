"""Programs: sequences of AMQP methods over two connections with two channels each.

Rules:

1. A program is made from a seed alone, and is the same on every machine.
2. Names come from small pools, so that steps meet: the queue that one step deletes is what another consumes from.
3. About one step in seven is wrong on purpose. The runner opens again what an error closed, unless a step is `bare`.
4. Nothing depends on time: a time to live is 0 or an hour.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from warren.amqp.methods import BY_NAME

QUEUES = ("q1", "q2", "q3", "q4")
EXCHANGES = ("x1", "x2", "x3")
BUILT_IN = ("", "amq.direct", "amq.fanout", "amq.topic", "amq.headers", "amq.match")
KEYS = ("q1", "q2", "a.b", "a", "a.b.c", "", "#", "a.*", "*.b.#")
TYPES = ("direct", "fanout", "topic", "headers")
HOUR = 3_600_000

# What only a broker sends.
_FROM_BROKER = {
    "connection.start",
    "connection.secure",
    "connection.tune",
    "connection.open-ok",
    "connection.blocked",
    "connection.unblocked",
    "connection.update-secret-ok",
    "basic.return",
    "basic.deliver",
    "basic.get-ok",
    "basic.get-empty",
}
_ANSWERS_OF_CLIENTS = {
    "connection.start-ok",
    "connection.secure-ok",
    "connection.tune-ok",
    "connection.close-ok",
    "channel.close-ok",
    "channel.flow-ok",
    "basic.cancel-ok",
}
CLIENT_METHODS = tuple(
    name for name in BY_NAME if name not in _FROM_BROKER and (not name.endswith("-ok") or name in _ANSWERS_OF_CLIENTS)
)


@dataclass(frozen=True)
class Step:
    """One thing that a client does.

    `method` is a method of AMQP; or "raw": a method frame with arguments["payload"]; "frame": any frame, with kind and
    payload; "drop": the connection is lost.
    """

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    channel: int = 1
    connection: int = 0
    properties: dict[str, Any] | None = None  # of basic.publish
    body: bytes = b""
    # A delivery_tag may be "oldest", "second" or "newest" of the deliveries that wait; there is no step when none does.
    times: int = 1  # so many publishes in one write
    bare: bool = False  # on whatever there is: nothing is opened for it

    def source(self) -> str:
        """As Python.

        >>> Step("queue.purge", {"queue": "q1"}, channel=2).source()
        "Step('queue.purge', {'queue': 'q1'}, channel=2)"
        """
        parts = [repr(self.method)]
        if self.arguments:
            parts.append(repr(self.arguments))
        for name, default in (
            ("channel", 1),
            ("connection", 0),
            ("properties", None),
            ("body", b""),
            ("times", 1),
            ("bare", False),
        ):
            if (value := getattr(self, name)) != default:
                parts.append(f"{name}={value!r}")
        return f"Step({', '.join(parts)})"


Program = list[Step]
Arguments = dict[str, Any]
Choices = tuple[tuple[int, Callable[[], Step]], ...]  # with their weights


class Maker:
    """Makes one program."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(f"differential {seed}")
        # Most programs are of a client that knows its trade, on one channel: they get far. The others try everything.
        self._calm = self._random.random() < 0.6
        # Of those, some are about dead letters: every queue sends its own somewhere.
        self._letters = self._calm and self._random.random() < 0.35
        # What a calm program knows of: it declared these.
        self._queues: list[str] = []
        self._exchanges: list[str] = ["amq.direct", "amq.fanout", "amq.topic", "amq.headers"]
        self._consumers: list[str] = []
        self._is_tx = False

    def program(self) -> Program:
        chance = self._random
        setup = [self._random_of(self._setup) for _ in range(chance.randint(1, 5))]
        if self._calm:
            setup = [self._own_queue(name) for name in chance.choice((QUEUES[:2], QUEUES[:3], QUEUES))]
            setup += [self._own_exchange(name) for name in EXCHANGES if self._flip(0.4)]
            setup += [self._bind() for _ in range(chance.randint(0, 4))]
            if self._flip(0.3):
                setup.append(self._mode())
        length = chance.randint(10, 40) if self._calm else chance.randint(3, 12)
        steps = [*setup, *(self._random_of(self._work if self._calm else self._actions) for _ in range(length))]
        return [self._numbered(position, step) for position, step in enumerate(steps)]

    def _numbered(self, position: int, step: Step) -> Step:
        """Every publish has a body of its own."""
        if step.method != "basic.publish":
            return step
        body = f"m{position}".encode() + b"." * self._random.choice((0, 0, 0, 5, 50))
        return Step(
            step.method, step.arguments, step.channel, step.connection, step.properties, body, step.times, step.bare
        )

    def _random_of(self, choices: Choices) -> Step:
        weights = [weight for weight, _ in choices]
        return self._random.choices([make for _, make in choices], weights)[0]()

    # -- values ------------------------------------------------------------------------------------------------------

    def _where(self) -> tuple[int, int]:
        """Channel and connection. Mostly the same: steps that never meet find nothing."""
        chance = self._random
        if self._calm:
            return 1, 0 if self._flip(0.93) else 1
        return chance.choice((1, 1, 1, 2)), chance.choice((0, 0, 0, 0, 1))

    def _step(self, method: str, /, **arguments: Any) -> Step:
        return Step(method, {name: value for name, value in arguments.items() if value}, *self._where())

    def _flip(self, probability: float) -> bool:
        return self._random.random() < probability

    def _wrong(self, probability: float) -> bool:
        """Is it time for a mistake?"""
        return self._flip(probability / 8 if self._calm else probability)

    def _queue(self) -> str:
        if self._calm and self._flip(0.98):
            return self._random.choice((*self._queues, "q1"))
        if self._wrong(0.06):
            return self._random.choice(("", "missing", "amq.bad", "amq.rabbitmq.reply-to"))
        return self._random.choice((*QUEUES, "q1", "q1", "q2"))

    def _exchange(self) -> str:
        if self._calm and self._flip(0.98):
            return self._random.choice(self._exchanges)
        if self._wrong(0.06):
            return self._random.choice(("missing", "amq.bad", "amq.rabbitmq.log"))
        return self._random.choice((*EXCHANGES, *EXCHANGES, *BUILT_IN))

    def _key(self) -> str:
        if self._calm:
            return self._random.choice(("a", "a", "a.b", "#"))
        return self._random.choice(KEYS)

    def _tag(self) -> int | str:
        """A number, or which of the deliveries that wait: the runner knows them."""
        if self._flip(0.95 if self._calm else 0.4):
            return self._random.choice(("oldest", "oldest", "second", "newest"))
        return self._random.choice((1, 1, 1, 2, 2, 3, 4, 0, 99, 1 << 40))

    def _consumer(self) -> str:
        if self._calm:
            return self._random.choice(self._consumers or ["c1"])
        return self._random.choice(("c1", "c1", "c2", "c3", ""))

    def _queue_arguments(self) -> Arguments:
        chance = self._random
        if self._flip(0.2 if self._letters else 0.45):
            return {}
        good: list[Arguments] = [
            {"x-max-length": chance.choice((0, 1, 2))},
            {"x-max-length-bytes": chance.choice((0, 4, 10))},
            {"x-max-length": 1, "x-overflow": "reject-publish"},
            {"x-max-length": 1, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": ""},
            {"x-max-length": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q2"},
            {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": chance.choice(QUEUES)},
            {"x-dead-letter-exchange": chance.choice(EXCHANGES)},
            {"x-message-ttl": 0, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": chance.choice(QUEUES)},
            {"x-dead-letter-exchange": "amq.fanout"},
            {"x-message-ttl": 0},
            {"x-message-ttl": HOUR},
            {"x-expires": HOUR},
            {"x-max-priority": chance.choice((1, 5))},
            {"x-single-active-consumer": True},
            {"x-queue-type": "classic"},
            {"client-own": "anything"},
        ]
        bad: list[Arguments] = [
            {"x-max-length": -1},
            {"x-max-length": "ten"},
            {"x-max-length-bytes": -5},
            {"x-message-ttl": -1},
            {"x-message-ttl": "soon"},
            {"x-message-ttl": HOUR * 1_000_000},
            {"x-expires": 0},
            {"x-expires": -1},
            {"x-expires": "never"},
            {"x-max-priority": -1},
            {"x-max-priority": 256},
            {"x-max-priority": 0},
            {"x-max-priority": "high"},
            {"x-overflow": "explode"},
            {"x-overflow": 1},
            {"x-dead-letter-exchange": 7},
            {"x-dead-letter-routing-key": "k"},
            {"x-dead-letter-routing-key": 7, "x-dead-letter-exchange": ""},
            {"x-dead-letter-exchange": "missing"},
            {"x-single-active-consumer": "yes"},
            {"x-queue-mode": "eager"},
            {"x-queue-type": "heap"},
            {"x-queue-type": 5},
            {"x-no-such-argument": 1},
        ]
        if self._letters:
            good = [arguments for arguments in good if "x-dead-letter-exchange" in arguments]
        return dict(chance.choice(bad if self._wrong(0.2) else good))

    def _properties(self) -> Arguments:
        chance = self._random
        properties: Arguments = {}
        if self._flip(0.5):
            properties["delivery_mode"] = chance.choice((0, 3) if self._wrong(0.03) else (1, 2, 2, 2))
        if self._flip(0.15):
            properties["priority"] = chance.choice((0, 1, 2, 9, 255))
        if self._flip(0.15):
            bad = ("-1", "soon", "", "5000000000000", "1.5", " 1", "+1", "007")
            properties["expiration"] = chance.choice(bad if self._wrong(0.4) else ("0", "0", str(HOUR)))
        if self._flip(0.3):
            properties["headers"] = self._headers()
        if self._flip(0.05):
            properties["user_id"] = "nobody" if self._wrong(0.5) else "guest"
        if self._flip(0.2):
            properties.update(
                content_type="text/plain", correlation_id="c", message_id="m", timestamp=1_700_000_000, app_id="a"
            )
        if self._flip(0.03):
            properties["reply_to"] = "amq.rabbitmq.reply-to" if self._wrong(0.5) else "q1"
        return properties

    def _headers(self) -> Arguments:
        bad: tuple[Arguments, ...] = ({"CC": "q2"}, {"CC": [1]}, {"BCC": 5}, {"x-death": "not an array"})
        good: tuple[Arguments, ...] = (
            {"a": 1},
            {"a": 1, "b": "two"},
            {"CC": ["q2"]},
            {"CC": ["q2", "q3"]},
            {"CC": ["q2"], "BCC": ["q4"]},
            {"BCC": ["q3", "a"]},
            {"deep": {"list": [1, "x", True, None, 2.5], "bytes": b"\xff\x00"}},
            {},
        )
        return dict(self._random.choice(bad if self._wrong(0.3) else good))

    # -- setting up --------------------------------------------------------------------------------------------------

    def _own_exchange(self, name: str) -> Step:
        self._exchanges += [name, name]
        arguments = {"alternate-exchange": self._random.choice((*EXCHANGES, "amq.fanout"))} if self._flip(0.2) else {}
        return self._step(
            "exchange.declare",
            exchange=name,
            type=self._random.choice(TYPES),
            durable=self._flip(0.5),
            auto_delete=self._flip(0.1),
            internal=self._flip(0.05),
            arguments=arguments,
        )

    def _own_queue(self, name: str) -> Step:
        """A queue to work with."""
        self._queues.append(name)
        return self._step(
            "queue.declare",
            queue=name,
            durable=self._flip(0.6),
            exclusive=self._flip(0.05),
            auto_delete=self._flip(0.1),
            arguments=self._queue_arguments(),
        )

    def _declare_queue(self) -> Step:
        chance = self._random
        return self._step(
            "queue.declare",
            queue=self._queue(),
            passive=self._flip(0.08),
            durable=self._flip(0.5),
            exclusive=self._flip(0.12),
            auto_delete=self._flip(0.15),
            nowait=chance.random() < 0.1,
            arguments=self._queue_arguments(),
        )

    def _declare_exchange(self) -> Step:
        chance = self._random
        arguments: Arguments = {}
        if self._flip(0.2):
            arguments = {"alternate-exchange": chance.choice((*EXCHANGES, "amq.fanout", "missing"))}
        if self._flip(0.05):
            arguments = {"alternate-exchange": 5}
        name = self._exchange() if self._flip(0.15) else chance.choice(EXCHANGES)
        return self._step(
            "exchange.declare",
            exchange=name,
            type="nonsense" if self._flip(0.05) else chance.choice(TYPES),
            passive=self._flip(0.08),
            durable=self._flip(0.5),
            auto_delete=self._flip(0.2),
            internal=self._flip(0.07),
            nowait=self._flip(0.1),
            arguments=arguments,
        )

    def _binding_arguments(self) -> Arguments:
        if self._flip(0.7):
            return {}
        return dict(
            self._random.choice(
                (
                    {"a": 1},
                    {"x-match": "any", "a": 1, "b": "no"},
                    {"x-match": "all", "a": 1, "b": "two"},
                    {"x-match": "any-with-x"},
                    {"x-match": "nonsense"},
                    {"x-match": 5},
                )
            )
        )

    def _bind(self) -> Step:
        return self._step(
            "queue.bind",
            queue=self._queue(),
            exchange=self._exchange(),
            routing_key=self._key(),
            nowait=self._flip(0.1),
            arguments=self._binding_arguments(),
        )

    def _bind_exchange(self) -> Step:
        return self._step(
            self._random.choice(("exchange.bind", "exchange.bind", "exchange.unbind")),
            destination=self._exchange(),
            source=self._exchange(),
            routing_key=self._key(),
            nowait=self._flip(0.1),
            arguments=self._binding_arguments(),
        )

    def _unbind(self) -> Step:
        return self._step(
            "queue.unbind",
            queue=self._queue(),
            exchange=self._exchange(),
            routing_key=self._key(),
            arguments=self._binding_arguments(),
        )

    # -- doing -------------------------------------------------------------------------------------------------------

    def _publish(self) -> Step:
        chance = self._random
        to_queue = self._flip(0.6)
        step = self._step(
            "basic.publish",
            exchange="" if to_queue else self._exchange(),
            routing_key=chance.choice((*(self._queues or QUEUES), "q1", "q2", *("nowhere",) * (not self._calm)))
            if to_queue
            else self._key(),
            mandatory=self._flip(0.25),
            immediate=self._wrong(0.02),
        )
        times = chance.choice((1, 1, 1, 2, 3))
        return Step(step.method, step.arguments, step.channel, step.connection, self._properties(), b"", times)

    def _get(self) -> Step:
        return self._step("basic.get", queue=self._queue(), no_ack=self._flip(0.3))

    def _consume(self) -> Step:
        arguments: Arguments = {}
        if self._flip(0.15):
            arguments = {"x-priority": "high" if self._wrong(0.2) else self._random.choice((1, 5, -1))}
        if self._calm:
            self._consumers.append(f"c{len(self._consumers) + 1}")
        return self._step(
            "basic.consume",
            queue=self._queue(),
            consumer_tag=self._consumers[-1] if self._calm else self._consumer(),
            no_local=self._flip(0.05),
            no_ack=self._flip(0.25),
            exclusive=self._wrong(0.1),
            nowait=self._flip(0.1),
            arguments=arguments,
        )

    def _cancel(self) -> Step:
        return self._step("basic.cancel", consumer_tag=self._consumer(), nowait=self._flip(0.15))

    def _settle(self) -> Step:
        name = self._random.choice(("basic.ack", "basic.ack", "basic.nack", "basic.reject"))
        if name == "basic.ack":
            return self._step(name, delivery_tag=self._tag(), multiple=self._flip(0.3))
        if name == "basic.nack":
            return self._step(name, delivery_tag=self._tag(), multiple=self._flip(0.3), requeue=self._flip(0.5))
        return self._step(name, delivery_tag=self._tag(), requeue=self._flip(0.5))

    def _recover(self) -> Step:
        return self._step(
            self._random.choice(("basic.recover", "basic.recover", "basic.recover-async")),
            requeue=not self._wrong(0.15),
        )

    def _qos(self) -> Step:
        return self._step(
            "basic.qos",
            prefetch_count=self._random.choice((0, 1, 2)),
            prefetch_size=1000 if self._wrong(0.05) else 0,
            global_=self._flip(0.3),
        )

    def _purge(self) -> Step:
        return self._step("queue.purge", queue=self._queue(), nowait=self._flip(0.1))

    def _delete(self) -> Step:
        return self._step(
            "queue.delete",
            queue=self._queue(),
            if_unused=self._flip(0.25),
            if_empty=self._flip(0.25),
            nowait=self._flip(0.1),
        )

    def _delete_exchange(self) -> Step:
        return self._step(
            "exchange.delete", exchange=self._exchange(), if_unused=self._flip(0.3), nowait=self._flip(0.1)
        )

    def _mode(self) -> Step:
        if self._calm and self._flip(0.97):
            return self._calm_mode()
        name = self._random.choice(
            ("confirm.select", "confirm.select", "tx.select", "tx.select", "tx.commit", "tx.commit", "tx.rollback")
        )
        if name == "confirm.select":
            return self._step(name, nowait=self._flip(0.15))
        return self._step(name)

    def _calm_mode(self) -> Step:
        """One of the two modes, once; then what belongs to it."""
        if self._is_tx:
            return self._step(self._random.choice(("tx.select", "tx.commit", "tx.commit", "tx.rollback")))
        self._is_tx = self._flip(0.4)
        return self._step("tx.select" if self._is_tx else "confirm.select")

    def _channel(self) -> Step:
        step = self._random_of(
            (
                (5, lambda: self._step("channel.close", reply_code=200)),
                (3, lambda: self._step("channel.flow", active=True)),
                (1, lambda: self._step("channel.flow")),
                (1, lambda: self._step("channel.open")),
                (1, lambda: self._step("channel.flow-ok", active=True)),
                (1, lambda: self._step("channel.close-ok")),
                (1, lambda: self._step("basic.cancel-ok", consumer_tag="c1")),
                (2, lambda: self._step("access.request", realm="/data", active=True, read=True)),
            )
        )
        return Step(step.method, step.arguments, step.channel, step.connection, bare=self._flip(0.25))

    def _connection(self) -> Step:
        step = self._random_of(
            (
                (3, lambda: self._step("connection.close", reply_code=200)),
                (3, lambda: self._step("drop")),
                (1, lambda: self._step("connection.update-secret", new_secret="s", reason="r")),
                (1, lambda: self._step("connection.open", virtual_host="/")),
                (1, lambda: self._step("connection.tune-ok", frame_max=131072)),
                (1, lambda: self._step("connection.start-ok", mechanism="PLAIN", response="\0guest\0guest")),
                (1, lambda: self._step("connection.secure-ok", response="x")),
                (1, lambda: self._step("connection.close-ok")),
            )
        )
        return Step(step.method, step.arguments, 0, step.connection)

    def _strange(self) -> Step:
        """What no client sends."""
        chance = self._random
        where = self._where()
        kind = chance.randrange(6)
        if kind == 0:  # unknown class, unknown method, cut short
            payload = chance.choice(("003200630000", "03e70001", "0032000a0000ff", "003c00500000", "00", "000a0032"))
            return Step("raw", {"payload": bytes.fromhex(payload)}, *where)
        if kind == 1:  # content without a method, a body without a header, an unknown kind of frame
            return Step("frame", {"kind": chance.choice((2, 3, 4, 8)), "payload": b"\0" * 14}, *where)
        if kind == 2:  # a publish without content, and then another method
            return Step("frame", {"kind": 1, "payload": bytes.fromhex("003c00280000000000")}, *where)
        if kind == 3:  # what only a broker sends
            name = chance.choice(("queue.declare-ok", "basic.get-empty", "tx.select-ok", "basic.qos-ok"))
            return Step(name, {}, *where)
        if kind == 4:  # on a channel that was never opened
            return Step("basic.qos", {"prefetch_count": 1}, channel=77, connection=where[1], bare=True)
        # a method of a channel on channel 0, and one of the connection on a channel
        if self._flip(0.5):
            return Step("queue.declare", {"queue": "q1"}, channel=0, connection=where[1], bare=True)
        return Step("connection.close", {"reply_code": 200}, *where)

    @property
    def _setup(self) -> Choices:
        return (
            (10, self._declare_queue),
            (5, self._declare_exchange),
            (5, self._bind),
            (1, self._bind_exchange),
        )

    @property
    def _work(self) -> Choices:
        return (
            (1, self._declare_queue),
            (3, self._bind),
            (2, self._bind_exchange),
            (1, self._unbind),
            (40, self._publish),
            (10, self._get),
            (14, self._consume),
            (6, self._cancel),
            (30, self._settle),
            (4, self._recover),
            (8, self._qos),
            (2, self._purge),
            (2, self._delete),
            (1, self._delete_exchange),
            (7 if self._is_tx else 1, self._mode),
            (1, self._channel),
            (1, self._connection),
        )

    @property
    def _actions(self) -> Choices:
        return (
            (6, self._declare_queue),
            (3, self._declare_exchange),
            (4, self._bind),
            (2, self._bind_exchange),
            (2, self._unbind),
            (26, self._publish),
            (12, self._get),
            (10, self._consume),
            (4, self._cancel),
            (14, self._settle),
            (4, self._recover),
            (5, self._qos),
            (3, self._purge),
            (4, self._delete),
            (3, self._delete_exchange),
            (8, self._mode),
            (4, self._channel),
            (3, self._connection),
            (3, self._strange),
        )


def make(seed: int | str) -> Program:
    """The program of a seed."""
    return Maker(seed).program()
