"""A client of AMQP 0-9-1 for many messages: of Warren, RabbitMQ and every other broker that speaks it.

Other clients make an object, a callback and often a task of each message; this one hands over what a whole receive buffer
held. It is what `warren bench` loads brokers with, and what moves a DataFrame into an exchange.

    async with await connect("amqp://guest:guest@localhost:5672/%2F") as connection:
        channel = await connection.channel()
        await channel.declare("orders")
        await channel.confirm_select()
        await channel.publish_many([b"one", b"two"], routing_key="orders", persistent=True)
        await channel.settled()  # returns when both are confirmed

Rules:

1. One consumer a channel: deliveries are told by channel, so that nothing has to look at consumer tags.
2. Who publishes awaits: `window` when confirms are counted, `writable` when the broker does not read. Both let the loop
   turn, else a fast publisher would never see its confirms.
3. A request that the broker refuses raises BrokerClosedError with its code and text, there and in everything that waits
   on the channel (or connection) that was closed for it. A lost connection raises ConnectionError in the same places.
4. A nack is no exception: what to do about it is for the publisher to say, who finds it in `Channel.nacked`.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from warren.amqp.methods import METHODS, decode, encode
from warren.errors import WarrenError
from warren.kernel.client_scanner import CONFIRMS, DELIVERIES, METHOD, ClientScanner, ack_frames
from warren.kernel.frame_writer import HEARTBEAT_FRAME, ack_frame, method_frame, publishes
from warren.queueing.properties import build_head

PLAIN_PROPERTIES = b"\0\0"  # none at all
PERSISTENT_PROPERTIES = b"\x10\x00\x02"  # delivery-mode 2 and nothing else

_FRAME_MAX = 131072
_CHANNEL_MAX = 2047
_HEARTBEAT_SECONDS = 60
_HANDSHAKE_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_BUFFER_BYTES = 512 * 1024
_HIGH_WATER, _LOW_WATER = 512 * 1024, 128 * 1024
_BODIES_AT_ONCE = 256
_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
_CAPABILITIES = {
    "authentication_failure_close": True,
    "basic.nack": True,
    "connection.blocked": True,
    "consumer_cancel_notify": True,
    "publisher_confirms": True,
}


class BrokerClosedError(WarrenError):
    """The broker closed the channel or the connection, and said why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text


@dataclass(frozen=True)
class Address:
    """Where a broker is and who comes.

    >>> Address.parse("amqp://me:s%20t@broker/orders")
    Address(host='broker', port=5672, user='me', password='s t', vhost='orders', tls=False)
    """

    host: str
    port: int
    user: str
    password: str
    vhost: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """amqp://user:password@host:port/vhost; every part may be left out. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("amqp", "amqps"):
            raise ValueError(f"{url!r} is no AMQP address; it looks like amqp://guest:guest@localhost:5672/%2F")
        tls = parts.scheme == "amqps"
        path = parts.path.removeprefix("/")
        return cls(
            parts.hostname or "localhost",
            parts.port or (5671 if tls else 5672),
            unquote(parts.username) if parts.username is not None else "guest",
            unquote(parts.password) if parts.password is not None else "guest",
            unquote(path) if path else "/",
            tls,
        )


class Batch(NamedTuple):
    """Messages that arrived together on a channel. Their delivery tags are the last ones up to `last_tag`."""

    last_tag: int
    messages: int
    body_bytes: int
    redelivered: int
    bodies: list[bytes] | None  # only where the consumer collects


def encoded_properties(**properties: Any) -> bytes:
    """Properties as `Channel.publish_many` takes them.

    >>> encoded_properties(delivery_mode=2).hex(" ")
    '10 00 02'
    """
    return build_head("", "", properties)[2:]


async def connect(url: str, *, name: str = "warren bulk client", heartbeat: int = _HEARTBEAT_SECONDS) -> Connection:
    """A connection to a broker, after its handshake. `name` is shown by the broker's management.

    Raises BrokerClosedError where the broker does not let one in, OSError where there is none.
    """
    address = Address.parse(url)
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if address.tls else None
    connection = Connection(address, name, heartbeat)
    await loop.create_connection(lambda: connection, address.host, address.port, ssl=context)
    try:
        await asyncio.wait_for(connection._opened, _HANDSHAKE_SECONDS)
    except TimeoutError:
        connection.abort()
        raise ConnectionError(f"{address.host}:{address.port} did not finish its handshake") from None
    return connection


class Connection(asyncio.BufferedProtocol):
    """One connection. It is made by `connect` and closed by `close` or the end of its `async with`."""

    def __init__(self, address: Address, name: str, heartbeat: int) -> None:
        self.frame_max = _FRAME_MAX
        self.server_properties: dict[str, Any] = {}
        self.blocked: str | None = None  # why the broker takes no publishes now
        self._address = address
        self._name = name
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._scanner = ClientScanner(0)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._channels: dict[int, Channel] = {}
        self._free_numbers = list(range(_CHANNEL_MAX, 0, -1))
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._failure: Exception | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._last_in = self._last_out = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # -- for the user ------------------------------------------------------------------------------------------------

    async def channel(self) -> Channel:
        """A new channel."""
        self.check()
        channel = Channel(self, self._free_numbers.pop())
        self._channels[channel.number] = channel
        await channel._call("channel.open")
        return channel

    async def writable(self) -> None:
        """Returns when the broker reads what is written. The loop turns once in any case."""
        if self._writable.is_set():
            await asyncio.sleep(0)
        else:
            await self._writable.wait()
        self.check()

    @property
    def is_open(self) -> bool:
        return self._failure is None and self._opened.done() and not self._closed.done()

    def count_ages(self) -> None:
        """From now on bodies of deliveries begin with eight bytes: microseconds of `time.monotonic`, as `ages` counts."""
        self._scanner.stamped = True

    @property
    def ages(self) -> list[int]:
        """How many bodies were so old when they came; `kernel.client_scanner.bucket_start` says how old, in us."""
        return self._scanner.ages_counted()

    async def close(self) -> None:
        """Says goodbye, and waits for the answer. Deliveries that are not acked go back to their queues."""
        if self.is_open:
            self._write(method_frame(0, encode("connection.close", reply_code=200, reply_text="bye")))
            await asyncio.wait([self._closed], timeout=_CLOSE_SECONDS)
        self.abort()

    def abort(self) -> None:
        """Without a word."""
        self._fail(ConnectionError("the connection was closed"))
        if self._transport is not None:
            self._transport.abort()

    # -- the transport -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_HIGH_WATER, _LOW_WATER)
        self._write(_PROTOCOL_HEADER)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        end = self._filled + nbytes
        self._last_in = time.monotonic()
        try:
            if self._buffer[:4] == b"AMQP" and not self._opened.done():
                raise ConnectionError(f"{self._address.host}:{self._address.port} does not speak AMQP 0-9-1")
            events = self._scanner.scan(self._buffer, end, time.monotonic_ns() // 1000)
        except (ValueError, ConnectionError) as error:
            self._fail(ConnectionError(f"the broker sent what AMQP 0-9-1 does not know: {error}"))
            self.abort()
            return
        begin = self._scanner.consumed
        self._filled = end - begin
        if begin and self._filled:
            self._view[: self._filled] = self._view[begin:end]
        elif self._filled == len(self._buffer):
            self._fail(ConnectionError(f"a frame of more than {self._filled} bytes"))
            self.abort()
            return
        for event in events:
            kind, number = event[0], event[1]
            if number == 0 and kind == METHOD:
                self._method(event[2], event[3], event[4])
                continue
            channel = self._channels.get(number)
            if channel is None:
                continue
            if kind == DELIVERIES:
                channel._deliveries(Batch(*event[2:]))
            elif kind == CONFIRMS:
                channel._confirms(event[2], event[3], event[4])
            elif kind == METHOD:
                channel._method(event[2], event[3], event[4])
            else:
                channel._content(event[2], event[3], event[4], event[5])

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionError(f"the connection to {self._address.host}:{self._address.port} was lost"))
        if not self._closed.done():
            self._closed.set_result(None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._last_out = time.monotonic()
            self._transport.write(data)

    def check(self) -> None:
        """Raises what closed it."""
        if self._failure is not None:
            raise self._failure

    def _method(self, class_id: int, method_id: int, payload: bytes) -> None:
        method = METHODS.get((class_id, method_id))
        if method is None:
            return
        arguments = decode(method, payload)
        if method.name == "connection.start":
            self.server_properties = arguments["server_properties"]
            login = f"\0{self._address.user}\0{self._address.password}"
            properties = {"product": "Warren", "connection_name": self._name, "capabilities": _CAPABILITIES}
            self._answer(
                "connection.start-ok",
                client_properties=properties,
                mechanism="PLAIN",
                response=login.encode(),
                locale="en_US",
            )
        elif method.name == "connection.tune":
            self._tune(arguments["channel_max"], arguments["frame_max"], arguments["heartbeat"])
        elif method.name == "connection.open-ok":
            if not self._opened.done():
                self._opened.set_result(None)
        elif method.name == "connection.close":
            self._answer("connection.close-ok")
            self._fail(BrokerClosedError(arguments["reply_code"], arguments["reply_text"]))
            if self._transport is not None:
                self._transport.close()
        elif method.name == "connection.close-ok":
            if not self._closed.done():
                self._closed.set_result(None)
        elif method.name == "connection.blocked":
            self.blocked = arguments["reason"]
        elif method.name == "connection.unblocked":
            self.blocked = None

    def _tune(self, channel_max: int, frame_max: int, heartbeat: int) -> None:
        channel_max = min(channel_max or _CHANNEL_MAX, _CHANNEL_MAX)
        self._free_numbers = list(range(channel_max, 0, -1))
        self.frame_max = min(frame_max or _FRAME_MAX, _FRAME_MAX)
        self._scanner.frame_max = self.frame_max
        beat = min(heartbeat, self._heartbeat) if heartbeat and self._heartbeat else 0
        self._answer("connection.tune-ok", channel_max=channel_max, frame_max=self.frame_max, heartbeat=beat)
        self._answer("connection.open", virtual_host=self._address.vhost)
        if beat:
            self._beat(beat)

    def _beat(self, seconds: int) -> None:
        now = time.monotonic()
        if now - self._last_in > 2.5 * seconds:
            self._fail(ConnectionError(f"the broker said nothing for {now - self._last_in:.0f} s"))
            self.abort()
            return
        if now - self._last_out >= seconds / 2:
            self._write(HEARTBEAT_FRAME)
        self._timer = self._loop.call_later(seconds / 4, self._beat, seconds)

    def _answer(self, name: str, **arguments: Any) -> None:
        self._write(method_frame(0, encode(name, **arguments)))

    def _fail(self, error: Exception) -> None:
        """The first reason is what everybody hears."""
        if self._failure is not None:
            return
        self._failure = error
        if self._timer is not None:
            self._timer.cancel()
        if not self._opened.done():
            self._opened.set_exception(error)
        self._writable.set()
        for channel in list(self._channels.values()):
            channel._fail(error)

    def _drop(self, channel: Channel) -> None:
        if self._channels.pop(channel.number, None) is not None:
            self._scanner.forget(channel.number)
            self._free_numbers.append(channel.number)


class Channel:
    """One channel, made by `Connection.channel`."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.number = number
        self.connection = connection
        self.published = 0  # in confirm mode: the number of the last publish
        self.confirmed = 0  # how many are settled, acked or nacked
        self.confirmed_up_to = 0  # and up to which number all are
        self.nacked: list[tuple[int, int]] = []  # ranges of numbers that the broker refused
        self.returned: list[tuple[bytes, bytes]] = []  # properties and bodies of mandatory ones that went nowhere
        self.delivered = self.delivered_bytes = self.redelivered = 0
        self.last_tag = self.acked_tag = 0
        self.cancelled = False  # by the broker: the queue is gone
        self.on_confirm: Callable[[], None] | None = None  # called when `confirmed` has grown
        self._answers: deque[tuple[str, asyncio.Future[dict[str, Any]]]] = deque()
        self._confirming = False
        self._failure: Exception | None = None
        self._window: asyncio.Future[None] | None = None
        self._most_open = 0
        self._ack_every = 0
        self._prefetch = 0
        self._on_batch: Callable[[Batch], None] | None = None

    # -- queues ------------------------------------------------------------------------------------------------------

    async def declare(
        self,
        queue: str,
        *,
        durable: bool = True,
        passive: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> int:
        """Make a queue if there is none; how many messages are ready in it."""
        table = dict(arguments or {})
        answer = await self._call("queue.declare", queue=queue, durable=durable, passive=passive, arguments=table)
        count: int = answer["message_count"]
        return count

    async def purge(self, queue: str) -> int:
        """How many messages are gone."""
        count: int = (await self._call("queue.purge", queue=queue))["message_count"]
        return count

    async def delete(self, queue: str) -> int:
        """The queue is gone, and so many messages with it."""
        count: int = (await self._call("queue.delete", queue=queue))["message_count"]
        return count

    # -- publishing --------------------------------------------------------------------------------------------------

    async def confirm_select(self) -> None:
        """From now on publishes are numbered, and the broker says when they are safe."""
        await self._call("confirm.select")
        self._confirming = True

    def encode(
        self,
        bodies: list[bytes],
        *,
        exchange: str = "",
        routing_key: str = "",
        properties: bytes = PLAIN_PROPERTIES,
        mandatory: bool = False,
    ) -> bytes:
        """The frames of many publishes. They belong to this channel, and may be sent any number of times."""
        names = exchange.encode("utf-8", "surrogateescape"), routing_key.encode("utf-8", "surrogateescape")
        return publishes(self.number, *names, int(mandatory), properties, bodies, self.connection.frame_max)

    def send(self, frames: bytes, count: int) -> None:
        """Publish what `encode` made of `count` messages. Await `window` or `Connection.writable` between two of them."""
        self.check()
        if self._confirming:
            self.published += count
        self.connection._write(frames)

    async def publish_many(
        self,
        bodies: Sequence[bytes],
        *,
        exchange: str = "",
        routing_key: str = "",
        persistent: bool = False,
        properties: bytes | None = None,
        mandatory: bool = False,
        window: int = 10_000,
    ) -> None:
        """Publish all of them, with at most about `window` unconfirmed in confirm mode. `settled` waits for the rest.

        await channel.publish_many([b"a", b"b"], routing_key="orders", properties=encoded_properties(priority=3))
        """
        if properties is None:
            properties = PERSISTENT_PROPERTIES if persistent else PLAIN_PROPERTIES
        step = max(1, min(_BODIES_AT_ONCE, window))
        for begin in range(0, len(bodies), step):
            part = list(bodies[begin : begin + step])
            self.send(
                self.encode(
                    part, exchange=exchange, routing_key=routing_key, properties=properties, mandatory=mandatory
                ),
                len(part),
            )
            await self.window(max(0, window - step))

    @property
    def unconfirmed(self) -> int:
        return self.published - self.confirmed

    async def window(self, most: int) -> None:
        """Returns when the broker reads, and at most `most` publishes wait for their confirms."""
        await self.connection.writable()
        if self.published - self.confirmed > most:
            assert self._window is None, "one publisher a channel"
            self._most_open = most
            self._window = asyncio.get_running_loop().create_future()
            try:
                await self._window
            finally:
                self._window = None
        self.check()

    async def settled(self) -> None:
        """Returns when every publish is confirmed; `nacked` has those that the broker refused."""
        await self.window(0)

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def qos(self, prefetch: int) -> None:
        """At most so many messages without an ack; 0: any number. For consumers to come."""
        self._prefetch = prefetch
        await self._call("basic.qos", prefetch_count=prefetch)

    async def consume(
        self,
        queue: str,
        on_batch: Callable[[Batch], None] | None = None,
        *,
        no_ack: bool = False,
        ack_every: int = 0,
        collect: bool = False,
    ) -> str:
        """Deliver to this channel; its consumer tag. `on_batch` gets what came together, with bodies if `collect`.

        With `ack_every` n each nth message is acked, and all before it with it; `ack_all` acks the rest. With 0 acks are
        the caller's: `ack`.
        """
        if self._on_batch is not None:
            raise ValueError(f"channel {self.number} has a consumer; a bulk channel has one")
        self._on_batch = on_batch or (lambda batch: None)
        self._ack_every = 0 if no_ack else ack_every
        self.connection._scanner.collect(self.number, collect)
        tag: str = (await self._call("basic.consume", queue=queue, no_ack=no_ack))["consumer_tag"]
        return tag

    async def cancel(self, consumer_tag: str) -> None:
        """Nothing more is delivered once this has returned."""
        await self._call("basic.cancel", consumer_tag=consumer_tag)
        self._on_batch = None

    def ack(self, tag: int, *, multiple: bool = True) -> None:
        """This one, and with `multiple` all before it."""
        self.check()
        self.connection._write(ack_frame(self.number, tag, multiple))

    def ack_all(self) -> None:
        """Everything that was delivered so far."""
        if self.last_tag > self.acked_tag:
            self.ack(self.last_tag)
            self.acked_tag = self.last_tag

    async def synchronise(self) -> None:
        """Returns when the broker has read everything that was sent on this channel: acks have no answers."""
        await self.qos(self._prefetch)  # any request would do; this one changes nothing

    async def close(self) -> None:
        """Deliveries that are not acked go back to their queue."""
        if self._failure is None:
            await self._call("channel.close", reply_code=200, reply_text="bye")
            self._fail(ConnectionError("the channel was closed"))
            self.connection._drop(self)

    # -- what comes --------------------------------------------------------------------------------------------------

    def _deliveries(self, batch: Batch) -> None:
        self.delivered += batch.messages
        self.delivered_bytes += batch.body_bytes
        self.redelivered += batch.redelivered
        self.last_tag = batch.last_tag
        if self._on_batch is not None:
            self._on_batch(batch)
        if self._ack_every and batch.last_tag - self.acked_tag >= self._ack_every:
            frames, self.acked_tag = ack_frames(self.number, self.acked_tag, batch.last_tag, self._ack_every)
            self.connection._write(frames)

    def _confirms(self, settled: int, up_to: int, nacked: list[tuple[int, int]]) -> None:
        self.confirmed += settled
        self.confirmed_up_to = up_to
        self.nacked += nacked
        if self.on_confirm is not None:
            self.on_confirm()
        if self._window is not None and not self._window.done() and self.published - self.confirmed <= self._most_open:
            self._window.set_result(None)

    def _content(self, method_id: int, arguments: bytes, properties: bytes, body: bytes) -> None:
        if method_id == 50:  # basic.return
            self.returned.append((properties, body))

    def _method(self, class_id: int, method_id: int, payload: bytes) -> None:
        method = METHODS.get((class_id, method_id))
        if method is None:
            return
        arguments = decode(method, payload)
        if method.name == "channel.close":
            self.connection._write(method_frame(self.number, encode("channel.close-ok")))
            self._fail(BrokerClosedError(arguments["reply_code"], arguments["reply_text"]))
            self.connection._drop(self)
        elif method.name == "basic.cancel":
            self.cancelled = True
        elif method.name == "channel.flow":
            self.connection._write(method_frame(self.number, encode("channel.flow-ok", **arguments)))
        elif self._answers and self._answers[0][0] == method.name:
            answer = self._answers.popleft()[1]
            if not answer.done():
                answer.set_result(arguments)

    async def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        self.check()
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers.append((f"{name}-ok", answer))
        self.connection._write(method_frame(self.number, encode(name, **arguments)))
        return await answer

    def check(self) -> None:
        """Raises what closed it."""
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = error
        for _, answer in self._answers:
            if not answer.done():
                answer.set_exception(error)
        if self._window is not None and not self._window.done():
            self._window.set_exception(error)
