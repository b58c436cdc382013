"""The real backing queue: messages flow q1 -> q2 -> delta -> q3 -> q4 between RAM and disk.

    publish -> [ q1 -> q2 -> delta -> q3 -> q4 ] -> consumer          head to tail: q4, q3, delta, q2, q1

    alpha   position and body in RAM                 q1, q4
    beta    position in RAM, body on disk            q2, q3   (of a transient message)
    gamma   the same, position also on disk          q2, q3   (every persistent message is on disk anyway)
    delta   nothing in RAM but a count               delta: start, end, count

A short queue lives in q4 alone. When more whole messages are in RAM than `target_ram_count`, alphas become betas: q1
from its head side, then q4 from its rear. When there are too many betas, they go to delta in batches, and never less
than the rest of the head's segment stays in q3. Messages come back only by consumption: when q3 runs empty, the next
piece of delta, up to a segment boundary, is read into q3.

Invariants, after every operation (`_check`, under WARREN_DEBUG):

1. q1 non-empty => q3 non-empty; q2 non-empty => delta non-empty; delta non-empty => q3 non-empty.
2. len = 0 <=> q3 and q4 empty. len = sum of all five.
3. seq_ids rise from q4 through q3, delta, q2 to q1. A requeued message is merged by its seq_id, never pushed to the head.
4. Every entry in q1 and q4 has its body; the RAM counts are what the containers hold.

Pending acks are whole in RAM (`_ram_pending`) up to the same target, the rest are ranges of seq_ids (`_disk_pending`).

The house has four rooms: `queue_state.py` (what there is, and its invariants), `paging.py` (between RAM and disk),
`pending_acks.py` (handed out, acked, requeued, leased), and this one (begin and end, in, out, all of them).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from warren.kernel.entry import (
    IN_STORE,
    PERSISTENT,
    Entry,
    body_total,
    entry_ranges,
    persistent_ones,
    persistent_total,
    ram_total,
    run_within,
    seq_ranges,
    sizes,
    summarize,
    without,
)
from warren.kernel.journal_codec import PURGE
from warren.kernel.overlay import LIVE
from warren.kernel.ranges import RangeSet
from warren.storage.backing_queue import NO_LIMIT
from warren.storage.layout import pairs_of
from warren.storage.nothing import NOTHING
from warren.storage.payload import join_payload
from warren.storage.pending_acks import PendingAcks

T = TypeVar("T")
_by_seq = attrgetter("seq")


class VariableQueue(PendingAcks):
    """One stream (a queue, or one priority level of it). Implements `BackingQueue`."""

    __slots__ = ()

    # -- life ----------------------------------------------------------------------------------------------------------

    def init(self, recovered: dict[str, Any] | None) -> None:
        if recovered is None:
            return
        self.redelivered_below = recovered["redelivered_below"]
        self.returned = RangeSet(recovered["returned"])
        self.counts = recovered["counts"]
        self._stored = recovered["stored"]
        for pairs in self._chunks(recovered["leased"]):
            leased, _ = self.index.load(pairs)
            self._leased.add_pairs(entry_ranges(leased))
            self._disk_pending_bytes += body_total(leased)
        self._disk_pending = self._leased.copy()
        self._bytes = recovered["bytes"] - self._disk_pending_bytes
        self._len = self.index.live_count() - len(self._leased)
        if self._len:
            self.delta_start = recovered["low"]
            self.delta_end = self.seqs.next
            self.delta_count = self._len
            self._load_delta()
        self._check()

    def terminate(self) -> dict[str, Any]:
        total = self._drop_transient()
        pending = RangeSet(self._disk_pending.pairs())
        pending.remove_pairs(self._leased.pairs())  # a checkout is no delivery
        pending.add_pairs(seq_ranges(sorted(self._ram_pending)))
        pending.add_pairs(self.returned.pairs())
        alive = RangeSet(self.index.live_pairs(0, self.seqs.next) if pending or self.counts else ())
        return {
            "redelivered_below": self.redelivered_below,
            "returned": [n for first, count in pairs_of(pending.pairs()) for n in alive.pairs(first, first + count)],
            "counts": {seq: count for seq, count in self.counts.items() if seq in alive},
            "stored": self._stored,
            "bytes": total,
        }

    def _drop_transient(self) -> int:
        """Transient messages end here; the body bytes of what stays."""
        held = [*self.q1, *self.q2, *self.q3, *self.q4]
        in_delta = self._bytes - body_total(held)
        held += self._ram_pending.values()
        is_exact = not self.delta_transient and not self._disk_pending
        self._forget_transient(without(held, PERSISTENT))
        self._forget_transient_on_disk()
        return int(persistent_total(held)[1]) + in_delta if is_exact else self.index.live_bytes()

    def _forget_transient_on_disk(self) -> None:
        """Those in delta and those that wait for an ack."""
        if self.delta_transient:
            self._purge_transient_delta(self._disk_pending)
        for pairs in self._chunks(self._disk_transient.pairs()):
            self._forget_transient(self.index.load(pairs)[0])
        self._disk_transient.clear()

    def forget_ram(self) -> None:
        """The queue is being rebuilt from disk: its memory does not count any more."""
        self._context.monitor.forget(id(self), self._ram_bytes)
        self._ram_bytes = 0

    def delete_and_terminate(self) -> None:
        """Also drops references to stored bodies, at once: the caller has committed the delete to the metadata."""
        held = (*self.q1, *self.q2, *self.q3, *self.q4, *self._ram_pending.values())
        self._forget_transient(without(held, PERSISTENT))
        self._forget_transient_on_disk()
        self._context.persistent_store.remove_many(self._stored_ids([0, self.seqs.next]))
        self._context.monitor.forget(id(self), self._ram_bytes)
        self._ram_bytes = 0
        self.index.close()

    # -- in ------------------------------------------------------------------------------------------------------------

    def publish(self, entries: list[Entry], confirm: bool = False) -> None:
        size, bodies, persistent, largest = summarize(entries)
        if persistent == len(entries) and largest < self._settings.embed_below and not confirm:
            self._disk_writes += persistent
            self._journal.buffer.append_publishes(self.index.sid, entries, self.index.overlay, LIVE)
        else:
            self._persist(entries, confirm)
        self._enqueue(entries, size, bodies, largest)

    def publish_delivered(self, entries: list[Entry], confirm: bool = False) -> None:
        assert not self._context.debug or self.is_empty(), "publish_delivered requires an empty queue"
        self._persist(entries, confirm)
        self.note_stored(entries)
        self._rates.entered += len(entries)
        self._hand_out(entries)

    def discard(self, entries: list[Entry]) -> None:
        pass

    def is_duplicate(self, entry: Entry) -> bool:
        return False

    def _persist(self, entries: list[Entry], confirm: bool) -> None:
        """Journal what is persistent; large payloads go to the message store."""
        persistent = [entry for entry in entries if entry.flags & PERSISTENT]
        if persistent:
            self._store_large(persistent)
            self._journal.buffer.append_publishes(self.index.sid, persistent, self.index.overlay, LIVE)
        if confirm:
            pairs = entry_ranges(persistent)
            if pairs:
                self._unconfirmed += len(persistent)
                self._journal.after(lambda: self._confirm(pairs))
            if len(persistent) < len(entries):
                self._confirmed += entry_ranges(without(entries, PERSISTENT))

    def _store_large(self, entries: list[Entry]) -> None:
        """Large payloads go to the message store, unless a fan-out put them there."""
        self._disk_writes += len(entries)
        if summarize(entries)[3] < self._settings.embed_below:
            return
        for entry in entries:
            if entry.size >= self._settings.embed_below and not entry.flags & IN_STORE:
                store = self._context.persistent_store
                entry.msg_id = store.next_id()
                entry.flags |= IN_STORE
                store.write(entry.msg_id, join_payload(entry.head, entry.body), 1)

    def journal_publish(self, entries: list[Entry], state: int) -> None:
        """The records only; `reveal` follows once they are synced."""
        persistent = persistent_ones(entries)
        if persistent:
            self._store_large(persistent)
            self._journal.buffer.append_publishes(self.index.sid, persistent, self.index.overlay, state)
            self._hidden.add_pairs(entry_ranges(persistent))

    def reveal(self, entries: list[Entry]) -> None:
        """A transaction is committed: its messages become visible."""
        pairs = entry_ranges(persistent_ones(entries))
        self.index.overlay.reveal(pairs)
        self._hidden.remove_pairs(pairs)
        self.accept(entries)

    def _confirm(self, pairs: list[int]) -> None:
        self._unconfirmed -= sum(pairs[1::2])
        self._confirmed += pairs

    def drain_confirmed(self) -> list[int]:
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def accept(self, entries: list[Entry]) -> None:
        if entries:
            size, bodies, _, largest = summarize(entries)
            self._enqueue(entries, size, bodies, largest)

    def _enqueue(self, entries: list[Entry], size: int, bodies: int, largest: int) -> None:
        if largest >= self._settings.embed_below:
            self.note_stored(entries)
        self._len += len(entries)
        self._bytes += bodies
        self._rates.entered += len(entries)
        if entries[0].seq > self._last_seq():
            tail = self.q1 if self.q3 else self.q4
            if tail is NOTHING:
                tail = self._filling("q1" if self.q3 else "q4")
            tail.extend(entries)
            self._ram_count += len(entries)
            self._add_ram(size)
        else:
            self._insert(entries)
        self._settle_down()

    # -- out -----------------------------------------------------------------------------------------------------------

    def fetch(self, count: int, ack_required: bool = True, most_bytes: int = NO_LIMIT) -> list[Entry]:
        source = self.q4 or self.q3
        if ack_required and count < len(source):
            popleft = source.popleft
            entries = [popleft() for _ in range(count)]
            bodies = body_total(entries)
            if bodies > most_bytes:  # looked at afterwards: small messages are not measured one by one
                count = run_within(entries, count, most_bytes)
                source.extendleft(reversed(entries[count:]))
                del entries[count:]
                bodies = body_total(entries)
            held, _ = ram_total(entries)
            if held == count:  # bodies only move from ready to pending, and no container runs empty
                self._len -= count
                self._bytes -= bodies
                self._ram_count -= count
                self._rates.left += count
                self._pend(entries, bodies)
                self._settle_down()
                return entries
            source.extendleft(reversed(entries))
        entries = []
        room = most_bytes
        while len(entries) < count and self._len:
            source = self.q4 or self.q3
            if entries and source[0].body_size > room:
                break
            wanted = count - len(entries)
            some = self._take_filled(run_within(source, wanted, room) if self._bytes > room else wanted, entries)
            room -= body_total(some)
            entries += some
        if not entries:
            return entries
        if ack_required:
            self._hand_out(entries)
        else:
            self._rates.left += len(entries)
            self._forget(entries)
            self._settle_down()
        return entries

    def _take_filled(self, count: int, before: list[Entry]) -> list[Entry]:
        """As `_take`, with their bodies. Where they cannot be read, they and those taken before are the head again."""
        taken: list[Entry] = []
        try:
            taken = self._take(count)
            return self._fill(taken)
        except BaseException:
            self._untake(before + taken)
            raise

    def _hand_out(self, entries: list[Entry]) -> None:
        """Entries with their bodies, in no container, wait for an ack from now on."""
        size, bodies = sizes(entries)
        self._rates.left += len(entries)
        self._add_ram(size)
        self._pend(entries, bodies)
        self._settle_down()

    def drop(self, count: int, ack_required: bool = False) -> list[int]:
        entries: list[Entry] = []
        while len(entries) < count and self._len:
            try:
                entries += self._take(count - len(entries))
            except BaseException:
                self._untake(entries)
                raise
        self._rates.left += len(entries)
        if ack_required:
            self._lend_from_disk([entry for entry in entries if entry.body is None], entries)
            whole = [entry for entry in entries if entry.body is not None]
            size, bodies = sizes(whole)
            self._add_ram(size)
            self._pend(whole, bodies)
        elif entries:
            self._forget(entries)
        self._settle_down()
        return [entry.seq for entry in entries]

    def dropwhile(self, predicate: Callable[[Entry], bool]) -> Entry | None:
        while (count := self._run_of(predicate)) > 0:
            self.drop(count)
        return self.peek()

    def fetchwhile(
        self, predicate: Callable[[Entry], bool], function: Callable[[Entry, T], T], accumulator: T
    ) -> tuple[Entry | None, T]:
        begun = False
        while (count := self._run_of(predicate)) > 0:
            try:
                entries = self._take_filled(count, [])  # not `fetch`: in place of one that is damaged it takes the next
            except OSError:
                if not begun:
                    raise
                break  # those before wait for an ack, and the caller has to know of them; who comes again is told
            begun = True
            self._hand_out(entries)
            for entry in entries:
                accumulator = function(entry, accumulator)
        return self.peek(), accumulator

    def _run_of(self, predicate: Callable[[Entry], bool]) -> int:
        """How many entries from the head on the predicate holds for, in the container of the head."""
        count = 0
        for entry in self.q4 or self.q3:
            if not predicate(entry):
                break
            count += 1
        return count

    # -- all of them ---------------------------------------------------------------------------------------------------

    def fold(self, function: Callable[[Entry, bool, T], tuple[bool, T]], accumulator: T, start: int = 0) -> T:
        """Entries that are on disk are read into copies, a batch at a time."""
        cursor = start
        in_ram = sorted(
            (
                e
                for queue in (self.q4, self.q3, self.q2, self.q1, self._ram_pending.values())
                for e in queue
                if e.seq >= start
            ),
            key=_by_seq,
        )
        position = 0
        stop = self.seqs.next
        while cursor < stop:
            upto = min(cursor + self._settings.load_entries, stop)
            known = set()
            batch: list[Entry] = []
            while position < len(in_ram) and in_ram[position].seq < upto:
                entry = in_ram[position]
                known.add(entry.seq)
                batch.append(entry.copy() if entry.body is None else entry)
                position += 1
            if self.delta_count or self._disk_pending:
                found, _ = self.index.read(cursor, upto, upto - cursor)
                batch += [e for e in found if e.seq not in known]
                batch.sort(key=_by_seq)
            missing = set(self._read_bodies([e for e in batch if e.body is None]))
            for entry in batch:
                if entry.seq not in missing:
                    unacked = entry.seq in self._ram_pending or entry.seq in self._disk_pending
                    on, accumulator = function(entry, unacked, accumulator)
                    if not on:
                        return accumulator
            cursor = upto
            if not self.delta_count and not self._disk_pending and position < len(in_ram):
                cursor = max(cursor, in_ram[position].seq)
            elif not self.delta_count and not self._disk_pending:
                break
        return accumulator

    def purge(self) -> int:
        purged = self._len
        if not purged:
            return 0
        transient = [e for q in (self.q1, self.q2, self.q3, self.q4) for e in without(q, PERSISTENT)]
        kept = RangeSet(self._disk_pending.pairs())
        kept.add_pairs(seq_ranges(sorted(self._ram_pending)))
        kept.add_pairs(self._hidden.pairs())
        if self.delta_count and self.delta_transient:
            self._purge_transient_delta(kept)
        self._forget_transient(transient)
        if self.durable:
            low = self._lowest_seq()
            pairs = kept.gaps(low, self._last_seq() + 1)
            self._ack_pairs(PURGE, pairs)
        for seq in [seq for seq in self.counts if seq not in kept]:
            del self.counts[seq]
            self.index.counts_unsaved.pop(seq, None)
        self.returned = RangeSet([n for seq in self.returned if seq in kept for n in (seq, 1)])
        held, held_bytes = 0, 0
        for queue in (self.q1, self.q2, self.q3, self.q4):
            count, size = ram_total(queue)
            held += count
            held_bytes += size
            queue.clear()
        self._ram_count -= held
        self._add_ram(-held_bytes)
        self._len = self._bytes = self.delta_count = self.delta_transient = 0
        self._rates.left += purged
        self._settle_down()
        return purged

    def _purge_transient_delta(self, kept: RangeSet) -> None:
        """Transient messages in delta have no journal record: take their slots away."""
        for segment_pairs in self._chunks(self.index.live_pairs(self.delta_start, self.delta_end)):
            entries, _ = self.index.load(segment_pairs)
            self._forget_transient([e for e in entries if not e.flags & PERSISTENT and e.seq not in kept])

    def invoke(self, function: Callable[[Any], T]) -> T:
        return function(self)
