"""A connection behind its handshake: frames in, frames out, channels, heartbeats.

Rules:

1. One call of the kernel scans a whole receive buffer; one write takes everything of a turn of the loop.
2. What cannot be done now (a full disk, a commit of a transaction under way, an answer to a client that does not read) is
   held with everything behind it, and the client is not read from meanwhile. A publisher ahead of the disk is simply not
   read from: `queueing/credit_flow.py`.
3. An error closes its channel, or the connection where AMQP says so. While it is being closed only the answer counts.

`TRANSITIONS` is the state machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from warren.amqp.channel import MANDATORY, Channel
from warren.amqp.errors import AmqpError
from warren.amqp.methods import METHODS, decode, encode
from warren.errors import DiskFullError, WarrenError
from warren.kernel.frame_writer import HEARTBEAT_FRAME, method_frame
from warren.kernel.frames import ACK, HEARTBEAT, METHOD, PUBLISH, TOO_LARGE, FrameScanner
from warren.queueing.arrival import come_now
from warren.queueing.credit_flow import TURN_BYTES, ReaderFlow, Wait
from warren.queueing.guard import QueueCrashed
from warren.routing.exchange import Exchange

if TYPE_CHECKING:
    from warren.vhost.vhost import Vhost

log = logging.getLogger("warren.amqp")

OPEN, CLOSING, CLOSED = "open", "closing", "closed"
# What a connection still listens to in each state, and where it goes.
TRANSITIONS = {
    OPEN: {"connection.close": CLOSED, "error": CLOSING, "lost": CLOSED},
    CLOSING: {"connection.close-ok": CLOSED, "connection.close": CLOSED, "timeout": CLOSED, "lost": CLOSED},
    CLOSED: {},
}

_HIGH_WATER = 1024 * 1024  # bytes on their way to a client before its consumers are stopped
_LOW_WATER = 256 * 1024
_BEGUN_BYTES = 64 * 1024  # of unfinished messages that a client may still send while there is an alarm
_CLOSE_SECONDS = 10.0
_SETTLEMENTS = ((60, 80), (60, 90), (60, 110), (60, 120))  # basic.ack, reject, recover, nack
_CLOSE_OK = method_frame(0, encode("connection.close-ok"))


Permission = Literal["configure", "write", "read"]
ResourceKind = Literal["queue", "exchange"]


class Permissions(Protocol):
    @property
    def vhost_allowed(self) -> bool: ...
    def check(self, kind: Permission, resource_kind: ResourceKind, name: str) -> bool: ...
    def check_topic(self, exchange: str, permission: Literal["write", "read"], routing_key: str) -> bool: ...


class Everything:
    """Permissions of who may do everything."""

    vhost_allowed = True

    def check(self, kind: Permission, resource_kind: ResourceKind, name: str) -> bool:
        return True

    def check_topic(self, exchange: str, permission: Literal["write", "read"], routing_key: str) -> bool:
        return True


def turn_away(sock: socket.socket, why: str, code: int = 320) -> None:
    """Tell a client that cannot be served though it has logged in, as far as its socket takes it, and close."""
    close = encode("connection.close", reply_code=code, reply_text=AmqpError(code, why).reply_text)
    with contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.send(method_frame(0, close))
    sock.close()


class Connection(asyncio.Protocol):
    """One client, after connection.open."""

    def __init__(
        self,
        vhost: Vhost,
        *,
        user: str,
        permissions: Permissions | None = None,
        frame_max: int = 131072,
        channel_max: int = 2047,
        heartbeat: int = 60,
        client_properties: dict[str, Any] | None = None,
        peer: str = "",
        tls: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.vhost = vhost
        self.user = user
        self.frame_max = frame_max
        self.channel_max = channel_max
        self.heartbeat = heartbeat
        self.client_properties = client_properties or {}
        self.peer = peer
        self.tls = tls  # protocol, cipher, server_name and the user of its certificate; None: it came in the clear
        self.state = OPEN
        self.channels: dict[int, Channel] = {}
        self._crossed: set[int] = set()  # channels that both sides closed at once: the answer to ours is still to come
        self.writable = True
        self.connected_at = time.time()
        self.received_bytes = self.sent_bytes = 0
        self.held_back = 0  # bytes of messages, by the transactions of all channels
        capabilities = self.client_properties.get("capabilities")
        granted = capabilities if isinstance(capabilities, dict) else {}
        self.cancel_notify = granted.get("consumer_cancel_notify") is True
        self._blocked_notify = granted.get("connection.blocked") is True
        # kombu, and so Celery, asks a broker that is not called RabbitMQ for what AMQP's text says of basic.qos: a limit of
        # the channel, that holds for the consumers it has. Celery raises it for every task that waits for its time.
        self.qos_by_the_book = self.client_properties.get("product") == "py-amqp"
        self._permissions: Permissions = permissions or Everything()
        self._scanner = FrameScanner(frame_max, vhost.max_message_size)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flushing = False
        self._confirming: dict[Channel, None] = {}
        self._held: list[tuple[Any, ...]] = []  # events that wait: for room on the disk, or for tx.commit
        self.flow = ReaderFlow(self)
        self._published = False  # in this turn
        self._told_blocked = False
        self._last_in = self._last_out = clock()
        self._taken = -1  # bytes that the client's socket had taken when it was last looked at; -1: not waited for
        self._last_taken = 0.0  # when that had changed
        self._timer: asyncio.TimerHandle | None = None

    # -- the transport -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._transport.set_write_buffer_limits(_HIGH_WATER, _LOW_WATER)
        self.vhost.connections.add(self)
        self.send_method(0, encode("connection.open-ok"))
        self._flush()
        if self.heartbeat:
            self._timer = self._loop.call_later(self.heartbeat / 2, self._beat)
        if self.vhost.goodbye:  # it came while the others were sent away
            self.fail(AmqpError(320, self.vhost.goodbye))
        elif not self._permissions.vhost_allowed:  # it was handed over while its user was deleted
            self.fail(AmqpError(320, f"user '{self.user}' has lost access to vhost '{self.vhost.name}'"))

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self._last_in = self._clock()
        events = self._scanner.feed(data, time.time_ns() // 1000)
        if self._held:
            self._held += events
        else:
            self._handle(events)
        error = self._scanner.error
        if error is not None and not self._held:
            if self.state == OPEN:
                self.fail(AmqpError(*error))
            elif self.state == CLOSING and _CLOSE_OK in data:  # the scanner is deaf after an error
                self._end()
        self._flush()
        if len(data) >= TURN_BYTES and not self.flow.waiting:
            self.flow.wait_for(Wait.TURN)
            self._loop.call_soon(self.flow.done, Wait.TURN)

    def connection_lost(self, error: Exception | None) -> None:
        self.state = CLOSED
        self.vhost.departing.discard(self)
        self._release()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self.flow.done(Wait.CLIENT)
        for channel in list(self.channels.values()):
            channel.unblock()

    # -- events ------------------------------------------------------------------------------------------------------

    def _handle(self, events: list[tuple[Any, ...]]) -> None:
        for position, event in enumerate(events):
            try:
                wait = self._handle_one(event)
                if wait is not None:
                    self._hold(events[position:], wait)
                    return
            except DiskFullError:
                # Whatever had no room: the alarm that follows, and its end, let this go on.
                self.vhost.store.committer.give_up_reserve()
                self._hold(events[position:], Wait.RESOURCES)
                self._tell_blocked()
                return
            except AmqpError as error:
                self._error(error, event)
            except QueueCrashed as crash:
                # An ack of what the queue has forgotten is nothing to speak of: it comes again, as redelivered.
                if event[0] == METHOD and event[2:4] not in _SETTLEMENTS:
                    text = f"queue '{crash}' failed and was restarted; try again"
                    self._error(AmqpError(506, text, event[2], event[3]), event)
            except WarrenError as error:
                self.vhost.wake()  # a store that failed is found by the next commit, and the vhost restarted
                self.fail(AmqpError(541, f"{type(error).__name__}: {error}"))
            except Exception:
                log.exception("connection %s: an event failed", self.peer)
                self.fail(AmqpError(541, "the broker failed to do this; its log says why"))
            if self.state == CLOSED:
                return
        if self._scanner.under_way and self.state == OPEN:
            self._check_contents()
        self.vhost.credit.spent(self.flow, self._published)
        self._published = False

    def _check_contents(self) -> None:
        """A message of which not all has come is in memory already. So what holds for a publish holds for its beginning:
        its channel is open, and there is no alarm, unless it is a small one: that is held when it is complete."""
        if self._scanner.stray(self.channels):
            self.fail(AmqpError(504, "expected 'channel.open'", 60, 40))
        elif self.vhost.alarms and self._scanner.buffered > _BEGUN_BYTES:
            self._tell_blocked()
            self.flow.wait_for(Wait.RESOURCES)

    def _handle_one(self, event: tuple[Any, ...]) -> Wait | None:
        """None: done; else what it has to wait for."""
        kind = event[0]
        if kind == HEARTBEAT:
            return None
        number: int = event[1]
        channel = self.channels.get(number)
        if kind == METHOD:
            if not self.writable and self.state == OPEN:
                return Wait.CLIENT  # answers to a client that does not read them would fill the memory
            return self._method(number, channel, event[2], event[3], event[4])
        if self.state != OPEN:
            return None
        if channel is None:
            raise AmqpError(504, "expected 'channel.open'", 60, 40 if kind == PUBLISH else 80)
        if channel.closing:
            return None
        if channel.transaction is not None and channel.transaction.committing:
            return Wait.TRANSACTION
        if kind == PUBLISH:
            # Only where it may be answered: a client that publishes before it reads what it consumes is not to hang.
            if not self.writable and (channel.confirming or event[4] & MANDATORY):
                return Wait.CLIENT
            if self.vhost.alarms:
                self._tell_blocked()
                return Wait.RESOURCES
            self._published = True
            channel.publish(event[2], event[3], event[4], event[5], event[6])
        elif kind == ACK:
            channel.acks(event[2])
        else:
            assert kind == TOO_LARGE
            most = self._scanner.max_message_size
            raise AmqpError(406, f"message size {event[2]} is larger than configured max size {most}", 60, 40)
        return None

    def _method(
        self, number: int, channel: Channel | None, class_id: int, method_id: int, payload: bytes
    ) -> Wait | None:
        method = METHODS.get((class_id, method_id))
        if method is None:
            raise AmqpError(503, f"unknown method {class_id},{method_id}", class_id, method_id)
        if channel is not None and channel.transaction is not None and channel.transaction.committing:
            return Wait.TRANSACTION
        try:
            arguments = decode(method, payload)
        except ValueError as error:
            raise AmqpError(501, str(error), class_id, method_id) from None
        if number == 0:
            self._connection_method(method.name, arguments, class_id, method_id)
            return None
        if self.state != OPEN:
            return None
        if method.name == "channel.open":
            self._open_channel(number, channel)
        elif channel is None:
            if method.name != "channel.close-ok" or number not in self._crossed:
                raise AmqpError(504, "expected 'channel.open'", class_id, method_id)
            self._crossed.discard(number)
        elif method.name == "channel.close":
            if channel.closing:
                self._crossed.add(number)
            self._close_channel(number, channel)
            self.send_method(number, encode("channel.close-ok"))
        elif method.name == "channel.close-ok" and channel.closing:
            del self.channels[number]
        elif not channel.closing:
            handler = getattr(channel, method.handler, None)
            if handler is None or class_id == 10:
                raise AmqpError(503, f"unimplemented method '{method.name}'", class_id, method_id)
            try:
                handler(**arguments)
            except AmqpError as error:
                if not error.class_id:
                    error.class_id, error.method_id = class_id, method_id
                raise
        return None

    def _connection_method(self, name: str, arguments: dict[str, Any], class_id: int, method_id: int) -> None:
        if name == "connection.close":
            self._release()
            self.send_method(0, encode("connection.close-ok"))
            self._end()
        elif name == "connection.close-ok" and self.state != OPEN:
            self._end()
        elif self.state != OPEN:
            return
        elif name == "connection.update-secret":
            # As RabbitMQ does for users of its own: a secret is looked at again only where it can expire, as a token does.
            log.info("connection %s: user %r updated its secret, reason: %s", self.peer, self.user, arguments["reason"])
            self.send_method(0, encode("connection.update-secret-ok"))
        elif name not in ("connection.blocked", "connection.unblocked"):
            raise AmqpError(504, f"unexpected method '{name}' in connection state running", class_id, method_id)

    def _open_channel(self, number: int, channel: Channel | None) -> None:
        if channel is not None and channel.closing:
            raise AmqpError(504, f"channel {number} is being closed", 20, 10)
        if channel is not None:
            raise AmqpError(504, "second 'channel.open' seen", 20, 10)
        if self.channel_max and number > self.channel_max:
            raise AmqpError(
                530, f"number of channels opened has reached the negotiated channel_max ({self.channel_max})", 20, 10
            )
        self.channels[number] = Channel(self, number)
        self.send_method(number, encode("channel.open-ok"))

    def _close_channel(self, number: int, channel: Channel) -> None:
        del self.channels[number]
        self._scanner.forget(number)
        if not channel.closing:
            channel.flush_confirms()
            channel.release()

    # -- errors ------------------------------------------------------------------------------------------------------

    def _error(self, error: AmqpError, event: tuple[Any, ...]) -> None:
        """Close what the error says."""
        number = event[1] if len(event) > 1 else 0
        channel = self.channels.get(number)
        if error.hard or channel is None:
            self.fail(error)
            return
        log.info("channel %s of %s: %s", number, self.peer, error.text)
        channel.flush_confirms()
        self._scanner.forget(number)
        channel.release()
        self.send_method(
            number,
            encode(
                "channel.close",
                reply_code=error.code,
                reply_text=error.reply_text,
                class_id=error.class_id,
                method_id=error.method_id,
            ),
        )

    def check_timeouts(self) -> None:
        """Close channels whose deliveries have waited for their acks for too long."""
        for number, channel in list(self.channels.items()):
            if not channel.closing and self.state == OPEN:
                try:
                    channel.check_timeout()
                except AmqpError as error:
                    self._error(error, (METHOD, number))
                    self.schedule_flush()

    def fail(self, error: AmqpError) -> None:
        """Close the connection from our side, and say why."""
        if self.state != OPEN:
            return
        log.info("connection %s: %s", self.peer, error.text)
        self._release()
        self.state = CLOSING
        self.vhost.departing.add(self)
        self.send_method(
            0,
            encode(
                "connection.close",
                reply_code=error.code,
                reply_text=error.reply_text,
                class_id=error.class_id,
                method_id=error.method_id,
            ),
        )
        self._flush()
        self._timer = self._loop.call_later(_CLOSE_SECONDS, self._end)

    def _end(self) -> None:
        self.state = CLOSED
        self._flush()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()
            # What is left for the client goes out first, and it may never read: until then it is a descriptor and memory.
            self.vhost.departing.add(self)
            self._timer = self._loop.call_later(_CLOSE_SECONDS, self.abort)

    def abort(self) -> None:
        """Now, without a word."""
        if self._transport is not None:
            self._transport.abort()

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self not in self.vhost.connections:
            return
        self.vhost.connections.discard(self)
        self._held.clear()
        self.flow.end()
        for channel in list(self.channels.values()):
            if not channel.closing:
                channel.release()
        self.vhost.release_exclusive(self)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _hold(self, events: list[tuple[Any, ...]], wait: Wait) -> None:
        self._held = events
        self.flow.wait_for(wait)

    def catch_up(self) -> None:
        """Of `Reader`: what was waited for is there, go on where it stopped."""
        held, self._held = self._held, []
        for event in held:
            if event[0] == PUBLISH:
                come_now(event[6])
        self._handle(held)
        error = self._scanner.error
        if error is not None and not self._held and self.state == OPEN:  # it came behind what was held
            self.fail(AmqpError(*error))
        self.schedule_flush()

    def pause_reading(self) -> None:
        """Of `Reader`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Of `Reader`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._last_in = self._clock()

    def transaction_done(self) -> None:
        """tx.commit is answered."""
        self.flow.done(Wait.TRANSACTION)

    def alarm_changed(self) -> None:
        if self.vhost.alarms or self.state != OPEN:
            return
        if self._told_blocked:
            self._told_blocked = False
            self.send_method(0, encode("connection.unblocked"))
            self.schedule_flush()
        self.flow.done(Wait.RESOURCES)

    def _tell_blocked(self) -> None:
        if self._blocked_notify and not self._told_blocked:
            self._told_blocked = True
            reason = " & ".join(f"low on {resource}" for resource in sorted(self.vhost.alarms or ("disk",)))
            self.send_method(0, encode("connection.blocked", reason=reason))

    # -- out ---------------------------------------------------------------------------------------------------------

    def send(self, frames: bytes) -> None:
        self._out.append(frames)
        self._out_bytes += len(frames)
        if self._out_bytes > _HIGH_WATER:
            self._flush()
        elif not self._flushing:
            self.schedule_flush()

    def send_method(self, channel: int, payload: bytes) -> None:
        self.send(method_frame(channel, payload))

    def confirms_pending(self, channel: Channel) -> None:
        self._confirming[channel] = None
        self.schedule_flush()

    def schedule_flush(self) -> None:
        """One write for everything of this turn of the loop."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = True  # so that what follows does not ask for another one
        self.vhost.end_turn()
        if self._confirming:
            for channel in self._confirming:
                if not channel.closing:
                    channel.flush_confirms()
            self._confirming.clear()
        self._flushing = False
        if self._out and self._transport is not None:
            data = b"".join(self._out) if len(self._out) > 1 else self._out[0]
            self._out.clear()
            self._out_bytes = 0
            self.sent_bytes += len(data)
            self._last_out = self._clock()
            if not self._transport.is_closing():
                self._transport.write(data)

    def _beat(self) -> None:
        """Twice in an interval: send where nothing was sent, and look whether the client is alive."""
        now = self._clock()
        if not self._is_alive(now):
            log.warning("connection %s: missed heartbeats from client, timeout: %ss", self.peer, self.heartbeat)
            self.abort()
            return
        if now - self._last_out >= self.heartbeat / 2:
            self.send(HEARTBEAT_FRAME)
        self._timer = self._loop.call_later(self.heartbeat / 2, self._beat)

    def _is_alive(self, now: float) -> bool:
        if not self.flow.waits_for(Wait.CLIENT):
            self._taken = -1
            return self.flow.waiting or now - self._last_in <= 2 * self.heartbeat
        # It is not read from until it reads: what its socket takes is the only sign of life.
        assert self._transport is not None
        taken = self.sent_bytes - self._transport.get_write_buffer_size()
        if taken != self._taken:
            self._taken, self._last_taken = taken, now
        return now - self._last_taken <= 2 * self.heartbeat

    # -- rights ------------------------------------------------------------------------------------------------------

    def allows(self, permission: Permission, kind: ResourceKind, name: str) -> bool:
        return self._permissions.check(permission, kind, name)

    def check_topic(self, exchange: Exchange, routing_key: str, permission: Literal["write", "read"] = "write") -> None:
        if exchange.type != "topic":
            return
        if not self._permissions.check_topic(exchange.name, permission, routing_key):
            raise AmqpError(
                403,
                f"access to topic '{routing_key}' in exchange '{exchange.name}' in vhost '{self.vhost.name}' refused "
                f"for user '{self.user}'",
            )
