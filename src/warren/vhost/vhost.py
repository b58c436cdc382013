"""One vhost of the broker: its queues, exchanges and bindings, and the ways between them.

It is the same object in a process of its own, inline, and in tests. Everything but commits and upkeep of the store runs on
one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from warren.amqp.errors import AmqpError, check_utf8
from warren.errors import DiskFullError, QueueArgumentError, WarrenError
from warren.kernel.entry import PERSISTENT, Entry, seqs_of
from warren.kernel.journal_codec import CHECKOUT
from warren.queueing.arguments import ArgumentDifference, QueueArguments, known_arguments
from warren.queueing.credit_flow import CreditFlow
from warren.queueing.dead_letter import Death
from warren.queueing.decorators import BUILT_IN, load_decorators
from warren.queueing.delayed import PREFIX as DELAYED_PREFIX
from warren.queueing.delayed import DelayedQueue
from warren.queueing.guard import QueueCrashed
from warren.queueing.message_times import MAX_DELAY_MS, delay_ms, expiration_us
from warren.queueing.owner import Cancellable
from warren.queueing.properties import decode_head, priority_of, rewritten
from warren.queueing.queue_process import QueueProcess
from warren.routing.binding import Binding
from warren.routing.exchange import Exchange
from warren.routing.policies import Policy, effective, queue_arguments
from warren.routing.router import Removed, Router
from warren.storage.settings import EngineSettings
from warren.storage.vhost_store import StoredQueue, VhostStore
from warren.vhost.arrivals import Arrivals
from warren.vhost.collector import collector_paused
from warren.vhost.commits import Commits
from warren.vhost.data_requests import DataRequests
from warren.vhost.move import Move
from warren.vhost.operator_requests import OperatorRequests

log = logging.getLogger("warren.vhost")

QUORUM_DELIVERY_LIMIT = 20
_MOVE_RETRY_SECONDS = 0.002
_RESTART_RETRY_SECONDS = 0.2  # of a queue for which the disk had no room
_GOODBYE_SECONDS = 2.0  # that clients have to answer when the broker stops
DISK_RESERVE = "disk reserve"  # an alarm: the store takes no publishes until it has its reserve of disk again
QUEUE_RESTARTS, QUEUE_RESTART_SECONDS = 5, 10.0


class Vhost:
    def __init__(
        self,
        data_directory: str,
        name: str,
        *,
        durability: str = "fsync",
        settings: EngineSettings | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        max_message_size: int = 134_217_728,
        consumer_timeout: float = 0.0,
        queue_type_aliases: Mapping[str, str] | None = None,
        queue_decorators: Sequence[str] = tuple(BUILT_IN),
        failed: Callable[[WarrenError], None] = lambda error: None,
    ) -> None:
        self.name = name
        self.max_message_size = max_message_size
        self.consumer_timeout = consumer_timeout  # seconds that a delivery may wait for its ack; 0: for ever
        self.clock = time.monotonic
        self.decorators = load_decorators(queue_decorators)
        self._aliases = {"quorum": "classic"} if queue_type_aliases is None else dict(queue_type_aliases)
        self._loop = loop or asyncio.get_running_loop()
        with collector_paused():
            # Absolute: executors of Spark are told where it is, and have a working directory of their own.
            self.store = VhostStore(os.path.abspath(data_directory), name, durability=durability, settings=settings)
        self.commits = Commits(self.store, self._loop, self._on_failed, partial(self.set_alarm, DISK_RESERVE))
        self.router = Router(name)
        self.arrivals = Arrivals(self)
        self.queues: dict[str, QueueProcess] = {}
        self._exclusive: dict[object, dict[str, None]] = {}  # connection -> the names of its own queues
        self.connections: set[Any] = set()
        self._waiting: list[Move] = []  # moves that cannot begin yet, in order
        self._awaited: set[int] = set()  # the uids of their targets
        self.departing: set[Any] = set()  # told to go, and not gone yet
        self.reply_channels: dict[str, Any] = {}  # token -> channel that consumes from amq.rabbitmq.reply-to
        self.alarms: set[str] = (
            set()
        )  # the node's "memory" and "disk", the store's own: publishers wait while there are any
        self.failure: WarrenError | None = None
        self.goodbye = ""  # why clients are sent away; who comes now is sent away too
        self.stopped = False  # nothing acts any more
        self.credit = CreditFlow(self.store, self.commits, self.later, is_short=lambda: bool(self.alarms))
        self.started_at = time.time()
        self._failed = failed
        self._changed = False  # the metadata has a group that is not committed
        self._crashes: dict[str, deque[float]] = {}  # when a queue failed
        self.down: set[str] = set()  # queues that failed too often
        self.policies: dict[str, Policy] = {}
        self.operator_policies: dict[str, Policy] = {}
        self.delayed: dict[str, DelayedQueue] = {}  # by exchange
        with collector_paused():
            self._recover()
        self.data_requests = DataRequests(self)
        self.data_requests.start()
        self.operator_requests = OperatorRequests(self)
        if consumer_timeout:
            self._loop.call_later(consumer_timeout / 4, self._check_timeouts)

    # -- life --------------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Queues, then exchanges and bindings, and only then may queues act: they may send to each other."""
        metadata = self.store.metadata
        for kept, operator in ((self.policies, False), (self.operator_policies, True)):
            kept.update({record.name: Policy(**asdict(record)) for record in metadata.policies(operator)})
        for stored in list(self.store.queues.values()):
            if not stored.name.startswith(DELAYED_PREFIX):
                self._add(stored, None, stored.record.auto_delete)
        for record in metadata.exchanges():
            exchange = Exchange(
                name=record.name,
                type=record.type,
                durable=True,
                auto_delete=record.auto_delete,
                internal=record.internal,
                arguments=dict(record.arguments),
            )
            self.router.declare(exchange)
            self._add_delayed(exchange)
            self._apply_to_exchange(exchange.name)
        for row in metadata.binding_rows():
            self.router.bind(Binding(*row))
        for queue in list(self.queues.values()):
            with contextlib.suppress(QueueCrashed):
                queue.begin()

    async def stop(self) -> None:
        """A clean stop: connections are closed by their owner before."""
        self.stopped = True
        for queue in self.queues.values():
            queue.deleted = True  # no timer acts from now on
            queue.shut_down()
        for delayed in self.delayed.values():
            delayed.close()
        await self.data_requests.stop()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.end_turn()
        self.commits.stop()
        self.store.close()

    def _on_failed(self, error: WarrenError) -> None:
        log.error("vhost %r failed: %s", self.name, error)
        self.failure = error
        self._failed(error)

    def set_alarm(self, resource: str, is_set: bool) -> None:
        """Publishers wait while memory or disk is short; consumers go on. Whoever sets an alarm has a name of its own for it:
        the node's disk may have room enough while the store has not got its reserve back, and the reverse."""
        if is_set == (resource in self.alarms):
            return
        log.warning("vhost %r: %s alarm %s", self.name, resource, "set" if is_set else "cleared")
        (self.alarms.add if is_set else self.alarms.discard)(resource)
        for connection in list(self.connections):
            connection.alarm_changed()

    def later(self, seconds: float, callback: Callable[[], None]) -> Cancellable:
        return self._loop.call_later(seconds, callback)

    def wake(self) -> None:
        self.commits.wake()

    def _check_timeouts(self) -> None:
        """Close the channels of consumers that have kept a message for too long."""
        for connection in list(self.connections):
            connection.check_timeouts()
        if self.failure is None and not self.stopped:
            self._loop.call_later(self.consumer_timeout / 4, self._check_timeouts)

    def _changing(self) -> None:
        """What this turn of the loop changes in the metadata is one commit; answers leave behind it."""
        if not self._changed:
            self._changed = True
            with self.store.lock:
                self.store.metadata.begin_group()
            self._loop.call_soon(self.end_turn)

    def end_turn(self) -> None:
        """Make changes of the metadata safe; called before anything is sent."""
        if self._changed:
            self._changed = False
            try:
                with self.store.lock:
                    self.store.metadata.end_group()
            except WarrenError as error:
                self._on_failed(error)
                raise

    # -- queues ------------------------------------------------------------------------------------------------------

    def _add(self, stored: StoredQueue, exclusive_to: object | None, auto_delete: bool) -> QueueProcess:
        arguments = self._effective(stored)
        queue = QueueProcess(self, stored, arguments, exclusive_to=exclusive_to, auto_delete=auto_delete)
        queue.declared = QueueArguments.parse(known_arguments(stored.record.arguments))
        self.queues[stored.name] = queue
        if exclusive_to is not None:
            self._exclusive.setdefault(exclusive_to, {})[stored.name] = None
        self.router.add_queue(stored.name)
        return queue

    def _effective(self, stored: StoredQueue) -> QueueArguments:
        """Its arguments, with what policies and its type add."""
        said = effective(self.policies.values(), self.operator_policies.values(), "queue", stored.name)
        arguments = queue_arguments(said, known_arguments(stored.record.arguments))
        if arguments.get("x-queue-type") == "quorum":
            arguments.setdefault("x-delivery-limit", QUORUM_DELIVERY_LIMIT)
        return QueueArguments.parse(arguments)

    def _apply_to_exchange(self, name: str) -> None:
        said = effective(self.policies.values(), self.operator_policies.values(), "exchange", name)
        alternate = said.get("alternate-exchange")
        self.router.set_policy_alternate(name, alternate if isinstance(alternate, str) else None)

    def set_policy(self, policy: Policy, *, operator: bool = False) -> None:
        """Make or replace a policy; queues and exchanges follow it at once. It is durable when this returns."""
        with self.store.lock:
            self.store.metadata.put_policy(policy, operator)
        (self.operator_policies if operator else self.policies)[policy.name] = policy
        self._apply_policies()

    def clear_policy(self, name: str, *, operator: bool = False) -> None:
        with self.store.lock:
            self.store.metadata.delete_policy(name, operator)
        (self.operator_policies if operator else self.policies).pop(name, None)
        self._apply_policies()

    def _apply_policies(self) -> None:
        for queue in list(self.queues.values()):
            arguments = self._effective(queue.stored)
            if arguments != queue.arguments:
                with contextlib.suppress(QueueCrashed):
                    queue.apply(arguments)
                    queue.expire()
        for name in list(self.router.exchanges):
            self._apply_to_exchange(name)

    def queue(self, name: str) -> QueueProcess:
        queue = self.queues.get(name)
        if queue is None and name in self.down:
            raise AmqpError(404, f"queue '{name}' in vhost '{self.name}' failed too often and is down")
        if queue is None:
            raise AmqpError(404, f"no queue '{name}' in vhost '{self.name}'")
        return queue

    def declare_queue(
        self,
        name: str,
        *,
        durable: bool,
        exclusive_to: object | None,
        auto_delete: bool,
        arguments: dict[str, Any],
    ) -> QueueProcess:
        """A new queue. Requires: there is none of this name."""
        if name in self.down:
            self.queue(name)
        try:
            QueueArguments.parse(known_arguments(arguments))
        except QueueArgumentError as error:
            raise AmqpError(406, f"invalid arg for queue '{name}' in vhost '{self.name}': {error}") from None
        self._check_type(name, durable and exclusive_to is None and not auto_delete, arguments)
        # An exclusive queue goes with its connection: no restart may find it.
        kept = durable and exclusive_to is None
        if kept:
            self._changing()
        try:
            stored = self.store.declare(name, durable=kept, arguments=arguments, auto_delete=auto_delete)
        except TypeError as error:
            raise AmqpError(406, f"queue '{name}' in vhost '{self.name}': {error}") from None
        self.wake()
        queue = self._add(stored, exclusive_to, auto_delete)
        queue.declared_durable = durable
        return queue

    def _check_type(self, name: str, is_kept: bool, arguments: dict[str, Any]) -> None:
        wanted = arguments.get("x-queue-type", "classic")
        if wanted == "classic":
            return
        where = f"queue '{name}' in vhost '{self.name}'"
        if wanted not in self._aliases:
            raise AmqpError(540, f"{where}: x-queue-type '{wanted}' is switched off; declare it as 'classic'")
        if not is_kept:
            raise AmqpError(406, f"invalid property for {where}: a {wanted} queue is durable, shared and stays")
        log.warning(
            "%s is declared as %s; a durable classic queue with delivery-limit %s serves it",
            where,
            wanted,
            arguments.get("x-delivery-limit", QUORUM_DELIVERY_LIMIT),
        )

    def check_same_queue(
        self, queue: QueueProcess, durable: bool, exclusive: bool, auto_delete: bool, arguments: dict[str, Any]
    ) -> None:
        """Raises AmqpError where a redeclare asks for another queue."""
        where = f"for queue '{queue.name}' in vhost '{self.name}'"
        if exclusive != queue.exclusive:
            raise AmqpError(
                405,
                f"cannot obtain exclusive access to locked queue '{queue.name}' in vhost '{self.name}'. It could be "
                "originally declared on another connection or the exclusive property value does not match that of the "
                "original declaration.",
            )
        for what, received, current in (
            ("durable", durable, queue.declared_durable),
            ("auto_delete", auto_delete, queue.auto_delete),
        ):
            if received != current:
                raise AmqpError(
                    406,
                    f"inequivalent arg '{what}' {where}: received '{str(received).lower()}' but current is "
                    f"'{str(current).lower()}'",
                )
        try:
            wanted = QueueArguments.parse(known_arguments(arguments))
        except QueueArgumentError as error:
            raise AmqpError(406, f"invalid arg {where}: {error}") from None
        differences = queue.declared.differences(wanted)
        # Not one of `QueueArguments`, but who asks for a delivery limit by it would get none here.
        types = [_queue_type(found) for found in (queue.stored.record.arguments, arguments)]
        if types[0] != types[1]:
            differences.append(ArgumentDifference("x-queue-type", *types))
        for argument, ours, theirs in differences:
            raise AmqpError(
                406,
                f"inequivalent arg '{argument}' {where}: received {_shown(theirs)} but current is {_shown(ours)}",
            )

    def remove_queue(self, queue: QueueProcess) -> int:
        """Delete it, with everything in it and all its bindings; how many messages were ready."""
        if self.queues.get(queue.name) is not queue:
            return 0
        del self.queues[queue.name]
        if queue.exclusive_to is not None:
            self._exclusive.get(queue.exclusive_to, {}).pop(queue.name, None)
        if queue.durable:
            self._changing()
        removed = self.router.remove_queue(queue.name)
        self._forget(removed)
        queue.stop()
        return self.store.delete(queue.name)

    def queue_crashed(self, queue: QueueProcess, error: Exception) -> None:
        """Start it anew from what is on disk; too often, and it stays down. A queue that is stopped and still among the
        queues is about to be restarted."""
        if self.queues.get(queue.name) is not queue or queue.deleted:
            return
        queue.stop()
        self._begin_anew(queue, error)

    def _begin_anew(self, queue: QueueProcess, error: Exception) -> None:
        log.error("queue %r in vhost %r failed and is restarted", queue.name, self.name, exc_info=error)
        now = time.monotonic()
        crashes = self._crashes.setdefault(queue.name, deque())
        crashes.append(now)
        while now - crashes[0] > QUEUE_RESTART_SECONDS:
            crashes.popleft()
        if len(crashes) > QUEUE_RESTARTS:
            log.error("queue %r in vhost %r failed %s times and stays down", queue.name, self.name, len(crashes))
            del self.queues[queue.name]
            self.down.add(queue.name)
        elif self.store.holds_lock():  # it failed inside of another queue's operation: the restart waits for a commit
            self._loop.call_soon(self._restart, queue)
        else:
            self._restart(queue)

    def _restart(self, queue: QueueProcess) -> None:
        if self.stopped or self.queues.get(queue.name) is not queue:  # it was deleted meanwhile
            return
        try:
            stored = self.store.restart_queue(queue.name)
            queue.stop()  # who came since it failed is told, too
            restarted = self._add(stored, queue.exclusive_to, queue.auto_delete)
        except DiskFullError as error:
            log.warning("queue %r in vhost %r is restarted when there is room: %s", queue.name, self.name, error)
            self.later(_RESTART_RETRY_SECONDS, partial(self._restart, queue))
        except WarrenError:
            self.wake()  # a store that failed is found by the next commit, and the vhost restarted
        except Exception as error:
            self._begin_anew(queue, error)
        else:
            restarted.declared_durable = queue.declared_durable
            with contextlib.suppress(QueueCrashed):
                restarted.begin()

    def _is_restarting(self, name: str) -> bool:
        queue = self.queues.get(name)
        return queue is not None and queue.deleted

    def is_leased(self, queue: QueueProcess) -> bool:
        uid = queue.stored.uid
        checkouts = self.store.ledger.table(CHECKOUT).values()
        return any(int(sid) >> 8 == uid for value in checkouts for sid in value["ranges"])

    def delete_down(self, name: str) -> int:
        """Delete a queue that failed too often."""
        self.down.discard(name)
        self._crashes.pop(name, None)
        self._forget(self.router.remove_queue(name))
        return self.store.delete(name)

    def release_exclusive(self, connection: object) -> None:
        """The connection is gone, and with it its queues."""
        for name in list(self._exclusive.get(connection, ())):
            if name in self.queues:  # not one that failed too often
                self.remove_queue(self.queues[name])
        self._exclusive.pop(connection, None)

    # -- exchanges and bindings --------------------------------------------------------------------------------------

    def declare_exchange(self, exchange: Exchange) -> None:
        self.router.declare(exchange)
        self._add_delayed(exchange)
        self._apply_to_exchange(exchange.name)
        if exchange.durable:
            self._changing()
            with self.store.lock:
                self.store.metadata.put_exchange(exchange)

    def delete_exchange(self, name: str, if_unused: bool) -> None:
        self._forget(self.router.delete(name, if_unused))

    def bind(self, binding: Binding) -> None:
        """Requires: its ends are there."""
        if self._is_durable(binding):
            check_utf8("routing key", binding.routing_key)
        if self.router.bind(binding) and self._is_durable(binding):
            self._changing()
            with self.store.lock:
                self.store.metadata.put_binding(binding)

    def unbind(self, binding: Binding) -> None:
        self._forget(self.router.unbind(binding))

    def _is_durable(self, binding: Binding) -> bool:
        if not self.router.exchanges[binding.source].durable:
            return False
        if binding.destination_kind == "queue":
            return self.queues[binding.destination].durable
        return self.router.exchanges[binding.destination].durable

    def _forget(self, removed: Removed) -> None:
        if not removed.exchanges and not removed.bindings:
            return
        for exchange in removed.exchanges:
            delayed = self.delayed.pop(exchange.name, None)
            if delayed is not None:
                delayed.close()
                self.store.delete(delayed.stored.name)
        self._changing()
        metadata = self.store.metadata
        with self.store.lock, metadata.transaction():
            metadata.delete_bindings(removed.bindings)
            for exchange in removed.exchanges:
                if exchange.durable:
                    metadata.delete_exchange(exchange.name)

    # -- messages ----------------------------------------------------------------------------------------------------

    def dead_letter(self, queue: QueueProcess, entries: list[Entry], reason: str, *, pending: bool) -> bool:
        arguments = queue.arguments
        exchange = arguments.dead_letter_exchange
        if exchange is None or (exchange and exchange not in self.router.exchanges):
            return False
        move = Move()
        for entry in entries:
            death = Death(entry.head, queue.name, reason, exchange, arguments.dead_letter_routing_key)
            names, waits = self.ways(exchange, death.keys, death.headers, death.properties)
            for name in names:
                if death.allows(name):
                    self._add_copy(move, name, death.head, entry)
            for name in waits:
                self._add_delayed_copy(move, name, death.head, entry, delay_ms(death.headers))
        if pending:
            move.acks.append((queue.stored, seqs_of(entries)))
        self._do(move)
        return True

    def ways(
        self, exchange: str, keys: list[str], headers: dict[str, Any], properties: Mapping[str, Any] | None = None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of what the broker publishes: queues, and the delayed exchanges before which it waits."""
        known = partial(dict[str, Any], properties or {})
        if delay_ms(headers):
            return self.router.route_waiting(exchange, keys, partial(dict, headers), known, from_broker=True)
        return self.router.route_many(exchange, keys, partial(dict, headers), known, from_broker=True), ()

    def _add_delayed_copy(self, move: Move, exchange: str, head: bytes, entry: Entry, delay: int) -> None:
        now = time.time_ns() // 1000
        flags = entry.flags & PERSISTENT if self.router.exchanges[exchange].durable else 0
        copy = Entry(0, head, entry.body, flags, now, now + min(delay, MAX_DELAY_MS) * 1000)
        move.delayed.setdefault(self.delayed[exchange], []).append(copy)

    def _add_copy(self, move: Move, name: str, head: bytes, entry: Entry, own_ttl_us: int = -1) -> None:
        """A message that leaves one queue comes to another as a new one. Dead letters have no time to live of their own."""
        target = self.queues.get(name)
        if target is None:
            return
        now = time.time_ns() // 1000
        copy = Entry(0, head, entry.body, entry.flags & PERSISTENT if target.durable else 0, now)
        # The publisher's word: the queue that it leaves may have had fewer priorities, or none.
        copy.level = min(priority_of(head) or 0, target.highest)
        times = [ttl_us for ttl_us in (own_ttl_us, target.ttl_us) if ttl_us >= 0]
        if times:
            copy.expiry = now + min(times)
        rejected: list[Entry] = []
        with contextlib.suppress(QueueCrashed):  # it begins anew, and takes this one
            rejected = target.admit([copy])[1]
        if not rejected:
            target.expect([copy])
            move.arriving.setdefault(target, []).append(copy)

    def _do(self, move: Move) -> None:
        """Publishes and acks as one; the targets learn of it when it is safe. A move that cannot begin yet waits, and behind
        it those with a target of its own: what leaves a queue in order arrives in order."""
        if self.stopped:  # it waited for seq_ids until then: the source still has the messages
            return
        targets = move.targets()
        if not targets.isdisjoint(self._awaited) or not self._begin(move):
            if not self._waiting:
                self._loop.call_later(_MOVE_RETRY_SECONDS, self._begin_waiting)
            self._waiting.append(move)
            self._awaited |= targets

    def _begin_waiting(self) -> None:
        waiting, self._waiting, self._awaited = self._waiting, [], set()
        for move in waiting:
            self._do(move)

    def _begin(self, move: Move) -> bool:
        """False: it cannot begin yet."""

        def committed() -> None:  # by the thread of the commits, with the engine's lock
            for target, entries in move.arriving.items():
                target.came(entries)
            self._loop.call_soon_threadsafe(self._moved, move)

        with self.store.lock:
            # It may have waited. A source that was restarted meanwhile has its messages again, and one that was deleted
            # has taken them with it; a target may have been restarted, or be gone.
            known = self.store.queues
            if any(known.get(queue.name) is not queue for queue, _ in move.acks):
                for target, entries in move.arriving.items():
                    target.came(entries)
                return True
            targets = [(queue.stored, entries) for queue, entries in move.arriving.items()]
            targets += [(delayed.stored, entries) for delayed, entries in move.delayed.items()]
            arriving = [
                (current, entries)
                for stored, entries in targets
                if (current := known.get(stored.name)) is not None and current.uid == stored.uid
            ]
            # No transaction with a queue whose memory is wrong: what fails in the middle of one takes the vhost with it.
            touched = [stored.name for stored, _ in (*arriving, *move.acks)]
            begins = self.store.has_seq_ids(arriving) and not any(map(self._is_restarting, touched))
            if begins:
                self.store.transact_later(arriving, move.acks, committed, move.state)
        self.wake()
        return begins

    def _moved(self, move: Move) -> None:
        if self.stopped:
            return
        for target, entries in move.arriving.items():
            queue = self.queues.get(target.name)  # perhaps restarted meanwhile
            if queue is not None and queue.stored.uid == target.stored.uid:
                with contextlib.suppress(QueueCrashed):  # they are its own by now
                    queue.accept(entries)
        for delayed, entries in move.delayed.items():
            if self.delayed.get(delayed.exchange) is delayed:
                delayed.arrived(entries)
        if move.done is not None:
            move.done()

    def publish_with_state(
        self,
        arriving: dict[QueueProcess, list[Entry]],
        delayed: dict[DelayedQueue, list[Entry]],
        state: tuple[int, str, Any],
        done: Callable[[], None],
    ) -> None:
        """Messages to queues and to delayed exchanges, and a value of the ledger, as one."""
        for queue, entries in arriving.items():
            queue.expect(entries)
        self._do(Move(arriving=arriving, delayed=delayed, state=state, done=done))

    # -- delays ------------------------------------------------------------------------------------------------------

    def _add_delayed(self, exchange: Exchange) -> None:
        if exchange.delayed and exchange.name not in self.delayed:
            self.delayed[exchange.name] = DelayedQueue(
                self.store, exchange.name, exchange.durable, fire=self._fire, later=self.later
            )

    def _fire(self, exchange: str, source: StoredQueue, entries: list[Entry]) -> None:
        """Their time has come: route them now."""
        move = Move()
        for entry in entries:
            head = decode_head(entry.head)
            headers = head.headers
            fired = entry.head
            if delay := delay_ms(headers):
                headers["x-delay"] = -delay  # as the plugin does: it was waited for
                fired = rewritten(entry.head, headers={"x-delay": -delay})
            asked = partial(dict[str, Any], head.properties)
            for name in self.router.route_many(exchange, head.keys, partial(dict, headers), asked, from_broker=True):
                self._add_copy(move, name, fired, entry, expiration_us(head.properties))
        move.acks.append((source, seqs_of(entries)))
        self._do(move)

    def is_reply_name(self, name: str) -> bool:
        """Does a channel wait for replies under this name?"""
        return name.removeprefix("amq.rabbitmq.reply-to.") in self.reply_channels

    # -- names -------------------------------------------------------------------------------------------------------

    def new_name(self) -> str:
        """For a queue that the client left unnamed."""
        while True:
            name = f"amq.gen-{secrets.token_urlsafe(16)}"
            if name not in self.queues:
                return name

    def info(self) -> dict[str, Any]:
        """For the status page."""
        return {
            "name": self.name,
            "state": "failed" if self.failure else "running",
            "pid": os.getpid(),
            "connections": len(self.connections),
            "channels": sum(len(connection.channels) for connection in self.connections),
            "alarms": sorted(self.alarms),
            "queues": self.queue_infos(self.queues.values()),
        }

    @staticmethod
    def queue_infos(queues: Iterable[QueueProcess]) -> list[dict[str, Any]]:
        """Of those that can say it: one that fails here begins anew, and is in the next answer."""
        found = []
        for queue in list(queues):
            with contextlib.suppress(QueueCrashed):
                found.append(queue.info())
        return found


def clients_of(vhost: Vhost) -> int:
    """Clients whose sockets it has, also those that are being sent away."""
    return len(vhost.connections) + len(vhost.departing)


async def close_connections(vhosts: Iterable[Vhost], why: str = "") -> None:
    """Tell all clients why they have to go, give them a moment to answer, then cut them off."""
    why = why or "broker forced connection closure with reason 'shutdown'"
    left = list(vhosts)
    for vhost in left:
        vhost.goodbye = why
        for connection in list(vhost.connections):
            connection.fail(AmqpError(320, why))
    deadline = time.monotonic() + _GOODBYE_SECONDS
    while any(vhost.departing for vhost in left) and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    for vhost in left:
        for connection in list(vhost.departing):
            connection.abort()


def _queue_type(arguments: Mapping[str, object]) -> object:
    """None: a classic one, whether that was said or not."""
    wanted = arguments.get("x-queue-type")
    return None if wanted == "classic" else wanted


def _shown(value: object) -> str:
    return "none" if value is None else f"the value '{value}' of type '{_type_name(value)}'"


def _type_name(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "signedint"
    return "longstr" if isinstance(value, str) else type(value).__name__
