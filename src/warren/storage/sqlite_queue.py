"""The SQL queue that was often proposed and never built: all messages of a queue, bodies too, in one SQLite table.

It does with one table what `VariableQueue` does with q1..q4, delta, segments and stores, and is slower. Its worth is
that every operation is a statement or two, plainly right; so it is the oracle that the others are tested against.

    ready     ORDER BY level DESC, seq         a priority is a column, not a queue of its own
    pending   state = 1, in the same table     there is nothing in RAM but sums, delivery counts and redelivered marks

Durability is that of every queue: publishes, acks, requeues and purges of persistent messages are records in the
vhost's journal, whose stream id carries the level. `queue.db` is their checkpointed form (`queue_database.py`):

1. Changes are made in SQLite's open transaction as they happen. The checkpoint commits it, when nothing is under way in
   the journal and before the floor moves. So the file never knows what the journal could still lose, and the floor
   never passes what the file does not know.
2. A dirty start replays the journal from the floor on over the file: acks delete, publishes that are there already are
   ignored. Files of the journal retire in order, so an ack is never gone while its publish is still read.
3. Payloads of any size are in the publish record, none in the message store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

from warren.kernel.entry import IN_STORE, PERSISTENT, Entry, body_total, entry_ranges, run_within
from warren.kernel.journal_codec import ACK, PURGE, read_publishes
from warren.kernel.overlay import LIVE, Overlay, split_rows
from warren.kernel.ranges import RangeSet
from warren.storage.backing_queue import NO_LIMIT, everything
from warren.storage.context import QueueContext
from warren.storage.layout import journal_path, stream_id
from warren.storage.queue_database import LEASED, PENDING, READY, QueueDatabase
from warren.storage.rates import Rates
from warren.storage.recovery import JournalReplay
from warren.storage.seq_ids import SeqIds

T = TypeVar("T")
_by_seq = attrgetter("seq")

_IN_ORDER = "ORDER BY level DESC, seq LIMIT ?"
_EACH = "WHERE seq IN (SELECT value FROM json_each(?))"
# The plus keeps SQLite from walking through all pending messages: they are found by their seq_ids.
_IN_STATE = f"{_EACH} AND +state = ?"
# By way of the index, which has all that the inner query asks for: no body is passed on the way.
_DELETE_TRANSIENT = "DELETE FROM messages WHERE seq IN (SELECT seq FROM messages WHERE persistent = 0)"
_FOLD_ROWS = 64  # read at once, with their bodies
_SPAN_BYTES = 4 * 1024 * 1024  # one read of the journal


class SqliteQueue:
    """Implements `BackingQueue`. `levels` is the number of priorities, 1 for a queue without."""

    def __init__(
        self, database: QueueDatabase, uid: int, levels: int, seqs: SeqIds, context: QueueContext, durable: bool = True
    ) -> None:
        self.database = database
        self.uid = uid
        self.seqs = seqs
        self.durable = durable
        self._top = levels - 1
        self._context = context
        self._journal = context.journal
        self._ready = 0
        self._ready_bytes = 0  # of bodies
        self._pending = 0  # leased ones too
        self._pending_bytes = 0
        self._salvages = database.salvages
        self._confirmed: list[int] = []
        self._unconfirmed = 0
        self._rates = Rates(context.clock())
        self._disk_reads = 0
        self._disk_writes = 0
        self.counts: dict[int, int] = {}  # as the column delivery_count
        self.returned = RangeSet()  # as the column redelivered
        self.redelivered_below = 0

    # -- life --------------------------------------------------------------------------------------------------------

    def init(self, recovered: dict[str, Any] | None) -> None:
        if recovered is not None:
            self.redelivered_below = recovered["redelivered_below"]
            change = self.database.change
            change(_DELETE_TRANSIENT)
            change("UPDATE messages SET redelivered = 1 WHERE state = ?", PENDING)
            change("UPDATE messages SET state = ? WHERE state IN (?, ?)", READY, PENDING, LEASED)
            leased = recovered["leased"]
            for first, count in zip(leased[::2], leased[1::2], strict=True):
                change("UPDATE messages SET state = ? WHERE seq >= ? AND seq < ?", LEASED, first, first + count)
        self._recount()

    def replay(self, replayed: JournalReplay) -> None:
        """After a dirty stop, before `init`: bring the file to where the journal ends. Twice does no harm."""
        change = self.database.change
        for level in range(self._top + 1):
            sid = stream_id(self.uid, level)
            acks = replayed.acks.get(sid, RangeSet()).pairs()
            for first, count in zip(acks[::2], acks[1::2], strict=True):
                change("DELETE FROM messages WHERE seq >= ? AND seq < ?", first, first + count)
            self._replay_publishes(replayed.overlays[sid], level)
            for seq, count in replayed.counts.get(sid, {}).items():
                change("UPDATE messages SET delivery_count = max(delivery_count, ?) WHERE seq = ?", count, seq)

    def _replay_publishes(self, overlay: Overlay, level: int) -> None:
        rows = overlay.rows_between(0, overlay.last_seq() + 1, len(overlay))
        size = self._context.settings.segment_entries
        for _, number, start, stop, part in split_rows(rows, size, _SPAN_BYTES):
            entries: list[Entry] = []
            damaged: list[tuple[int, int, int]] = []
            read_publishes(part, self._journal.read(number, start, stop), start, entries, damaged)
            for seq, offset, length in damaged:
                path = journal_path(self._journal.directory, number)
                self._context.report(path, offset, length, seq, "publish record")
            for entry in entries:
                entry.level = level
            self.database.insert(entries, READY, replace=False)

    def terminate(self) -> dict[str, Any]:
        self.database.change(_DELETE_TRANSIENT)
        self.commit()
        return {"redelivered_below": self.redelivered_below, "digest": self.database.digest()}

    def delete_and_terminate(self) -> None:
        self.database.close()

    def close(self) -> None:
        """Let go of the file; what was not committed is in the journal."""
        self.database.close()

    def commit(self) -> None:
        """The checkpoint of this queue. Requires: everything in the journal is synced."""
        self.database.commit(self._journal.synced_lsn, self.seqs.next)

    def backup(self, path: str) -> None:
        """A copy of the file for a snapshot. Requires: as `commit`."""
        self.commit()
        self.database.backup(path)

    # -- in ----------------------------------------------------------------------------------------------------------

    def publish(self, entries: list[Entry], confirm: bool = False) -> None:
        self._persist(entries, confirm)
        self.accept(entries)

    def publish_delivered(self, entries: list[Entry], confirm: bool = False) -> None:
        assert not self._context.debug or self.is_empty(), "publish_delivered requires an empty queue"
        self._persist(entries, confirm)
        self._insert(entries, PENDING)
        self._pending += len(entries)
        self._pending_bytes += body_total(entries)
        self._rates.entered += len(entries)
        self._rates.left += len(entries)
        self._rates.taken += len(entries)
        self._settle_down()

    def _persist(self, entries: list[Entry], confirm: bool) -> None:
        self.journal_publish(entries, LIVE)
        if not confirm:
            return
        safe_later = entry_ranges(entry for entry in entries if entry.flags & PERSISTENT)
        if safe_later:
            self._unconfirmed += sum(safe_later[1::2])
            self._journal.after(lambda: self._confirm(safe_later))
        self._confirmed += entry_ranges(entry for entry in entries if not entry.flags & PERSISTENT)

    def journal_publish(self, entries: list[Entry], state: int) -> None:
        for sid, group in self._by_sid(entries):
            for entry in group:
                if entry.flags & IN_STORE:  # its publisher put it there, by size; no record will refer to it
                    self._context.persistent_store.remove(entry.msg_id)
                    entry.msg_id = None
                    entry.flags &= ~IN_STORE
            self._journal.buffer.append_publishes(sid, group, self.places(), state)

    def sid_of(self, entry: Entry) -> int:
        """The stream id of an entry's records."""
        return stream_id(self.uid, self._level(entry))

    def _level(self, entry: Entry) -> int:
        return min(entry.level, self._top)

    @staticmethod
    def places() -> Overlay:
        """Where the journal may note the places of records. Nobody asks for them: the messages are in SQLite."""
        return Overlay()

    def reveal(self, entries: list[Entry]) -> None:
        self.accept(entries)

    def discard(self, entries: list[Entry]) -> None:
        pass

    def accept(self, entries: list[Entry]) -> None:
        self._insert(entries, READY)
        self._ready += len(entries)
        self._ready_bytes += body_total(entries)
        self._rates.entered += len(entries)
        self._settle_down()

    def _insert(self, entries: list[Entry], state: int) -> None:
        for entry in entries:
            entry.level = self._level(entry)
        self.database.insert(entries, state)
        self._disk_writes += len(entries)

    def _confirm(self, pairs: list[int]) -> None:
        self._unconfirmed -= sum(pairs[1::2])
        self._confirmed += pairs

    def drain_confirmed(self) -> list[int]:
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def is_duplicate(self, entry: Entry) -> bool:
        return False

    # -- out ---------------------------------------------------------------------------------------------------------

    def fetch(self, count: int, ack_required: bool = True, most_bytes: int = NO_LIMIT) -> list[Entry]:
        count = min(count, NO_LIMIT)  # SQLite's numbers end there
        if self._ready_bytes > most_bytes:
            count = run_within(self.database.places(f"WHERE state = ? {_IN_ORDER}", READY, count), count, most_bytes)
        entries = self.database.messages(f"WHERE state = ? {_IN_ORDER}", READY, count)
        self._disk_reads += len(entries)
        self._take(entries, ack_required)
        return entries

    def drop(self, count: int, ack_required: bool = False) -> list[int]:
        entries = self.database.places(f"WHERE state = ? {_IN_ORDER}", READY, count)
        self._take(entries, ack_required)
        return [entry.seq for entry in entries]

    def _take(self, entries: list[Entry], ack_required: bool) -> None:
        """Ready messages leave: to wait for an ack, or for good."""
        if ack_required:
            self._move(entries, PENDING)
            self._rates.taken += len(entries)
        else:
            self._ready -= len(entries)
            self._ready_bytes -= body_total(entries)
            self._forget(entries, ACK)
        self._rates.left += len(entries)
        self._settle_down()

    def _move(self, entries: list[Entry], state: int) -> None:
        """Ready messages become pending or leased ones."""
        self.database.change_each(entries, f"UPDATE messages SET state = ? {_EACH}", state)
        size = body_total(entries)
        self._ready -= len(entries)
        self._ready_bytes -= size
        self._pending += len(entries)
        self._pending_bytes += size

    def _forget(self, entries: list[Entry], record: int | None) -> None:
        """Messages that count nowhere any more go for good, with a record of the given type in the journal."""
        if record is not None:
            for sid, group in self._by_sid(entries):
                self._journal.buffer.append_ranges(record, sid, entry_ranges(group))
        self.database.change_each(entries, f"DELETE FROM messages {_EACH}")
        for entry in entries:
            self.counts.pop(entry.seq, None)
            self.returned.remove(entry.seq, 1)

    def _by_sid(self, entries: Iterable[Entry]) -> list[tuple[int, list[Entry]]]:
        """The persistent ones by stream, in order of seq_id."""
        groups: dict[int, list[Entry]] = {}
        for entry in sorted(entries, key=_by_seq):
            if entry.flags & PERSISTENT:
                groups.setdefault(self.sid_of(entry), []).append(entry)
        return list(groups.items())

    def peek(self) -> Entry | None:
        head = self.database.places(f"WHERE state = ? {_IN_ORDER}", READY, 1)
        return head[0] if head else None

    def dropwhile(self, predicate: Callable[[Entry], bool]) -> Entry | None:
        while (head := self.peek()) is not None and predicate(head):
            self.drop(1)
        return head

    def fetchwhile(
        self, predicate: Callable[[Entry], bool], function: Callable[[Entry, T], T], accumulator: T
    ) -> tuple[Entry | None, T]:
        while (head := self.peek()) is not None and predicate(head):
            for entry in self.fetch(1):
                accumulator = function(entry, accumulator)
        return head, accumulator

    def ack(self, seqs: list[int]) -> list[int]:
        return self._ack(seqs, ACK)

    def journal_ack(self, seqs: list[int]) -> None:
        for sid, group in self._by_sid(self._in_state(seqs, PENDING)):
            self._journal.buffer.append_ranges(ACK, sid, entry_ranges(group))

    def ack_committed(self, seqs: list[int]) -> list[int]:
        return self._ack(seqs, None)

    def _ack(self, seqs: list[int], record: int | None) -> list[int]:
        found = self._in_state(seqs, PENDING)
        self._pending -= len(found)
        self._pending_bytes -= body_total(found)
        self._forget(found, record)
        self._rates.acked += len(found)
        self._settle_down()
        return _those_of(seqs, found)

    def _in_state(self, seqs: list[int], state: int) -> list[Entry]:
        return self.database.places(_IN_STATE, json.dumps(seqs), state)

    def requeue(self, seqs: list[int], count_delivery: bool = True) -> list[int]:
        found = self._in_state(seqs, PENDING)
        self._put_back(found, count_delivery)
        return _those_of(seqs, found)

    def _put_back(self, entries: list[Entry], count_delivery: bool) -> None:
        if count_delivery:
            for entry in entries:
                self.counts[entry.seq] = self.counts.get(entry.seq, 0) + 1
            for sid, group in self._by_sid(entries) if self.durable else ():
                counts = [(entry.seq, self.counts[entry.seq]) for entry in group]
                self._journal.buffer.append_requeue(sid, counts)
        self.database.change_each(
            entries,
            f"UPDATE messages SET state = ?, redelivered = 1, delivery_count = delivery_count + ? {_EACH}",
            READY,
            int(count_delivery),
        )
        self.returned.add_pairs(entry_ranges(sorted(entries, key=_by_seq)))
        size = body_total(entries)
        self._pending -= len(entries)
        self._pending_bytes -= size
        self._ready += len(entries)
        self._ready_bytes += size
        self._rates.entered += len(entries)
        self._settle_down()

    def prepare_requeue(self, seqs: list[int], count_delivery: bool = True) -> Callable[[], list[int]]:
        return lambda: self.requeue(seqs, count_delivery)

    def ackfold(self, function: Callable[[Entry, T], T], accumulator: T, seqs: list[int]) -> T:
        for seq in seqs:
            for entry in self.database.messages(f"{_EACH} AND state != ?", json.dumps([seq]), READY):
                accumulator = function(entry, accumulator)
        return accumulator

    def fold(self, function: Callable[[Entry, bool, T], tuple[bool, T]], accumulator: T, start: int = 0) -> T:
        on = True
        for (level,) in self.database.rows("SELECT DISTINCT level FROM messages ORDER BY level DESC"):
            if on:
                on, accumulator = self._visit("level = ?", [level], function, accumulator, start)
        return accumulator

    def fold_by_seq(self, function: Callable[[Entry, bool, T], tuple[bool, T]], accumulator: T, start: int = 0) -> T:
        """As `fold`, in order of seq_id over all priorities."""
        return self._visit("true", [], function, accumulator, start)[1]

    def _visit(
        self,
        condition: str,
        values: list[int],
        function: Callable[[Entry, bool, T], tuple[bool, T]],
        accumulator: T,
        start: int,
    ) -> tuple[bool, T]:
        clause = f"WHERE {condition} AND seq >= ? ORDER BY seq LIMIT ?"
        cursor = min(start, self.seqs.next)
        while entries := self.database.messages(clause, *values, cursor, _FOLD_ROWS):
            ready = {entry.seq for entry in self._in_state([entry.seq for entry in entries], READY)}
            for entry in entries:
                on, accumulator = function(entry, entry.seq not in ready, accumulator)
                if not on:
                    return False, accumulator
            cursor = entries[-1].seq + 1
        return True, accumulator

    def purge(self) -> int:
        entries = self.database.places("WHERE state = ?", READY)
        self._ready = self._ready_bytes = 0
        self._forget(entries, PURGE)
        self._rates.left += len(entries)
        self._settle_down()
        return len(entries)

    def purge_acks(self) -> int:
        pending = self.database.rows("SELECT seq FROM messages WHERE state = ?", PENDING)
        return len(self.ack([seq for (seq,) in pending]))

    # -- leases ------------------------------------------------------------------------------------------------------

    def spill(self) -> list[Entry]:
        return [] if self.durable else everything(self)  # a durable one's file is copied as a whole

    def checkout(self, limit: int, most_bytes: int) -> dict[int, list[int]]:
        taken: list[Entry] = []
        for entry in self.database.places(f"WHERE state = ? {_IN_ORDER}", READY, limit):
            if taken and entry.body_size > most_bytes:
                break
            most_bytes -= entry.body_size
            taken.append(entry)
        self._move(taken, LEASED)
        self._rates.left += len(taken)
        self._settle_down()
        groups: dict[int, list[Entry]] = {}
        for entry in taken:
            groups.setdefault(self.sid_of(entry), []).append(entry)
        return {sid: entry_ranges(group) for sid, group in groups.items()}

    def settle(self, ranges: dict[int, list[int]], requeue: bool) -> int:
        found: list[Entry] = []
        for level in range(self._top + 1):
            pairs = ranges.get(stream_id(self.uid, level), [])
            for first, count in zip(pairs[::2], pairs[1::2], strict=True):
                clause = "WHERE seq >= ? AND seq < ? AND +state = ?"
                found += self.database.places(clause, first, first + count, LEASED)
        if requeue:
            self._put_back(found, count_delivery=False)
        else:
            self._pending -= len(found)
            self._pending_bytes -= body_total(found)
            self._forget(found, ACK)
            self._settle_down()
        return len(found)

    # -- size and memory ---------------------------------------------------------------------------------------------

    def _settle_down(self) -> None:
        """After every operation: rates, and the sums where damage took messages away."""
        self._rates.update(self._context.clock())
        if self._salvages != self.database.salvages:
            self._recount()
        if self._context.debug:
            self._check()

    def _recount(self) -> None:
        """Everything in RAM from the table."""
        self._salvages = self.database.salvages
        sums = {READY: (0, 0), PENDING: (0, 0), LEASED: (0, 0)}
        for state, count, size in self.database.rows(
            "SELECT state, count(*), sum(body_size) FROM messages GROUP BY state"
        ):
            sums[state] = (count, int(size))
        self._ready, self._ready_bytes = sums[READY]
        self._pending = sums[PENDING][0] + sums[LEASED][0]
        self._pending_bytes = sums[PENDING][1] + sums[LEASED][1]
        self.counts = dict(self.database.rows("SELECT seq, delivery_count FROM messages WHERE delivery_count > 0"))
        self.returned = RangeSet(
            [n for (seq,) in self.database.rows("SELECT seq FROM messages WHERE redelivered = 1") for n in (seq, 1)]
        )

    def _check(self) -> None:
        held = (self._ready, self._ready_bytes, self._pending, self._pending_bytes, self.counts, self.returned)
        self._recount()
        table = (self._ready, self._ready_bytes, self._pending, self._pending_bytes, self.counts, self.returned)
        assert held == table, f"in RAM {held}, in the table {table}"

    def __len__(self) -> int:
        return self._ready

    def is_empty(self) -> bool:
        return self._ready == 0

    def depth(self) -> int:
        return self._ready + self._pending

    @property
    def pending_count(self) -> int:
        return self._pending

    def pending_pairs(self) -> list[int]:
        rows = self.database.rows("SELECT seq FROM messages WHERE state IN (?, ?)", PENDING, LEASED)
        return RangeSet([number for (seq,) in rows for number in (seq, 1)]).pairs()

    def ready_bytes(self) -> int:
        return self._ready_bytes

    def total_bytes(self) -> int:
        """Body bytes of ready and pending messages."""
        return self._ready_bytes + self._pending_bytes

    def set_ram_duration_target(self, duration: float) -> None:
        pass

    def ram_duration(self) -> float:
        return math.inf

    def needs_timeout(self) -> bool:
        return self._unconfirmed > 0

    def timeout(self) -> None:
        self._rates.update(self._context.clock(), force=True)

    def resume(self) -> None:
        pass

    def msg_rates(self) -> tuple[float, float]:
        return self._rates.in_rate, self._rates.out_rate

    def invoke(self, function: Callable[[Any], T]) -> T:
        return function(self)

    def info(self) -> dict[str, Any]:
        """As those of a VariableQueue, and `priority_lengths` for a queue with priorities. Nothing is in RAM."""
        info: dict[str, Any] = {
            "q1": 0,
            "q2": 0,
            "delta": 0,
            "q3": 0,
            "q4": self._ready,
            "len": self._ready,
            "pending_acks": self._pending,
            "ram_pending_acks": 0,
            "ram_msg_count": 0,
            "ram_bytes": 0,
            "message_bytes": self.total_bytes(),
            "message_bytes_ready": self._ready_bytes,
            "message_bytes_unacknowledged": self._pending_bytes,
            "next_seq_id": self.seqs.next,
            "target_ram_count": None,
            "avg_ingress_rate": self._rates.in_rate,
            "avg_egress_rate": self._rates.out_rate,
            "avg_ack_ingress_rate": self._rates.ack_in,
            "avg_ack_egress_rate": self._rates.ack_out,
            "disk_reads": self._disk_reads,
            "disk_writes": self._disk_writes,
        }
        if self._top:
            lengths = self.database.rows("SELECT level, count(*) FROM messages WHERE state = ? GROUP BY level", READY)
            info["priority_lengths"] = dict.fromkeys(range(self._top + 1), 0) | dict(lengths)
        return info


def _those_of(seqs: list[int], found: list[Entry]) -> list[int]:
    """The seq_ids that were found, in the order given."""
    known = {entry.seq for entry in found}
    return [seq for seq in seqs if seq in known]
