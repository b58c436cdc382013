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
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from warren.kernel.entry import (
    IN_STORE,
    PERSISTENT,
    SLOTTED,
    Entry,
    drop_bodies,
    entry_ranges,
    persistent_total,
    ram_total,
    record_pending,
    seq_ranges,
    summarize,
    take_pending,
    total_size,
)
from warren.kernel.journal_codec import ACK, PURGE
from warren.kernel.overlay import LIVE
from warren.kernel.ranges import RangeSet
from warren.storage.layout import pairs_of
from warren.storage.paging import Paging
from warren.storage.payload import join_payload

T = TypeVar("T")
_by_seq = attrgetter("seq")


class VariableQueue(Paging):
    """One stream (a queue, or one priority level of it). Implements `BackingQueue`."""

    # -- life --------------------------------------------------------------------------------------------------------

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
            self._disk_pending_bytes += total_size(leased)
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
        pending = RangeSet(self.returned.pairs())
        pending.add_pairs(seq_ranges(sorted(self._ram_pending)))
        pending.add_pairs(self._disk_pending.pairs())
        pending.remove_pairs(self._leased.pairs())
        alive = RangeSet(self.index.live_pairs(0, self.seqs.next) if pending or self.counts else ())
        return {
            "redelivered_below": self.redelivered_below,
            "returned": [n for first, count in pairs_of(pending.pairs()) for n in alive.pairs(first, first + count)],
            "counts": {seq: count for seq, count in self.counts.items() if seq in alive},
            "stored": self._stored,
            "bytes": total,
        }

    def _drop_transient(self) -> int:
        """Transient messages end here; the payload bytes of what stays."""
        held = [*self.q1, *self.q2, *self.q3, *self.q4]
        in_delta = self._bytes - total_size(held)
        held += self._ram_pending.values()
        is_exact = not self.delta_transient and not self._disk_pending
        self._forget_transient([entry for entry in held if not entry.flags & PERSISTENT])
        self._forget_transient_on_disk()
        return int(persistent_total(held)[1]) + in_delta if is_exact else self.index.live_bytes()

    def _forget_transient_on_disk(self) -> None:
        """Those in delta and those that wait for an ack."""
        if self.delta_transient:
            self._purge_transient_delta(self._disk_pending)
        for pairs in self._chunks(self._disk_transient.pairs()):
            self._forget_transient(self.index.load(pairs)[0])
        self._disk_transient.clear()

    def delete_and_terminate(self) -> None:
        """Also drops references to stored bodies, at once: the caller has committed the delete to the metadata."""
        held = (*self.q1, *self.q2, *self.q3, *self.q4, *self._ram_pending.values())
        self._forget_transient([entry for entry in held if not entry.flags & PERSISTENT])
        self._forget_transient_on_disk()
        self._context.persistent_store.remove_many(self._stored_ids([0, self.seqs.next]))
        self._context.monitor.forget(id(self), self._ram_bytes)
        self._ram_bytes = 0
        self.index.close()

    # -- in ----------------------------------------------------------------------------------------------------------

    def publish(self, entries: list[Entry], confirm: bool = False) -> None:
        size, persistent, largest = summarize(entries)
        if persistent == len(entries) and largest < self._settings.embed_below and not confirm:
            self._disk_writes += persistent
            self._journal.buffer.append_publishes(self.index.sid, entries, self.index.overlay, LIVE)
        else:
            self._persist(entries, confirm)
        self._enqueue(entries, size, largest)

    def publish_delivered(self, entries: list[Entry], confirm: bool = False) -> None:
        assert not self._context.debug or self.is_empty(), "publish_delivered requires an empty queue"
        self._persist(entries, confirm)
        self.note_stored(entries)
        self._rates.entered += len(entries)
        self._rates.left += len(entries)
        size = total_size(entries)
        self._add_ram(size)
        self._pend(entries, size)
        self._settle_down()

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
                self._confirmed += entry_ranges(e for e in entries if not e.flags & PERSISTENT)

    def _store_large(self, entries: list[Entry]) -> None:
        """Large payloads go to the message store, unless a fan-out put them there."""
        self._disk_writes += len(entries)
        for entry in entries:
            if entry.size >= self._settings.embed_below and not entry.flags & IN_STORE:
                store = self._context.persistent_store
                entry.msg_id = store.next_id()
                entry.flags |= IN_STORE
                store.write(entry.msg_id, join_payload(entry.head, entry.body), 1)

    def journal_publish(self, entries: list[Entry], state: int) -> None:
        """The records only; `reveal` follows once they are synced."""
        persistent = [entry for entry in entries if entry.flags & PERSISTENT]
        if persistent:
            self._store_large(persistent)
            self._journal.buffer.append_publishes(self.index.sid, persistent, self.index.overlay, state)
            self._hidden.add_pairs(entry_ranges(persistent))

    def reveal(self, entries: list[Entry]) -> None:
        """A transaction is committed: its messages become visible."""
        pairs = entry_ranges(e for e in entries if e.flags & PERSISTENT)
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
            size, _, largest = summarize(entries)
            self._enqueue(entries, size, largest)

    def _enqueue(self, entries: list[Entry], size: int, largest: int) -> None:
        if largest >= self._settings.embed_below:
            self.note_stored(entries)
        self._len += len(entries)
        self._bytes += size
        self._rates.entered += len(entries)
        if entries[0].seq > self._last_seq():
            (self.q1 if self.q3 else self.q4).extend(entries)
            self._ram_count += len(entries)
            self._add_ram(size)
        else:
            self._insert(entries)
        self._settle_down()

    # -- out ---------------------------------------------------------------------------------------------------------

    def fetch(self, count: int, ack_required: bool = True) -> list[Entry]:
        source = self.q4 or self.q3
        if ack_required and count < len(source):
            popleft = source.popleft
            entries = [popleft() for _ in range(count)]
            held, size = ram_total(entries)
            if held == count:  # bodies only move from ready to pending, and no container runs empty
                self._len -= count
                self._bytes -= size
                self._ram_count -= count
                self._rates.left += count
                self._pend(entries, size)
                self._settle_down()
                return entries
            source.extendleft(reversed(entries))
        entries = []
        while len(entries) < count and self._len:
            some = self._take(count - len(entries))
            entries += some if ram_total(some)[0] == len(some) else self._fill(some)
        if not entries:
            return entries
        size = total_size(entries)
        self._rates.left += len(entries)
        if ack_required:
            self._add_ram(size)
            self._pend(entries, size)
        else:
            self._forget(entries)
        self._settle_down()
        return entries

    def drop(self, count: int, ack_required: bool = False) -> list[int]:
        entries: list[Entry] = []
        while len(entries) < count and self._len:
            entries += self._take(count - len(entries))
        self._rates.left += len(entries)
        if ack_required:
            self._lend_from_disk([entry for entry in entries if entry.body is None], entries)
            whole = [entry for entry in entries if entry.body is not None]
            size = total_size(whole)
            self._add_ram(size)
            self._pend(whole, size)
        elif entries:
            self._forget(entries)
        self._settle_down()
        return [entry.seq for entry in entries]

    def _lend_from_disk(self, entries: list[Entry], taken: list[Entry]) -> None:
        """Pending acks on disk of some that were taken. Where a transient one cannot be written, all go back."""
        try:
            self._pend_on_disk(entries)
        except OSError as error:
            self._return(taken)
            raise self._context.trouble(error) from error

    def _take(self, count: int) -> list[Entry]:
        """Remove up to `count` entries of one container from the head; bodies may be missing. The RAM counts no longer
        hold them."""
        source = self.q4 or self.q3
        count = min(count, len(source))
        popleft = source.popleft
        entries = [popleft() for _ in range(count)]
        held, held_bytes = ram_total(entries)
        self._ram_count -= held
        self._add_ram(-held_bytes)
        self._len -= count
        self._bytes -= total_size(entries)
        if source is self.q3 and not source:
            self._refill()
        return entries

    def _forget(self, entries: list[Entry]) -> None:
        """Messages leave for good: journal the acks of the persistent ones, drop the bodies of the others."""
        _, count, _ = summarize(entries)
        persistent = entries if count == len(entries) else [entry for entry in entries if entry.flags & PERSISTENT]
        if count:
            stored = [e.msg_id for e in persistent if e.flags & IN_STORE] if self._stored else []
            self._journal_ack(ACK, entry_ranges(persistent), stored)
        if count < len(entries):
            self._forget_transient([entry for entry in entries if not entry.flags & PERSISTENT])
        if self.counts or self.returned:
            self._forget_marks(entries)

    def journal_ack(self, seqs: list[int]) -> None:
        """What an ack does on disk; `ack_committed` follows once it is synced. Not later: a checkpoint in between would
        take the messages for live ones, and repeat them behind their ack."""
        persistent = sorted(seq for seq in seqs if self._is_persistent(seq))
        if not persistent:
            return
        held = [entry for seq in persistent if (entry := self._ram_pending.get(seq)) is not None]
        stored = [entry.msg_id for entry in held if entry.flags & IN_STORE]
        if len(held) < len(persistent):
            stored += self._stored_ids(seq_ranges([seq for seq in persistent if seq not in self._ram_pending]))
        self._journal_ack(ACK, seq_ranges(persistent), stored)

    def _is_persistent(self, seq: int) -> bool:
        entry = self._ram_pending.get(seq)
        if entry is not None:
            return bool(entry.flags & PERSISTENT)
        return seq in self._disk_pending and seq not in self._disk_transient

    def ack_committed(self, seqs: list[int]) -> list[int]:
        """As `ack`, for what `journal_ack` has done its part of."""
        self._ack_is_synced = True
        try:
            return self.ack(seqs)
        finally:
            self._ack_is_synced = False

    def _journal_ack(self, kind: int, pairs: list[int], stored: list[bytes]) -> None:
        if self._ack_is_synced:
            return
        self._journal.buffer.append_ranges(kind, self.index.sid, pairs)
        ticket = self.index.ack(pairs)
        self._stored -= len(stored)

        def synced() -> None:
            self.index.ack_synced(ticket)
            if stored:
                self._context.persistent_store.remove_many(stored)

        self._journal.after(synced)

    def _forget_transient(self, entries: list[Entry]) -> None:
        slotted = [entry for entry in entries if entry.flags & SLOTTED]
        if slotted:
            self.index.forget_transient(entry_ranges(slotted))
        for entry in entries:
            if entry.flags & IN_STORE:
                self._context.transient_store.remove(entry.msg_id)

    def _forget_marks(self, entries: list[Entry]) -> None:
        if self.counts:
            for entry in entries:
                self.counts.pop(entry.seq, None)
                self.index.counts_unsaved.pop(entry.seq, None)
        if self.returned:
            self.returned.remove_pairs(entry_ranges(entries))

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

    # -- pending acks ------------------------------------------------------------------------------------------------

    def _pend(self, entries: list[Entry], size: int) -> None:
        record_pending(self._ram_pending, entries)
        self._unacked_bytes += size
        self._rates.taken += len(entries)

    def _take_disk_pending(self, seqs: list[int]) -> list[int]:
        """Remove those of `seqs` that are pending on disk and not leased; sorted."""
        mine = sorted(seq for seq in seqs if seq in self._disk_pending and seq not in self._leased)
        if mine:
            before = len(self._disk_pending)
            self._disk_pending.remove_pairs(seq_ranges(mine))
            self._disk_pending_bytes -= self._disk_pending_bytes * (before - len(self._disk_pending)) // before
        return mine

    def ack(self, seqs: list[int]) -> list[int]:
        found, missing = take_pending(self._ram_pending, seqs)
        if found:
            size = total_size(found)
            self._unacked_bytes -= size
            self._add_ram(-size)
            if len(found) > 1:
                found.sort(key=_by_seq)
            self._forget(found)
        self._rates.acked += len(found)
        if missing:
            missing = self._take_disk_pending(missing)
            self._ack_on_disk(missing)
            self._rates.acked += len(missing)
            known = {entry.seq for entry in found}
            known.update(missing)
            seqs = [seq for seq in seqs if seq in known]
        self._check()
        return seqs

    def _ack_on_disk(self, seqs: list[int]) -> None:
        if not seqs:
            return
        transient = [seq for seq in seqs if seq in self._disk_transient] if self._disk_transient else []
        if transient:
            gone = set(transient)
            pairs = seq_ranges(transient)
            self._forget_transient(self.index.load(pairs)[0])
            self._disk_transient.remove_pairs(pairs)
            seqs = [seq for seq in seqs if seq not in gone]
        if seqs:
            self._ack_pairs(ACK, seq_ranges(seqs))
        for seq in seqs + transient if self.counts else ():
            self.counts.pop(seq, None)
            self.index.counts_unsaved.pop(seq, None)
        self.returned.remove_pairs(seq_ranges(seqs))
        self.returned.remove_pairs(seq_ranges(transient))

    def _ack_pairs(self, kind: int, pairs: list[int]) -> None:
        """Journal acks of persistent messages that are only on disk."""
        self._journal_ack(kind, pairs, self._stored_ids(pairs))

    def _stored_ids(self, pairs: list[int]) -> list[bytes]:
        """What the live persistent messages of `pairs` hold in the message store."""
        stored: list[bytes] = []
        for piece in self._chunks(pairs) if self._stored else ():
            entries, _ = self.index.load(piece)
            stored += [e.msg_id for e in entries if e.flags & IN_STORE and e.flags & PERSISTENT]
        return stored

    def requeue(self, seqs: list[int], count_delivery: bool = True) -> list[int]:
        self._page_out_for_delta(seqs)
        found, missing = take_pending(self._ram_pending, seqs)
        size = total_size(found)
        self._unacked_bytes -= size
        self._add_ram(-size)
        disk = self._take_disk_pending(missing) if missing else []
        known = {entry.seq for entry in found}
        known.update(disk)
        if not known:
            return []
        self._mark_returned(sorted(known), count_delivery)
        entries = sorted(found + self._load_pending(disk), key=_by_seq)
        self._return(entries)
        return [seq for seq in seqs if seq in known]

    def _page_out_for_delta(self, seqs: list[int]) -> None:
        """Transient messages that go back to delta are written before anything changes: the disk may refuse them."""
        if not self.delta_count or not self._ram_pending:
            return
        entries = [entry for seq in seqs if (entry := self._ram_pending.get(seq)) is not None]
        transient = [e for e in entries if not e.flags & PERSISTENT and e.seq >= self.delta_start]
        try:
            self._page_out(transient)
            self._page_out_slots(transient)
        except OSError as error:
            raise self._context.trouble(error) from error

    def _load_pending(self, disk: list[int]) -> list[Entry]:
        if not disk:
            return []
        pairs = seq_ranges(disk)
        self._disk_transient.remove_pairs(pairs)
        entries, _ = self.index.load(pairs)
        for entry in entries:  # betas; a piece that is merged into q4 is filled there
            if entry.body is not None:
                entry.body = entry.head = None
        return entries

    def _mark_returned(self, seqs: list[int], count_delivery: bool) -> None:
        self.returned.add_pairs(seq_ranges(seqs))
        if not count_delivery:
            return
        changed = []
        for seq in seqs:
            count = self.counts[seq] = self.counts.get(seq, 0) + 1
            changed.append((seq, count))
        if self.durable:
            self.index.counts_unsaved.update(changed)
            self._journal.buffer.append_requeue(self.index.sid, changed)

    def _return(self, entries: list[Entry]) -> None:
        """Entries that are in no container become ready again."""
        self._len += len(entries)
        self._bytes += total_size(entries)
        self._rates.entered += len(entries)
        self._insert(entries)
        self._settle_down()

    def _insert(self, entries: list[Entry]) -> None:
        """Merge ready entries, in order, by seq_id. They count in _len already; their bodies may be missing."""
        if not self.q3:
            self._merge_alphas("q4", entries)
            return
        third = self.q3[0].seq
        self._merge_alphas("q4", [e for e in entries if e.seq < third])
        rest = [e for e in entries if e.seq >= third]
        if not rest:
            return
        first_q1 = self.q1[0].seq if self.q1 else math.inf
        if not self.delta_count:
            self._merge_betas("q3", [e for e in rest if e.seq < first_q1])
            self._merge_alphas("q1", [e for e in rest if e.seq >= first_q1])
            return
        start, end = self.delta_start, self.delta_end
        first_q2 = self.q2[0].seq if self.q2 else first_q1
        self._merge_betas("q3", [e for e in rest if e.seq < start])
        self._to_delta([e for e in rest if start <= e.seq and (e.seq < end or e.seq < first_q2)])
        rest = [e for e in rest if e.seq >= end and e.seq >= first_q2]
        self._merge_betas("q2", [e for e in rest if e.seq < first_q1])
        self._merge_alphas("q1", [e for e in rest if e.seq >= first_q1])

    def _merge_alphas(self, name: str, entries: list[Entry]) -> None:
        if not entries:
            return
        if any(entry.body is None for entry in entries):
            gone = set(self._read_bodies(entries))
            if gone:
                self._len -= len(gone)
                self._bytes -= total_size([e for e in entries if e.seq in gone])
                entries = [e for e in entries if e.seq not in gone]
        self._ram_count += len(entries)
        self._add_ram(total_size(entries))
        self._merge(name, entries)

    def _merge_betas(self, name: str, entries: list[Entry]) -> None:
        if not entries:
            return
        try:
            self._page_out(entries)
            drop_bodies(entries)
        except OSError as error:  # they stay whole
            self._context.trouble(error)
            held, held_bytes = ram_total(entries)
            self._ram_count += held
            self._add_ram(held_bytes)
        self._merge(name, entries)

    def _merge(self, name: str, entries: list[Entry]) -> None:
        queue: deque[Entry] = getattr(self, name)
        if not queue or not entries or entries[0].seq > queue[-1].seq:
            queue.extend(entries)
        elif entries[-1].seq < queue[0].seq:
            queue.extendleft(reversed(entries))
        else:
            setattr(self, name, deque(heapq.merge(queue, entries, key=_by_seq)))

    def ackfold(self, function: Callable[[Entry, T], T], accumulator: T, seqs: list[int]) -> T:
        for seq in seqs:
            entry = self._ram_pending.get(seq)
            if entry is None and seq in self._disk_pending:
                loaded, _ = self.index.load([seq, 1])
                if loaded and not self._read_bodies(loaded):
                    entry = loaded[0]
            if entry is not None:
                accumulator = function(entry, accumulator)
        return accumulator

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
        transient = [e for q in (self.q1, self.q2, self.q3, self.q4) for e in q if not e.flags & PERSISTENT]
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

    def purge_acks(self) -> int:
        seqs = [*self._ram_pending, *(seq for seq in self._disk_pending if seq not in self._leased)]
        return len(self.ack(seqs))

    # -- leases ------------------------------------------------------------------------------------------------------

    def checkout(self, limit: int, most_bytes: int) -> dict[int, list[int]]:
        taken: list[Entry] = []
        room = most_bytes
        while len(taken) < limit and self._len:
            head = self.peek()
            assert head is not None
            if taken and head.size > room:
                break
            entries = self._take(self._run_within(limit - len(taken), room))
            room -= total_size(entries)
            taken += entries
        if not taken:
            return {}
        self._lend_from_disk(taken, taken)
        pairs = entry_ranges(taken)
        self._leased.add_pairs(pairs)
        self._rates.left += len(taken)
        self._settle_down()
        return {self.index.sid: pairs}

    def _run_within(self, limit: int, room: int) -> int:
        """How many entries of the head container fit; at least one."""
        count = 0
        for entry in self.q4 or self.q3:
            room -= entry.size
            if count and (room < 0 or count >= limit):
                break
            count += 1
        return min(count, limit)

    def settle(self, ranges: dict[int, list[int]], requeue: bool) -> int:
        pairs = ranges.get(self.index.sid, [])
        leased = RangeSet()
        for i in range(0, len(pairs), 2):
            leased.add_pairs(self._leased.pairs(pairs[i], pairs[i] + pairs[i + 1]))
        if not leased:
            return 0
        self._leased.remove_pairs(leased.pairs())
        if requeue:
            return len(self.requeue(list(leased), count_delivery=False))
        before = len(self._disk_pending)
        self._disk_pending.remove_pairs(leased.pairs())
        self._disk_pending_bytes -= self._disk_pending_bytes * len(leased) // before
        self._ack_on_disk(list(leased))
        self._check()
        return len(leased)

    def invoke(self, function: Callable[[Any], T]) -> T:
        return function(self)
