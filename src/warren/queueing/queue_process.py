"""A queue of the broker: what happens to a message between its arrival and its ack.

    deliver   overflow? -> a consumer that waits -> time to live 0 -> the backing queue -> limits, dead letters
    run       the backing queue -> consumers, as long as there are both
    settle    ack, requeue, reject: by the channel that owns the delivery

Rules:

1. Everything is done on the vhost's loop, in batches, and holds the engine's lock only while it works with the backing
   queue. Nothing here waits for the disk: who wants a confirm asks the journal.
2. An overflow that rejects is decided before a consumer is looked for; a waiting consumer means an empty queue.
3. Only the head expires, and its time was fixed when it came.
4. What leaves the queue for another one (a dead letter) leaves in one transaction with its arrival there.
5. A queue that raises is restarted alone by its owner: its consumers are cancelled with notice, and what it had handed out
   comes back as redelivered.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

from warren.kernel.entry import PERSISTENT, Entry, place_entries, seqs_of, some_expire
from warren.kernel.frame_writer import fitting
from warren.queueing.arguments import QueueArguments
from warren.queueing.consumers import MOST_AT_ONCE, MOST_BYTES_AT_ONCE, Consumer, Consumers, Shares
from warren.queueing.dead_letter import DELIVERY_LIMIT, EXPIRED, MAXLEN, REJECTED
from warren.queueing.decorators import Decorations
from warren.queueing.guard import QueueCrashed, guarded
from warren.queueing.limits import DEAD_BYTES_AT_ONCE, DeadAtOnce, Limits
from warren.queueing.monitors import Monitors, Sender
from warren.queueing.owner import Cancellable, Owner
from warren.storage.vhost_store import StoredQueue

_ALL_FLAGS = 255


class Delivered:
    """What became of a batch."""

    __slots__ = ("journaled", "rejected")

    def __init__(self, rejected: list[Entry], journaled: bool) -> None:
        self.rejected = rejected  # by the length limit
        self.journaled = journaled  # a confirm has to wait for the next commit


class QueueProcess:
    __slots__ = (  # ten thousand queues are not rare
        "__weakref__",
        "_backing",
        "_coming",
        "_coming_bytes",
        "_decorations",
        "_expiring",
        "_expiry_due",
        "_expiry_timer",
        "_limited",
        "_limits",
        "_lock",
        "_mask",
        "_monitors",
        "_owner",
        "_rejects",
        "_running",
        "_seqs",
        "_store",
        "_unused_timer",
        "acked",
        "arguments",
        "auto_delete",
        "consumers",
        "declared",
        "declared_durable",
        "deleted",
        "delivered",
        "duplicates",
        "exclusive_to",
        "gotten",
        "highest",
        "name",
        "published",
        "redelivered",
        "stored",
        "ttl_us",
    )

    def __init__(
        self,
        owner: Owner,
        stored: StoredQueue,
        arguments: QueueArguments,
        *,
        exclusive_to: object | None = None,
        auto_delete: bool = False,
    ) -> None:
        self.name = stored.name
        self.stored = stored
        self.exclusive_to = exclusive_to  # the connection, of an exclusive queue
        self.auto_delete = auto_delete
        self.deleted = False
        self.declared = arguments  # as opposed to what policies make of them
        self.declared_durable = stored.durable  # an exclusive queue that was declared durable is not kept
        self.duplicates = 0
        self.published = self.delivered = self.acked = self.redelivered = self.gotten = 0
        self._owner = owner
        self._store = owner.store
        self._lock = owner.store.lock
        self._backing = stored.backing
        self._seqs = stored.seqs
        durable = stored.durable and owner.store.durability != "memory"
        self._mask = _ALL_FLAGS if durable else _ALL_FLAGS & ~PERSISTENT
        self._expiring = len(stored.backing) > 0  # a message with an expiry may be here
        self._expiry_timer: Cancellable | None = None
        self._expiry_due = 0
        self._unused_timer: Cancellable | None = None
        self._running = False
        self._coming = self._coming_bytes = 0  # by transactions that are not committed
        self.consumers = Consumers(single_active=arguments.single_active_consumer)
        self._monitors = Monitors()
        self._decorations: Decorations | None = None
        self.apply(arguments)
        if owner.decorators:
            self._decorations = Decorations(self, owner.decorators)
            self._decorations.start()

    @guarded
    def apply(self, arguments: QueueArguments) -> None:
        """Its arguments, or what a policy makes of them."""
        old: QueueArguments | None = getattr(self, "arguments", None)
        self.arguments: QueueArguments = arguments
        self._limits = Limits(self.name, arguments)
        self._limited = self._limits.has_length_limit
        self.ttl_us = -1 if arguments.message_ttl_ms is None else arguments.message_ttl_ms * 1000
        self.highest = arguments.max_priority or 0
        self._rejects = self._limited and arguments.overflow != "drop-head"
        self.used()
        if self._limited and old is not None:  # else see `begin`
            self._drop_head()
        if self._decorations is not None and old is not None:
            self._decorations.policy_changed(old, arguments)
            self._tell_state()

    @guarded
    def begin(self) -> None:
        """What it has found on disk meets its limits and times: what was unacked is ready again, and may be too much. Not
        when it is made: everything that its dead letters may go to has to be there."""
        if self._limited:
            self._drop_head()
        self.expire()

    @property
    def durable(self) -> bool:
        return self.stored.durable

    @property
    def rejects(self) -> bool:
        """Does it refuse what there is no room for, rather than drop its head?"""
        return self._rejects

    @property
    def exclusive(self) -> bool:
        return self.exclusive_to is not None

    @guarded
    def __len__(self) -> int:
        return len(self._backing)

    @property
    @guarded
    def unacknowledged(self) -> int:
        return self._backing.pending_count

    # -- in ----------------------------------------------------------------------------------------------------------

    @guarded
    def has_room(self, count: int, size: int) -> bool:
        """Is there room for so many messages and bytes more?"""
        most, most_bytes = self.arguments.max_length, self.arguments.max_length_bytes
        there, there_bytes = self.filled()
        return (most is None or there + count <= most) and (most_bytes is None or there_bytes + size <= most_bytes)

    def filled(self) -> tuple[int, int]:
        """Messages and bytes that count for a limit that rejects: ready ones, and those on their way by a transaction that
        no consumer will take at once."""
        with self._lock:
            coming = size = 0
            if self._coming:
                coming = max(0, self._coming - self.consumers.room())
                size = self._coming_bytes * coming // self._coming
            return len(self._backing) + coming, self._backing.ready_bytes() + size

    def expect(self, entries: list[Entry]) -> None:
        """They are on their way by a transaction, as dead letters are."""
        with self._lock:
            self._coming += len(entries)
            self._coming_bytes += sum(entry.body_size for entry in entries)

    def came(self, entries: list[Entry]) -> None:
        """They are ready, or will not come. With the engine's lock, by whoever made them ready."""
        self._coming -= len(entries)
        self._coming_bytes -= sum(entry.body_size for entry in entries)

    @guarded
    def admit(self, entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Those that there is room for, and those that the overflow rejects; these are refused."""
        taken, rejected = self.sift(entries)
        if rejected:
            self.refuse(rejected)
        return taken, rejected

    @guarded
    def refuse(self, entries: list[Entry]) -> None:
        """There was no room for them."""
        if self.arguments.overflow == "reject-publish-dlx":
            self._owner.dead_letter(self, entries, MAXLEN, pending=False)

    @guarded
    def sift(self, entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Those that there is room for, and those that the overflow rejects."""
        if not self._rejects:
            return entries, []
        self.expire()
        most, most_bytes = self.arguments.max_length, self.arguments.max_length_bytes
        count, size = self.filled()
        taken: list[Entry] = []
        rejected: list[Entry] = []
        for entry in entries:
            if (most is not None and count + 1 > most) or (
                most_bytes is not None and size + entry.body_size > most_bytes
            ):
                rejected.append(entry)
            else:
                taken.append(entry)
                count += 1
                size += entry.body_size
        return taken, rejected

    @guarded
    def deliver(self, entries: list[Entry]) -> Delivered:
        """Messages arrive; they are this queue's own objects from now on. Raises DiskFullError before anything is done."""
        count = len(entries)
        if not self._seqs.available(count):
            self._store.reserve(self.stored, count)
        elif self._seqs.asking:
            self._owner.wake()  # a reservation for later: have it synced before somebody has to wait for it
        self._store.committer.check_publish()
        if self._rejects and count > 1 and self.consumers.waiting():
            # Each makes room for the next when a consumer takes it.
            each = [self._deliver([entry]) for entry in entries]
            return Delivered([entry for done in each for entry in done.rejected], any(done.journaled for done in each))
        return self._deliver(entries)

    def _deliver(self, entries: list[Entry]) -> Delivered:
        rejected: list[Entry] = []
        if self._rejects:
            entries, rejected = self.admit(entries)
            if not entries:
                return Delivered(rejected, False)
        count = len(entries)
        self.published += count
        with self._lock:
            place_entries(entries, self._seqs.take(count), self.highest, self._mask, self.ttl_us)
            journaled = False
            while entries and self.consumers.waiting() and self._backing.is_empty():
                left, handed = self._hand_over(entries)
                journaled = journaled or handed
                if len(left) == len(entries):
                    break
                entries = left  # of a large batch, or for consumers of a lower priority: another round
            if entries and not self._is_pointless():
                self._backing.publish(entries)
                journaled = journaled or any(entry.flags & PERSISTENT for entry in entries)
                self._arrived(entries)
        if self.consumers.waiting():  # they were dealt a part, and can take more
            self.run()
        elif self._decorations is not None:
            self._tell_state()
        return Delivered(rejected, journaled)

    @guarded
    def accept(self, entries: list[Entry]) -> None:
        """Messages came to the backing queue by another way: fan-out, a transaction."""
        self.published += len(entries)
        if self.consumers.waiting():
            # Who waits gets them first; limits and times to live are for what stays.
            expiring, self._expiring = self._expiring, False
            self.run()
            self._expiring = self._expiring or expiring
        self._arrived(entries)
        self.run()

    def _arrived(self, entries: list[Entry]) -> None:
        if not self._expiring and some_expire(entries):
            self._expiring = True
        if self._limited and not self._rejects:
            self._drop_head()
        if self._expiring:
            self.expire()

    def _is_pointless(self) -> bool:
        """Nobody took it at once, and it may not wait."""
        return self.ttl_us == 0 and self.arguments.dead_letter_exchange is None

    def _hand_over(self, entries: list[Entry]) -> tuple[list[Entry], bool]:
        """Straight to consumers that wait: what they did not take, and whether anything was journaled."""
        # No more at once than one consumer takes, or it would be blocked for having no room when it has; and no more bytes
        # than in a round of `run`: they become frames, which are in RAM beside them.
        shares = self.consumers.deal(min(fitting(entries, MOST_BYTES_AT_ONCE), MOST_AT_ONCE))
        taken = sum(len(positions) for _, positions in shares)
        if not taken:
            return entries, False
        kept = [entry for consumer, positions in shares if not consumer.no_ack for entry in _pick(entries, positions)]
        if kept:
            self._backing.publish_delivered(kept if len(shares) == 1 else sorted(kept, key=lambda entry: entry.seq))
        self._send(shares, entries)
        return entries[taken:], any(entry.flags & PERSISTENT for entry in kept)

    # -- out ---------------------------------------------------------------------------------------------------------

    def _send(self, shares: Shares, entries: list[Entry]) -> None:
        for consumer, positions in shares:
            part = _pick(entries, positions)
            if not consumer.no_ack:
                consumer.outstanding += len(part)
            self.delivered += len(part)
            consumer.receiver.send(consumer, part)

    @guarded
    def run(self) -> None:
        """Deliver as long as there are messages and consumers that can take them."""
        if self._running or self.deleted:
            return
        self._running = True
        behind = False
        try:
            while self.consumers.waiting() and not self._backing.is_empty():
                now = _now() if self._expiring else 0  # one time for a batch: what is left at the head is good
                if now:
                    behind = self.expire(now)
                    if behind or self._backing.is_empty():
                        break  # no message is no reason to take a consumer for blocked
                shares = self.consumers.deal(min(len(self._backing), MOST_AT_ONCE))
                if not shares:
                    break
                with self._lock:
                    if not self._run_batch(shares, now):
                        break
        finally:
            self._running = False
        if self._expiring and not behind:
            self.expire()  # what is at the head now may have been behind a message without a time
        if self._decorations is not None:
            self._tell_state()

    def _tell_state(self) -> None:
        """Tell the decorators who can take a message, and whether there is one."""
        if self._decorations is not None and not self.deleted:
            self._decorations.consumer_state(self.consumers.highest(), self._backing.is_empty())

    def _run_batch(self, shares: Shares, now: int) -> bool:
        """Whether there was a message, though perhaps one that expired (`now` is 0 where none do)."""
        count = sum(len(positions) for _, positions in shares)
        # A dead letter is acked together with its arrival elsewhere (rule 4), not when it is fetched.
        may_bury = now > 0 and self.arguments.dead_letter_exchange is not None
        without_ack = all(consumer.no_ack for consumer, _ in shares) and not may_bury and not self._has_returned()
        fetched = self._backing.fetch(count, not without_ack, MOST_BYTES_AT_ONCE)
        if without_ack:
            self._owner.wake()
        gone = set(self._limits.expired_among(fetched, now)) if now else set()
        entries = [entry for entry in fetched if entry.seq not in gone] if gone else fetched
        if len(entries) < count:
            shares = self.consumers.take_back(shares, len(entries))
        if gone:
            self._bury(fetched, gone, pending=not without_ack)
        self._send(shares, entries)
        if not without_ack:
            settled = [
                entry.seq for consumer, positions in shares if consumer.no_ack for entry in _pick(entries, positions)
            ]
            if settled:
                self._backing.ack(settled)
                self._owner.wake()
        return bool(fetched)

    def _bury(self, entries: list[Entry], gone: set[int], *, pending: bool) -> None:
        """Messages that expired while others before them were fetched."""
        dead = [entry for entry in entries if entry.seq in gone]
        self._limits.expired += len(dead)
        self._end(dead, EXPIRED, pending=pending)

    def _end(self, entries: list[Entry], reason: str, *, pending: bool) -> None:
        """To the dead-letter exchange, or nowhere."""
        has_exchange = self.arguments.dead_letter_exchange is not None
        if has_exchange and self._owner.dead_letter(self, entries, reason, pending=pending):
            return
        if pending:
            self._backing.ack(seqs_of(entries))
            self._owner.wake()

    @guarded
    def get(self, no_ack: bool) -> tuple[Entry, bool] | None:
        """For basic.get: a message, and whether it was delivered before."""
        self.used()
        while self._expiring and self.expire():
            pass  # however many there are: this one has to be good
        with self._lock:
            keep = not no_ack or self._has_returned()
            entries = self._backing.fetch(1, ack_required=keep)
            if not entries:
                return None
            redelivered = self.is_redelivered(entries[0])
            if no_ack and keep:
                self._backing.ack(seqs_of(entries))
        self.gotten += 1
        if no_ack:
            self._owner.wake()
        if self._expiring:
            self.expire()
        self._tell_state()
        return entries[0], redelivered

    def _has_returned(self) -> bool:
        """Then a fetch has to wait for its ack until the message is on its way: an acked one has no past."""
        return bool(self._backing.returned)

    def is_redelivered(self, entry: Entry) -> bool:
        return entry.seq < self._backing.redelivered_below or entry.seq in self._backing.returned

    @property
    def redelivered_below(self) -> int:
        return self._backing.redelivered_below

    @property
    def returned(self) -> Any:
        return self._backing.returned

    # -- settling ----------------------------------------------------------------------------------------------------

    @guarded
    def ack(self, seqs: list[int]) -> None:
        if self.deleted:
            return
        with self._lock:
            self.acked += len(self._backing.ack(seqs))
        self._owner.wake()

    @guarded
    def reject(self, seqs: list[int]) -> None:
        """Not wanted, and not to be tried again."""
        if self.deleted:
            return
        with self._lock:
            self._settle_dead(seqs, REJECTED)
        self._owner.wake()

    def _settle_dead(self, seqs: list[int], reason: str) -> None:
        if self.arguments.dead_letter_exchange is None:
            self._backing.ack(seqs)
            return
        entries, rest = DeadAtOnce().pending(self._backing, seqs)
        self._end(entries, reason, pending=True)
        if rest:  # others have their turn in between
            self._owner.later(0, functools.partial(self._settle_rest, rest, reason))

    def _settle_rest(self, seqs: list[int], reason: str) -> None:
        if not self.deleted:
            with contextlib.suppress(QueueCrashed):
                self._settle_more(seqs, reason)
                self._owner.wake()

    @guarded
    def _settle_more(self, seqs: list[int], reason: str) -> None:
        with self._lock:
            self._settle_dead(seqs, reason)

    @guarded
    def requeue(self, seqs: list[int]) -> None:
        """Back to where they were."""
        if self.deleted:
            return
        with self._lock:
            spent = self._limits.over_delivery_limit(self._backing, seqs)
            if spent:
                self._settle_dead(spent, DELIVERY_LIMIT)
                gone = set(spent)
                seqs = [seq for seq in seqs if seq not in gone]
            self.redelivered += len(self._backing.requeue(seqs))
        self.came_back()

    @guarded
    def came_back(self) -> None:
        """Messages that somebody had are ready again: limits and times to live count for them, and consumers get them."""
        if self.deleted:
            return
        with self._lock:
            if self._limited and not self._rejects:
                self._drop_head()
        self._expiring = True
        self._owner.wake()
        self.run()

    def relieve(self, consumer: Consumer, count: int) -> None:
        """It has so many fewer, because they are requeued next."""
        consumer.outstanding -= count
        self.consumers.unblock(consumer)

    @guarded
    def settled(self, consumer: Consumer, count: int) -> None:
        """The channel settled so many of a consumer's messages: it may have room again."""
        consumer.outstanding -= count
        if consumer.blocked and self.consumers.unblock(consumer):
            self.run()

    @guarded
    def unblock(self, consumer: Consumer) -> None:
        """Its channel has room again."""
        if self.consumers.unblock(consumer):
            self.run()

    # -- consumers ---------------------------------------------------------------------------------------------------

    @guarded
    def consume(self, consumer: Consumer) -> None:
        consumer.queue = self
        self.consumers.add(consumer)
        self._stop_unused_timer()

    @guarded
    def cancel(self, consumer: Consumer) -> None:
        """It gets nothing more. The last one takes an auto-delete queue with it."""
        if not self.consumers.remove(consumer):
            return
        if not len(self.consumers):
            if self.auto_delete and not self.deleted:
                self._owner.remove_queue(self)
                return
            self.used()
        self.run()

    def monitor(self, sender: Sender) -> None:
        """Have it told when the queue goes; it tells the queue when it goes itself."""
        self._monitors.add(sender)

    def sender_gone(self, sender: Any) -> None:
        """Its consumers leave. What it had was requeued before."""
        self._monitors.discard(sender)
        for consumer in list(self.consumers):
            if consumer.receiver is sender:
                self.cancel(consumer)

    # -- limits and times --------------------------------------------------------------------------------------------

    def _drop_head(self) -> None:
        """Bring the queue back to its limit; what is pushed out is a dead letter."""
        if not self._rejects:
            with self._lock:
                self._push_out()

    def _push_out(self) -> None:
        backing, arguments = self._backing, self.arguments
        while not backing.is_empty():
            over = len(backing) - arguments.max_length if arguments.max_length is not None else 0
            if over <= 0:
                if arguments.max_length_bytes is None or backing.ready_bytes() <= arguments.max_length_bytes:
                    return
                over = 1
            if arguments.dead_letter_exchange is None:
                self._limits.overflowed += len(backing.drop(min(over, MOST_AT_ONCE)))
                continue
            entries = backing.fetch(min(over, MOST_AT_ONCE), True, DEAD_BYTES_AT_ONCE)
            if not entries:
                return
            self._limits.overflowed += len(entries)
            self._end(entries, MAXLEN, pending=True)

    @guarded
    def expire(self, now: int = 0) -> bool:
        """Expired messages leave from the head; the next one sets the timer. Whether it expired as well: there were more
        than may die at once, and the timer goes on with them."""
        backing = self._backing
        now = now or _now()
        with self._lock:
            head = backing.peek()
            if head is not None and 0 < head.expiry <= now:
                if self.arguments.dead_letter_exchange is None:
                    self._limits.drop_expired(backing, now)
                    self._owner.wake()
                else:
                    dead = DeadAtOnce().expired(backing, now)
                    self._limits.expired += len(dead)
                    self._end(dead, EXPIRED, pending=True)
                head = backing.peek()
        if head is None:
            self._expiring = backing.depth() > 0
        elif head.expiry:
            self._expire_at(head.expiry)
            return head.expiry <= now
        return False

    def _expire_at(self, due: int) -> None:
        if self._expiry_timer is not None:
            if self._expiry_due - due <= 1000:
                return
            self._expiry_timer.cancel()
        self._expiry_due = due
        self._expiry_timer = self._owner.later(max(0.0, (due - _now()) / 1e6) + 0.001, self._expiry_fired)

    def _expiry_fired(self) -> None:
        self._expiry_timer = None
        if not self.deleted:
            with contextlib.suppress(QueueCrashed):
                self.expire()
                self.run()  # there is nothing to deliver, and it may be empty: decorators are told

    def used(self) -> None:
        """Somebody looked at it: an expiring queue has its time again."""
        self._stop_unused_timer()
        if self.arguments.expires_ms is not None and not len(self.consumers) and not self.deleted:
            self._unused_timer = self._owner.later(self.arguments.expires_ms / 1000, self._unused)

    def _stop_unused_timer(self) -> None:
        if self._unused_timer is not None:
            self._unused_timer.cancel()
            self._unused_timer = None

    def _unused(self) -> None:
        self._unused_timer = None
        if self._owner.is_leased(self):
            self.used()
        elif not self.deleted and not len(self.consumers):
            self._owner.remove_queue(self)

    # -- the end -----------------------------------------------------------------------------------------------------

    @guarded
    def purge(self) -> int:
        with self._lock:
            count = self._backing.purge()
        self._owner.wake()
        self._tell_state()
        return count

    def stop(self) -> None:
        """The queue is gone: no timer fires any more, consumers are told."""
        self.deleted = True
        self._stop_unused_timer()
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
            self._expiry_timer = None
        for consumer in list(self.consumers):
            self.consumers.remove(consumer)
            consumer.receiver.cancelled(consumer)
        self._monitors.queue_gone(self)
        self.shut_down()

    def shut_down(self) -> None:
        """Its decorators care for it no more."""
        if self._decorations is not None:
            self._decorations.shut_down()
            self._decorations = None

    @guarded
    def info(self) -> dict[str, Any]:
        """For the status page and, later, the management API; RabbitMQ's names."""
        with self._lock:
            inside = self._backing.info()
        return {
            "name": self.name,
            "durable": self.durable,
            "auto_delete": self.auto_delete,
            "exclusive": self.exclusive,
            "arguments": dict(self.stored.record.arguments),
            "messages": len(self._backing) + self._backing.pending_count,
            "messages_ready": len(self._backing),
            "messages_unacknowledged": self._backing.pending_count,
            "consumers": len(self.consumers),
            "published": self.published,
            "delivered": self.delivered,
            "acked": self.acked,
            "redelivered": self.redelivered,
            "expired": self._limits.expired,
            "overflowed": self._limits.overflowed,
            "backing": inside,
            **(self._decorations.info() if self._decorations is not None else {}),
        }


def _now() -> int:
    return time.time_ns() // 1000


def _pick(entries: list[Entry], positions: list[int]) -> list[Entry]:
    if positions and positions[-1] - positions[0] == len(positions) - 1:
        return entries[positions[0] : positions[-1] + 1]
    return [entries[position] for position in positions if position < len(entries)]
