"""A channel: the methods of AMQP 0-9-1 on one side, queues and exchanges on the other.

Rules:

1. No I/O: methods come as decoded arguments, answers go to `Connection.send`. A test needs no socket.
2. A publish takes a number in confirm mode whatever becomes of it. A confirm follows when all its queues have it safe:
   everything up to a number is confirmed by one frame after a commit, because commits are in order.
3. Deliveries belong to the channel until they are settled; when it goes, they go back to their queues.
4. An error is an AmqpError; the connection closes what has to be closed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from warren.amqp.declarations import REPLY_TO, Declarations
from warren.amqp.errors import AmqpError, HardError
from warren.amqp.methods import encode
from warren.amqp.publish_rules import carbon, expiration_ms
from warren.amqp.statistics import ChannelStatistics, QueueCounts
from warren.amqp.transaction import Transaction
from warren.errors import DiskFullError
from warren.kernel.entry import Entry
from warren.kernel.frame_writer import ack_frame, content, deliveries, nack_frame
from warren.kernel.journal_codec import MOST_PRODUCER_BYTES
from warren.kernel.ranges import RangeSet
from warren.kernel.unacked import Unacked
from warren.queueing.arrival import Arrival, come_now
from warren.queueing.consumers import Consumer
from warren.queueing.guard import QueueCrashed
from warren.queueing.message_times import MAX_DELAY_MS, delay_ms
from warren.queueing.properties import decode_head, rewritten
from warren.queueing.queue_process import QueueProcess
from warren.routing.exchange import Exchange

if TYPE_CHECKING:
    from warren.amqp.connection import Connection

log = logging.getLogger("warren.amqp")

_HEADERS, _REPLY_TO, _EXPIRATION, _USER_ID = 0x2000, 0x0200, 0x0100, 0x0010
_SPECIAL = _HEADERS | _REPLY_TO | _EXPIRATION | _USER_ID
MANDATORY, _IMMEDIATE = 1, 2  # the bits of a publish
_PLENTY = 1 << 30
_NOTHING = RangeSet()


class Channel(Declarations):
    def __init__(self, connection: Connection, number: int) -> None:
        super().__init__(connection, number)
        self.closing = False  # a close was sent; only its answer counts
        self.consumers: dict[str, Consumer] = {}
        self.unacked = Unacked()
        self.prefetch = 0  # of consumers to come
        self.global_prefetch = 0
        self.flowing = True
        self.confirming = False
        self.transaction: Transaction | None = None
        self.statistics = ChannelStatistics()
        self._sent: deque[tuple[int, float]] = deque()  # (delivery tag, when), a few a minute, for the consumer timeout
        self._queue_numbers: dict[QueueProcess, int] = {}
        self._queues: list[QueueProcess | None] = []  # by number; None: it is gone
        self._monitored: dict[QueueProcess, list[int]] = {}  # queues that tell when they go, numbers of their consumers
        self._consumers: list[Consumer | None] = [None]  # by number; 0 stands for basic.get
        self._free_numbers: list[int] = []  # of consumers that are gone, and so are their deliveries
        self._gotten = 0  # of the unacked, by basic.get: a prefetch is for consumers
        self._next_number = 1  # of the next publish, in confirm mode
        self._confirmed = 0  # everything up to it was confirmed
        self._waiting = 0  # everything up to it is confirmed with a commit to come
        self._to_confirm = 0  # everything up to it is safe, and not told yet
        self._nacks: list[int] = []
        self._nacked: deque[int] = deque()  # told, and above what was confirmed
        self._arriving: Arrival | None = None  # a full disk stopped it
        self._reply_token: str | None = None
        self._reply_consumer: Consumer | None = None

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, exchange: str, routing_key: str, bits: int, property_flags: int, entries: list[Entry]) -> None:
        """A batch that differs in bodies and perhaps in properties, not in where it goes."""
        if bits & _IMMEDIATE:
            raise AmqpError(540, "immediate=true", 60, 40)
        if self._arriving is not None and not self._goes_on(self._arriving, exchange, entries):
            return
        self._allow("write", "exchange", exchange)
        known = self.vhost.router.exchanges.get(exchange)
        if known is None:
            raise AmqpError(404, f"no exchange '{exchange}' in vhost '{self.vhost.name}'", 60, 40)
        if known.internal:
            raise AmqpError(
                403, f"cannot publish to internal exchange '{exchange}' in vhost '{self.vhost.name}'", 60, 40
            )
        self.connection.check_topic(known, routing_key)
        mandatory = bool(bits & MANDATORY)
        special = property_flags & _SPECIAL or known.needs_message or known.delayed
        if self.vhost.router.by_properties and exchange:  # a binding may lead to one that hashes a property
            special = special or property_flags
        if special or routing_key.startswith(REPLY_TO):
            self._publish_each(known, routing_key, mandatory, entries)
            return
        names = self.vhost.router.route(exchange, routing_key)
        if len(names) > 1 or self.transaction is not None:
            self._publish_routed(Arrival(entries, names, mandatory))
        else:
            self._deliver(names, mandatory, entries)
        self._count_published(exchange, len(entries))

    def _count_published(self, exchange: str, count: int) -> None:
        confirming = self.confirming and self.transaction is None
        self.statistics.published(exchange, count, self._next_number - 1 if confirming else None)

    def _goes_on(self, stopped: Arrival, exchange: str, entries: list[Entry]) -> bool:
        """A full disk stopped the first of these on their way: what is left of that is done now. Is there more to do?"""
        self.arrive(stopped)
        self._count_published(exchange, len(stopped.entries))
        if len(stopped.entries) == len(entries):
            return False
        del entries[: len(stopped.entries)]
        return True

    def _publish_each(self, exchange: Exchange, routing_key: str, mandatory: bool, entries: list[Entry]) -> None:
        """One by one. Who repeats this after a full disk repeats only what was not done: the list is emptied."""
        done = 0
        try:
            for entry in entries:
                self._publish_routed(self._route_special(exchange, routing_key, mandatory, entry))
                done += 1
        finally:
            del entries[:done]
            self._count_published(exchange.name, done)

    def _publish_routed(self, arrival: Arrival) -> None:
        if self.transaction is not None:
            self.transaction.publish(arrival)
        else:
            self.arrive(arrival)

    def arrive(self, arrival: Arrival) -> None:
        """What was routed goes to its queues: at once, or with its transaction, when some of them may be gone."""
        if self.transaction is not None:
            come_now(arrival.entries)
        self._arriving = None
        if arrival.delay_ms or any(name in self.vhost.queues for name in arrival.names):
            try:
                self.vhost.arrivals.arrive(arrival)
            except DiskFullError:
                self._arriving = arrival if self.transaction is None else None  # a transaction keeps its own
                raise
        elif arrival.mandatory:
            for entry in arrival.entries:
                self._return(entry)
        self._delivered(arrival.entries, arrival.rejected, arrival.journaled)

    def _route_special(self, exchange: Exchange, routing_key: str, mandatory: bool, entry: Entry) -> Arrival:
        """One message with properties that say where it goes, or how long it stays."""
        head = decode_head(entry.head)
        properties = head.properties
        headers, copies, blind = self._check_special(properties, entry)
        keys = [routing_key, *copies, *blind]
        for key in keys[1:]:
            self.connection.check_topic(exchange, key)
        reply_to = f"{REPLY_TO}.{self._reply_token}" if properties.get("reply_to") == REPLY_TO else None
        if "BCC" in headers or reply_to is not None:
            headers.pop("BCC", None)
            entry.head = rewritten(entry.head, without_headers=("BCC",), blind=blind, reply_to=reply_to)
            entry.size = 4 + len(entry.head) + len(entry.body)
        if not exchange.name:
            for key in keys:
                if key.startswith(REPLY_TO + "."):
                    self._reply(key.removeprefix(REPLY_TO + "."), entry)
        router = self.vhost.router
        delay = delay_ms(headers)
        if not delay:
            names = router.route_many(exchange.name, keys, lambda: headers, lambda: properties)
            arrival = Arrival([entry], names, mandatory)
        else:
            names, waits = router.route_waiting(exchange.name, keys, lambda: headers, lambda: properties)
            if waits and delay > MAX_DELAY_MS:
                given = headers["x-delay"]
                raise AmqpError(406, f"invalid x-delay {given}: it is at most {MAX_DELAY_MS} milliseconds", 60, 40)
            arrival = Arrival([entry], names, mandatory)
            arrival.waits, arrival.delay_ms = list(waits), delay if waits else 0
        producer, number = headers.get("x-producer-name"), headers.get("x-publishing-id")
        if names and isinstance(producer, str) and isinstance(number, int) and number >= 0:
            size = len(producer.encode(errors="surrogateescape"))
            if size > MOST_PRODUCER_BYTES:
                raise AmqpError(
                    406, f"invalid x-producer-name of {size} bytes: it has at most {MOST_PRODUCER_BYTES}", 60, 40
                )
            arrival.producer, arrival.publishing_id = producer, number
        return arrival

    def _check_special(self, properties: dict[str, Any], entry: Entry) -> tuple[dict[str, Any], list[str], list[str]]:
        """Refuse what may not be published, give it its expiry. Returns its headers, the keys of CC and those of BCC."""
        user = properties.get("user_id")
        if user is not None and user != self.connection.user:
            raise AmqpError(
                406,
                f"user_id property set to '{user}' but authenticated user was '{self.connection.user}'",
                60,
                40,
            )
        if "expiration" in properties:
            entry.expiry = entry.published_at + expiration_ms(properties["expiration"]) * 1000
        found = properties.get("headers")
        headers: dict[str, Any] = dict(found) if isinstance(found, dict) else {}
        copies, blind = carbon(headers, "CC"), carbon(headers, "BCC")
        if properties.get("reply_to") == REPLY_TO and self._reply_token is None:
            raise AmqpError(406, "fast reply consumer does not exist", 60, 40)
        return headers, copies, blind

    def _reply(self, token: str, entry: Entry) -> None:
        """To the channel that asked, past all queues; in a transaction too, and never a route: as RabbitMQ does it."""
        target = self.vhost.reply_channels.get(token)
        consumer = target._reply_consumer if target is not None else None
        # At most once: no queue keeps a reply, so one that its client has no room for is lost. It would fill the memory.
        if target is not None and consumer is not None and target.connection.writable:
            target.send(consumer, [entry])

    def _deliver(self, names: tuple[str, ...], mandatory: bool, entries: list[Entry]) -> None:
        """To one queue or none: most publishes."""
        if names:
            self._delivered(entries, *self.vhost.arrivals.deliver(names[0], entries))
            return
        if mandatory:
            for entry in entries:
                self._return(entry)
        self._settle_publish([], False, len(entries))

    def _delivered(self, entries: list[Entry], rejected: list[Entry], journaled: bool) -> None:
        if rejected and self.confirming:
            gone = set(map(id, rejected))
            first = self._next_number
            self._nacks += [first + position for position, entry in enumerate(entries) if id(entry) in gone]
        self._settle_publish(rejected, journaled, len(entries))

    def _return(self, entry: Entry) -> None:
        head = decode_head(entry.head)
        self.statistics.exchange(head.exchange).return_unroutable += 1
        method = encode(
            "basic.return",
            reply_code=312,
            reply_text="NO_ROUTE",
            exchange=head.exchange,
            routing_key=head.routing_key,
        )
        self.connection.send(content(self.number, method, entry.head, entry.body, self.connection.frame_max))

    def _settle_publish(self, rejected: list[Entry], journaled: bool, count: int) -> None:
        """Confirm mode: the next `count` numbers are used up."""
        if self.transaction is not None:
            self.transaction.journaled = self.transaction.journaled or journaled
            self.transaction.rejected = self.transaction.rejected or bool(rejected)
            return
        if journaled and not self.confirming:
            self.vhost.wake()
        if not self.confirming:
            return
        self._next_number += count
        last = self._next_number - 1
        if journaled or self._waiting > self._confirmed:
            self._waiting = last
            self.vhost.commits.wait(self, last)
        else:
            self._to_confirm = last
        self.connection.confirms_pending(self)

    def committed(self, number: int) -> None:
        if not self.closing:
            self._to_confirm = max(self._to_confirm, number)
            self.connection.confirms_pending(self)

    def flush_confirms(self) -> None:
        """Tell the publisher what became of its messages; once a turn of the loop. A message is told once: acks leave out
        what was nacked, or a client would take the ack for that of its next message."""
        for number in self._nacks:
            self.connection.send(nack_frame(self.number, number, False))
        self._nacked += self._nacks
        self._nacks.clear()
        last = self._to_confirm
        while self._confirmed < last:
            end = self._nacked[0] - 1 if self._nacked and self._nacked[0] <= last else last
            count = end - self._confirmed
            if count:
                self.connection.send(ack_frame(self.number, end, count > 1))
            if end < last:
                end = self._nacked.popleft()
            self._confirmed = end
        self.statistics.confirmed(self._confirmed)

    # -- deliveries --------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Of `Receiver`."""
        if self.closing or not self.flowing or not self.connection.writable:
            return 0
        if self.global_prefetch:
            return max(0, self.global_prefetch - (len(self.unacked) - self._gotten))
        return _PLENTY

    def send(self, consumer: Consumer, entries: list[Entry]) -> None:
        """Of `Receiver`."""
        queue: QueueProcess | None = consumer.queue
        if consumer.no_ack:
            first = self.unacked.skip(len(entries))
        else:
            assert queue is not None
            first = self.unacked.add(self._number_of(queue), consumer.number, entries)
            self._note_sent(first)
        below, returned = (queue.redelivered_below, queue.returned) if queue is not None else (0, _NOTHING)
        if queue is not None:
            counts = self._counts(queue)
            if consumer.no_ack:
                counts.deliver_no_ack += len(entries)
            else:
                counts.deliver += len(entries)
            if returned or entries[0].seq < below:  # else there is nothing to look for, entry by entry
                counts.redeliver += sum(entry.seq < below or entry.seq in returned for entry in entries)
        self.connection.send(
            deliveries(self.number, consumer.tag_bytes, first, entries, below, returned, self.connection.frame_max)
        )

    def _note_sent(self, tag: int) -> None:
        """When a delivery went out, as exactly as the consumer timeout needs it."""
        if self.vhost.consumer_timeout:
            now = self.vhost.clock()
            if not self._sent or now - self._sent[-1][1] >= self.vhost.consumer_timeout / 8:
                self._sent.append((tag, now))

    def check_timeout(self) -> None:
        """Raises AmqpError when a delivery has waited for its ack for too long."""
        oldest = self.unacked.first()
        while len(self._sent) > 1 and (not oldest or self._sent[1][0] <= oldest):
            self._sent.popleft()
        if not oldest:
            self._sent.clear()
        elif self._sent and self.vhost.clock() - self._sent[0][1] > self.vhost.consumer_timeout:
            milliseconds = int(self.vhost.consumer_timeout * 1000)
            raise AmqpError(
                406,
                f"delivery acknowledgement on channel {self.number} timed out. Timeout value used: {milliseconds} ms. This "
                "timeout value can be configured: consumer_timeout",
            )

    def cancelled(self, consumer: Consumer) -> None:
        """Of `Receiver`: the queue went away."""
        self.consumers.pop(consumer.tag, None)
        if self.connection.cancel_notify:
            # After the answer to the delete: a client that deletes what it consumes from waits for that one first.
            self.vhost.later(0, partial(self._tell_cancelled, consumer.tag))

    def _tell_cancelled(self, tag: str) -> None:
        if not self.closing:
            self.reply("basic.cancel", consumer_tag=tag, nowait=True)

    def _counts(self, queue: QueueProcess) -> QueueCounts:
        if queue not in self._monitored:
            self._monitor(queue)
        return self.statistics.queue(queue.name)

    def _monitor(self, queue: QueueProcess) -> list[int]:
        found = self._monitored.get(queue)
        if found is None:
            found = self._monitored[queue] = []
            queue.monitor(self)
        return found

    def queue_gone(self, queue: QueueProcess) -> None:
        """Of `Sender`. Tags of its messages stay good, and settle nothing."""
        for number in self._monitored.pop(queue, ()):
            self._consumers[number] = None
            self._free_numbers.append(number)  # deliveries that have it still go by their queue's number, which is not
        number = self._queue_numbers.pop(queue, -1)
        if number >= 0:
            self._queues[number] = None
        self.statistics.queue_gone(queue.name)

    def _number_of(self, queue: QueueProcess) -> int:
        number = self._queue_numbers.get(queue)
        if number is None:
            number = self._queue_numbers[queue] = len(self._queues)
            self._queues.append(queue)
        return number

    def acks(self, acks: list[int]) -> None:
        """Many basic.ack: tag * 2 + multiple."""
        if self.transaction is not None:
            for ack in acks:
                self.transaction.settle(ack >> 1, bool(ack & 1), "ack", (60, 80))
            return
        groups, unknown = self.unacked.ack_all(acks)
        self._forget_gotten(groups)
        for queue, consumer, seqs in groups:
            self._settle(queue, consumer, seqs, "ack")
        self._made_room()
        if unknown is not None:
            raise AmqpError(406, f"unknown delivery tag {unknown}", 60, 80)

    def _take(self, tag: int, multiple: bool, ids: tuple[int, int] = (0, 0)) -> list[tuple[int, int, list[int]]]:
        """`ids` are those of the method, where it did not come by its handler."""
        taken = self.unacked.ack(tag, multiple)
        if taken is None:
            raise AmqpError(406, f"unknown delivery tag {tag}", *ids)
        self._forget_gotten(taken)
        return taken

    def _forget_gotten(self, taken: list[tuple[int, int, list[int]]]) -> None:
        """All at once: the settlement of the first of them already makes room, and `room` counts what is left."""
        if self._gotten:
            self._gotten -= sum(len(seqs) for _, consumer, seqs in taken if not consumer)

    def settle_tag(self, tag: int, multiple: bool, how: str) -> None:
        taken = self._take(tag, multiple)
        if how == "requeue":
            self._requeue(taken)
        else:
            for queue, consumer, seqs in taken:
                self._settle(queue, consumer, seqs, how)
        self._made_room()

    def _requeue(self, groups: list[tuple[int, int, list[int]]]) -> None:
        """Consumer by consumer, as RabbitMQ does it: each may get its own again, so it has room before one is delivered."""
        merged: dict[tuple[int, int], list[int]] = {}
        for queue, consumer, seqs in groups:
            merged.setdefault((queue, consumer), []).extend(seqs)
        for queue, consumer in sorted(merged, key=lambda key: (key[0], self._tag_of(key[1]))):
            owner, receiver = self._queues[queue], self._consumers[consumer]
            if owner is None:
                continue
            if receiver is not None:
                owner.relieve(receiver, len(merged[queue, consumer]))
                self._forget_cancelled(receiver)
            with contextlib.suppress(QueueCrashed):  # then they are ready again by its restart
                owner.requeue(sorted(merged[queue, consumer]))

    def _tag_of(self, consumer: int) -> str:
        receiver = self._consumers[consumer]
        return "" if receiver is None else receiver.tag

    def _settle(self, queue: int, consumer: int, seqs: list[int], how: str) -> None:
        owner = self._queues[queue]
        if owner is None:
            return
        # What a queue that failed has forgotten comes again, as redelivered; settlements of other queues go on.
        with contextlib.suppress(QueueCrashed):
            if how == "ack":
                self.statistics.queue(owner.name).ack += len(seqs)
                owner.ack(seqs)
            else:
                owner.reject(seqs)
            receiver = self._consumers[consumer]
            if receiver is not None:
                try:
                    owner.settled(receiver, len(seqs))
                finally:
                    self._forget_cancelled(receiver)

    def _made_room(self) -> None:
        if self.global_prefetch:
            self.unblock()

    def unblock(self) -> None:
        """The channel may have room again."""
        for consumer in list(self.consumers.values()):
            if consumer.queue is not None and consumer.blocked:
                with contextlib.suppress(QueueCrashed):  # the consumer is told
                    consumer.queue.unblock(consumer)

    def _nack(self, tag: int, multiple: bool, requeue: bool) -> None:
        how = "requeue" if requeue else "reject"
        if self.transaction is not None:
            self.transaction.settle(tag, multiple, how)
        else:
            self.settle_tag(tag, multiple, how)

    def basic_ack(self, delivery_tag: int, multiple: bool) -> None:
        self.acks([delivery_tag * 2 + multiple])

    def basic_nack(self, delivery_tag: int, multiple: bool, requeue: bool) -> None:
        self._nack(delivery_tag, multiple, requeue)

    def basic_reject(self, delivery_tag: int, requeue: bool) -> None:
        self._nack(delivery_tag, False, requeue)

    def basic_recover(self, requeue: bool) -> None:
        self._recover(requeue)
        self.reply("basic.recover-ok")

    def basic_recover_async(self, requeue: bool) -> None:
        self._recover(requeue)

    def _recover(self, requeue: bool) -> None:
        if not requeue:
            raise AmqpError(540, "requeue=false")
        if self.transaction is not None and self.transaction.settled:
            for tag in self.unacked.tags():
                if tag not in self.transaction.settled:
                    self.settle_tag(tag, False, "requeue")
            return
        taken = self.unacked.drain()
        self._gotten = 0
        self._requeue(taken)
        self._made_room()

    # -- consuming ---------------------------------------------------------------------------------------------------

    def basic_qos(self, prefetch_size: int, prefetch_count: int, global_: bool) -> None:
        if prefetch_size:
            raise AmqpError(540, f"prefetch_size!=0 ({prefetch_size})", 60, 10)
        if global_ or self.connection.qos_by_the_book:
            self.global_prefetch = prefetch_count
            self.unblock()
        else:
            self.prefetch = prefetch_count
            if self.global_prefetch:  # RabbitMQ lifts the channel's own limit with that
                self.global_prefetch = 0
                self.unblock()
        self.reply("basic.qos-ok")

    def basic_consume(
        self,
        ticket: int,
        queue: str,
        consumer_tag: str,
        no_local: bool,
        no_ack: bool,
        exclusive: bool,
        nowait: bool,
        arguments: dict[str, Any],
    ) -> None:
        if consumer_tag in self.consumers:
            raise HardError(530, f"attempt to reuse consumer tag '{consumer_tag}'", 60, 20)
        tag = consumer_tag or f"amq.ctag-{secrets.token_urlsafe(16)}"
        if queue == REPLY_TO:
            self._consume_replies(tag, no_ack, nowait)
            return
        source = self._queue(queue)
        self._allow("read", "queue", source.name)
        priority = arguments.get("x-priority", 0)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise AmqpError(406, f"invalid arg 'x-priority' for queue '{source.name}': {priority!r}", 60, 20)
        single = source.arguments.single_active_consumer
        if source.consumers.exclusive or (exclusive and (len(source.consumers) or single)):
            raise AmqpError(403, f"queue '{source.name}' in vhost '{self.vhost.name}' in exclusive use", 60, 20)
        consumer = Consumer(
            self,
            tag,
            number=self._free_numbers.pop() if self._free_numbers else len(self._consumers),
            no_ack=no_ack,
            prefetch=self.prefetch,
            exclusive=exclusive,
            priority=priority,
            arguments=arguments,
        )
        self._monitor(source).append(consumer.number)
        self._consumers[consumer.number : consumer.number + 1] = [consumer]  # a number that is free, or one more
        self.consumers[tag] = consumer
        source.consume(consumer)
        if not nowait:
            self.reply("basic.consume-ok", consumer_tag=tag)
        with contextlib.suppress(QueueCrashed):  # the consumer is told
            source.run()

    def _consume_replies(self, tag: str, no_ack: bool, nowait: bool) -> None:
        if not no_ack:
            raise AmqpError(406, "reply consumer cannot acknowledge", 60, 20)
        if self._reply_token is not None:
            raise AmqpError(406, "reply consumer already set", 60, 20)
        self._reply_token = secrets.token_urlsafe(24)
        self._reply_consumer = Consumer(self, tag, no_ack=True)
        self.consumers[tag] = self._reply_consumer
        self.vhost.reply_channels[self._reply_token] = self
        if not nowait:
            self.reply("basic.consume-ok", consumer_tag=tag)

    def basic_cancel(self, consumer_tag: str, nowait: bool) -> None:
        consumer = self.consumers.pop(consumer_tag, None)
        if consumer is not None and consumer is self._reply_consumer:
            self._stop_replies()
        if not nowait:
            self.reply("basic.cancel-ok", consumer_tag=consumer_tag)
        if consumer is not None and consumer.queue is not None:
            self._forget_cancelled(consumer)
            with contextlib.suppress(QueueCrashed):
                consumer.queue.cancel(consumer)

    def _forget_cancelled(self, consumer: Consumer) -> None:
        """It was cancelled and has nothing outstanding: its number, needed until then to settle that, is free."""
        if consumer.outstanding or self.consumers.get(consumer.tag) is consumer:
            return
        numbers = self._monitored.get(consumer.queue)
        if numbers is not None and self._consumers[consumer.number] is consumer:
            self._consumers[consumer.number] = None
            self._free_numbers.append(consumer.number)
            numbers.remove(consumer.number)

    def basic_cancel_ok(self, consumer_tag: str) -> None:
        """A client's answer to a cancel of ours, which asked for none."""

    def _stop_replies(self) -> None:
        if self._reply_token is not None:
            self.vhost.reply_channels.pop(self._reply_token, None)
            self._reply_token = self._reply_consumer = None

    def basic_get(self, ticket: int, queue: str, no_ack: bool) -> None:
        source = self._queue(queue)
        self._allow("read", "queue", source.name)
        found = source.get(no_ack)
        if found is None:
            self.reply("basic.get-empty")
            return
        entry, redelivered = found
        counts = self._counts(source)
        if no_ack:
            tag = self.unacked.skip(1)
            counts.get_no_ack += 1
        else:
            tag = self.unacked.add(self._number_of(source), 0, [entry])
            self._gotten += 1
            self._note_sent(tag)
            counts.get += 1
        counts.redeliver += redelivered
        head = decode_head(entry.head)
        method = encode(
            "basic.get-ok",
            delivery_tag=tag,
            redelivered=redelivered,
            exchange=head.exchange,
            routing_key=head.routing_key,
            message_count=len(source),
        )
        self.connection.send(content(self.number, method, entry.head, entry.body, self.connection.frame_max))

    # -- modes -------------------------------------------------------------------------------------------------------

    def confirm_select(self, nowait: bool) -> None:
        if self.transaction is not None:
            raise AmqpError(406, "cannot switch from tx to confirm mode", 85, 10)
        self.confirming = True
        if not nowait:
            self.reply("confirm.select-ok")

    def tx_select(self) -> None:
        if self.confirming:
            raise AmqpError(406, "cannot switch from confirm to tx mode", 90, 10)
        if self.transaction is None:
            self.transaction = Transaction(self)
        self.reply("tx.select-ok")

    def tx_commit(self) -> None:
        if self.transaction is None:
            raise AmqpError(406, "channel is not transactional", 90, 20)
        self.transaction.commit()

    def tx_rollback(self) -> None:
        if self.transaction is None:
            raise AmqpError(406, "channel is not transactional", 90, 30)
        self.transaction.rollback()
        self.reply("tx.rollback-ok")

    def channel_flow(self, active: bool) -> None:
        self.flowing = active
        self.reply("channel.flow-ok", active=active)
        if active:
            self.unblock()

    def access_request(self, realm: str, exclusive: bool, passive: bool, active: bool, write: bool, read: bool) -> None:
        self.reply("access.request-ok", ticket=1)

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """The channel is gone: consumers leave, deliveries go back."""
        self.closing = True
        self._stop_replies()
        if self.transaction is not None:
            self.transaction.rollback()
        consumers, self.consumers = list(self.consumers.values()), {}
        for consumer in consumers:
            if consumer.queue is not None:
                # Those that leave together must not get what the others leave behind.
                consumer.queue.consumers.block(consumer)
        returned: dict[int, list[int]] = {}  # of a queue all at once: a length limit sees them together
        for queue, _, seqs in self.unacked.drain():
            returned.setdefault(queue, []).extend(seqs)
        for queue, seqs in returned.items():
            owner = self._queues[queue]
            if owner is not None:
                with contextlib.suppress(QueueCrashed):  # then they are ready again by its restart
                    owner.requeue(sorted(seqs))
        for monitored in list(self._monitored):
            with contextlib.suppress(QueueCrashed):
                monitored.sender_gone(self)
        self._monitored.clear()
