"""What was handed out and waits for an ack: in RAM or as ranges on disk, acked, requeued, or held by a lease.

A pending message is whole in `_ram_pending` up to the queue's RAM target; beyond that only its seq_id is kept, as part of
a range in `_disk_pending`, so that a million of them cost little. A lease (a checkout) is part of `_disk_pending`, too, and
deaf to acks: only `settle` ends it.

A requeued message goes back by its seq_id, to whichever of q1..q4 and delta has its neighbours.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TypeVar

from warren.kernel.entry import (
    IN_STORE,
    PERSISTENT,
    SLOTTED,
    Entry,
    body_total,
    drop_bodies,
    entry_ranges,
    pop_left,
    ram_total,
    record_pending,
    run_within,
    seq_ranges,
    sizes,
    sort_by_seq,
    summarize,
    take_pending,
    total_size,
    without,
)
from warren.kernel.journal_codec import ACK
from warren.kernel.ranges import RangeSet
from warren.storage.paging import Paging
from warren.storage.queue_index import AckTicket

T = TypeVar("T")
_by_seq = attrgetter("seq")


class PendingAcks(Paging):
    """The way out of a queue, and back into it."""

    __slots__ = ()

    # -- handing out ---------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> list[Entry]:
        """Remove up to `count` entries of one container from the head; bodies may be missing. The RAM counts no longer
        hold them."""
        source = self.q4 or self.q3
        count = min(count, len(source))
        entries = pop_left(source, count)
        held, held_bytes = ram_total(entries)
        self._ram_count -= held
        self._add_ram(-held_bytes)
        self._len -= count
        self._bytes -= body_total(entries)
        if source is self.q3 and not source:
            try:
                self._refill()
            except BaseException:
                self._untake(entries)
                raise
        return entries

    def _untake(self, entries: list[Entry]) -> None:
        """What was taken and cannot be handed out is the head again, in the same order. Nothing is read: the disk has just
        failed at that, or the process has no descriptor left. Requires: nothing was put before it since."""
        held, held_bytes = ram_total(entries)
        self._ram_count += held
        self._add_ram(held_bytes)
        self._len += len(entries)
        self._bytes += body_total(entries)
        if self.q4 and held < len(entries):  # q4 holds none without a body; it was q1 until q3 ran empty
            self.q1, self.q4 = self.q4, self.q1
        self._filling("q4" if self.q4 else "q3").extendleft(reversed(entries))

    def _pend(self, entries: list[Entry], bodies: int) -> None:
        record_pending(self._ram_pending, entries)
        self._unacked_bytes += bodies
        self._rates.taken += len(entries)

    def _lend_from_disk(self, entries: list[Entry], taken: list[Entry]) -> None:
        """Pending acks on disk of some that were taken. Where a transient one cannot be written, all go back."""
        try:
            self._pend_on_disk(entries)
        except OSError as error:
            self._return(taken)
            raise self._context.trouble(error) from error

    def _take_disk_pending(self, seqs: list[int]) -> list[int]:
        """Remove those of `seqs` that are pending on disk and not leased; sorted."""
        mine = self._on_disk(seqs)
        if mine:
            before = len(self._disk_pending)
            self._disk_pending.remove_pairs(seq_ranges(mine))
            self._disk_pending_bytes -= self._disk_pending_bytes * (before - len(self._disk_pending)) // before
        return mine

    def _on_disk(self, seqs: list[int]) -> list[int]:
        """Those of `seqs` that are pending on disk and not leased; sorted, and each once: what it holds is let go once."""
        return sorted({seq for seq in seqs if seq in self._disk_pending and seq not in self._leased})

    # -- ack -----------------------------------------------------------------------------------------------------------

    def ack(self, seqs: list[int]) -> list[int]:
        disk = self._on_disk(seqs) if self._disk_pending else []
        if disk:  # first: it reads, and where that fails nothing has happened
            self._ack_on_disk(disk)
            self._take_disk_pending(disk)
        found, missing = take_pending(self._ram_pending, seqs)
        if found:
            size, bodies = sizes(found)
            self._unacked_bytes -= bodies
            self._add_ram(-size)
            sort_by_seq(found)
            self._forget(found)
        self._rates.acked += len(found) + len(disk)
        if missing:
            known = {entry.seq for entry in found}
            known.update(disk)
            seqs = [seq for seq in seqs if seq in known]
        self._check()
        return seqs

    def _ack_on_disk(self, seqs: list[int]) -> None:
        if not seqs:
            return
        transient = [seq for seq in seqs if seq in self._disk_transient] if self._disk_transient else []
        pairs = seq_ranges(transient)
        loaded = self.index.load(pairs)[0] if transient else []
        if transient:
            gone = set(transient)
            seqs = [seq for seq in seqs if seq not in gone]
        if seqs:
            self._ack_pairs(ACK, seq_ranges(seqs))
        if transient:
            self._forget_transient(loaded)
            self._disk_transient.remove_pairs(pairs)
        for seq in seqs + transient if self.counts else ():
            self.counts.pop(seq, None)
            self.index.counts_unsaved.pop(seq, None)
        self.returned.remove_pairs(seq_ranges(seqs))
        self.returned.remove_pairs(seq_ranges(transient))

    def _forget(self, entries: list[Entry]) -> None:
        """Messages leave for good: journal the acks of the persistent ones, drop the bodies of the others."""
        _, _, count, _ = summarize(entries)
        persistent = entries if count == len(entries) else [entry for entry in entries if entry.flags & PERSISTENT]
        if count:
            stored = [e.msg_id for e in persistent if e.flags & IN_STORE] if self._stored else []
            self._journal_ack(ACK, entry_ranges(persistent), stored)
        if count < len(entries):
            self._forget_transient(without(entries, PERSISTENT))
        if self.counts or self.returned:
            self._forget_marks(entries)

    def _journal_ack(self, kind: int, pairs: list[int], stored: list[bytes]) -> None:
        journal = self._journal
        journal.buffer.append_ranges(kind, self.index.sid, pairs)
        self._stored -= len(stored)
        ticket = self._ack_ticket
        if (
            ticket is None or ticket.lsn != journal.next_lsn
        ):  # one for all acks of a commit, however many calls they were
            ticket = self._ack_ticket = AckTicket(journal.next_lsn)
            journal.after(partial(self._ack_synced, ticket))
        self.index.ack(pairs, ticket)
        if stored:
            ticket.stored += stored

    def _ack_synced(self, ticket: AckTicket) -> None:
        if ticket is self._ack_ticket:
            self._ack_ticket = None
        self.index.ack_synced(ticket)
        if ticket.stored:
            self._context.persistent_store.remove_many(ticket.stored)

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

    def _forget_transient(self, entries: list[Entry]) -> None:
        slotted = [entry for entry in entries if entry.flags & SLOTTED]
        if slotted:
            self.index.forget_transient(entry_ranges(slotted))
            self._context.thinned.add(self.index)
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

    def journal_ack(self, seqs: list[int]) -> None:
        """The whole of an ack, as a member of a transaction's group. It is decided: were the messages to stay pending
        until the sync, somebody could requeue them, or a checkpoint take them for live ones and repeat them behind their
        ack. Should the transaction fail, so has the store."""
        self.ack(seqs)

    def ack_committed(self, seqs: list[int]) -> list[int]:
        return []

    def purge_acks(self) -> int:
        seqs = [*self._ram_pending, *(seq for seq in self._disk_pending if seq not in self._leased)]
        return len(self.ack(seqs))

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

    # -- requeue -------------------------------------------------------------------------------------------------------

    def requeue(self, seqs: list[int], count_delivery: bool = True) -> list[int]:
        return self._requeue(seqs, self._load_for_requeue(seqs), count_delivery)

    def _requeue(self, seqs: list[int], loaded: list[Entry], count_delivery: bool) -> list[int]:
        found, missing = take_pending(self._ram_pending, seqs)
        size, bodies = sizes(found)
        self._unacked_bytes -= bodies
        self._add_ram(-size)
        disk = self._take_disk_pending(missing) if missing else []
        self._disk_transient.remove_pairs(seq_ranges(disk))
        known = {entry.seq for entry in found}
        known.update(disk)
        if not known:
            return []
        self._mark_returned(sorted(known), count_delivery)
        entries = found + loaded
        sort_by_seq(entries)
        self._return(entries)
        return [seq for seq in seqs if seq in known]

    def prepare_requeue(self, seqs: list[int], count_delivery: bool = True) -> Callable[[], list[int]]:
        loaded = self._load_for_requeue(seqs)
        return lambda: self._requeue(seqs, loaded, count_delivery)

    def _load_for_requeue(self, seqs: list[int]) -> list[Entry]:
        """What the disk may refuse, before anything changes: transient messages that go back to delta are written, and
        those that are pending on disk, which this returns, are read."""
        self._page_out_for_delta(seqs)
        return self._load_pending(seqs)

    def _page_out_for_delta(self, seqs: list[int]) -> None:
        if not self.delta_count or not self._ram_pending:
            return
        entries = [entry for seq in seqs if (entry := self._ram_pending.get(seq)) is not None]
        transient = [e for e in entries if not e.flags & PERSISTENT and e.seq >= self.delta_start]
        try:
            self._page_out(transient)
            self._page_out_slots(transient)
        except OSError as error:
            raise self._context.trouble(error) from error

    def _load_pending(self, seqs: list[int]) -> list[Entry]:
        """Those of `seqs` that are pending on disk, before anything has changed: the disk may fail. They are betas; those
        that will be merged into q4 or q1 have their bodies."""
        disk = self._on_disk(seqs) if self._disk_pending else []
        if not disk:
            return []
        entries, _ = self.index.load(seq_ranges(disk))
        for entry in entries:
            if entry.body is not None:
                entry.body = entry.head = None
        first_q1 = self.q1[0].seq if self.q1 else math.inf
        whole = [e for e in entries if not self.q3 or e.seq < self.q3[0].seq or e.seq >= first_q1]
        if whole:
            self._read_bodies(whole)
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
        self._bytes += body_total(entries)
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
                self._bytes -= body_total([e for e in entries if e.seq in gone])
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
        queue = self._filling(name)
        if not queue or not entries or entries[0].seq > queue[-1].seq:
            queue.extend(entries)
        elif entries[-1].seq < queue[0].seq:
            queue.extendleft(reversed(entries))
        else:
            setattr(self, name, deque(heapq.merge(queue, entries, key=_by_seq)))

    # -- leases --------------------------------------------------------------------------------------------------------

    def checkout(self, limit: int, most_bytes: int) -> dict[int, list[int]]:
        taken: list[Entry] = []
        room = most_bytes
        try:
            while len(taken) < limit and self._len:
                head = self.peek()
                assert head is not None
                if taken and head.body_size > room:
                    break
                entries = self._take(run_within(self.q4 or self.q3, limit - len(taken), room))
                room -= body_total(entries)
                taken += entries
        except BaseException:
            self._untake(taken)
            raise
        if not taken:
            return {}
        self._lend_from_disk(taken, taken)
        pairs = entry_ranges(taken)
        self._leased.add_pairs(pairs)
        self._rates.left += len(taken)
        self._settle_down()
        return {self.index.sid: pairs}

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
