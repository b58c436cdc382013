"""How messages move between RAM and disk: alphas to betas, betas to delta, and back by consumption.

The rules are RabbitMQ's of the time of q1 to q4; `variable_queue.py` tells them. Nothing here changes which messages are
ready or pending, or their order.
"""

from __future__ import annotations

import errno
import math
from itertools import islice, takewhile
from typing import TypeVar

from warren.kernel.entry import (
    IN_QS,
    IN_STORE,
    PERSISTENT,
    SLOTTED,
    Entry,
    bodiless,
    body_total,
    drop_bodies,
    entry_ranges,
    free_ones,
    ram_total,
    sizes,
    sort_by_seq,
    without,
)
from warren.storage.message_store import MessageDamaged, MessageMissing
from warren.storage.payload import join_payload, split_payload
from warren.storage.queue_state import QueueState

T = TypeVar("T")
_READ_AHEAD = 256  # bodies read at once for single fetches
_READ_AHEAD_BYTES = 1024 * 1024


class Paging(QueueState):
    """Keeps the RAM of a queue at its target."""

    __slots__ = ()

    def _refill(self) -> None:
        """q3 ran empty: the next piece of delta, or all of q1."""
        if self.delta_count:
            self._load_delta()
        if not self.q3:
            self.q4, self.q1 = self.q1, self.q4

    def _load_delta(self) -> None:
        """Read delta up to the next segment boundary into q3, until something is found or nothing is left."""
        while self.delta_count and not self.q3:
            size = self.index.segment_size
            stop = min((self.delta_start // size + 1) * size, self.delta_end)
            limit = self._settings.load_entries
            entries, lost = self.index.read(self.delta_start, stop, limit)
            self.delta_start = entries[-1].seq + 1 if len(entries) >= limit else stop
            if lost:
                self._lose([seq for seq in lost if seq not in self._ram_pending and seq not in self._disk_pending])
            if self._ram_pending or self._disk_pending:
                entries = free_ones(entries, self._ram_pending, self._disk_pending)
            self.delta_count -= len(entries)
            if self.delta_count and self.delta_start >= self.delta_end:
                self._len -= self.delta_count  # damage took them; it was reported
                self.delta_count = 0
                self._bytes_in_doubt = True
            if entries:
                held, held_bytes = ram_total(entries)
                self._ram_count += held
                self._add_ram(held_bytes)
                self._filling("q3").extend(entries)
        if not self.delta_count:
            self.delta_transient = 0
            if self.q2:
                self._filling("q3").extend(self.q2)
                self.q2.clear()
            if self._bytes_in_doubt:
                self._bytes = body_total(self.q3) + body_total(self.q1)
                self._bytes_in_doubt = False

    def _fill(self, entries: list[Entry]) -> list[Entry]:
        """Give all of `entries` their bodies, and read ahead in q3; those that are damaged are left out. The RAM counts
        are not touched for `entries`."""
        if ram_total(entries)[0] == len(entries):
            return entries
        ahead: list[Entry] = []
        room = _READ_AHEAD_BYTES
        for entry in self.q3:
            room -= entry.size
            if entry.flags & IN_STORE or room < 0 or len(ahead) + len(entries) >= _READ_AHEAD:
                break
            if entry.body is None:
                ahead.append(entry)
        try:
            lost = self._read_bodies(entries + ahead)
        finally:  # where it fails, some have their bodies all the same
            held, held_bytes = ram_total(ahead)
            self._ram_count += held
            self._add_ram(held_bytes)
        if not lost:
            return entries
        gone = set(lost)
        for entry in ahead:
            if entry.seq in gone:
                self.q3.remove(entry)
                self._len -= 1
                self._bytes -= entry.body_size
        if not self.q3 and not self.q4:
            self._refill()
        return [entry for entry in entries if entry.seq not in gone]

    def _read_bodies(self, entries: list[Entry]) -> list[int]:
        """Read what is missing from wherever it is; the seq_ids that are damaged."""
        lost = self.index.fill(entries)
        for entry in bodiless(entries, IN_STORE, IN_STORE):
            durable = entry.flags & PERSISTENT
            store = self._context.persistent_store if durable else self._context.transient_store
            try:
                entry.head, entry.body = split_payload(store.read(entry.msg_id))
            except MessageDamaged as damage:
                self._context.report(damage.path, damage.offset, damage.length, entry.seq, damage.why)
            except MessageMissing as missing:
                self._context.report(store.path, 0, 0, entry.seq, str(missing))
            if entry.body is None:
                self.index.lose(entry.seq)
                lost.append(entry.seq)
        self._disk_reads += len(entries)
        return lost

    def _lose(self, seqs: list[int]) -> None:
        """Entries of delta turned out to be damaged: they are not counted any more. Their sizes are not known."""
        self._len -= len(seqs)
        self.delta_count -= len(seqs)
        self._bytes_in_doubt = True

    def _pend_on_disk(self, entries: list[Entry]) -> None:
        """Pending acks of which only the seq_id stays in RAM. Transient ones are paged out first."""
        if not entries:
            return
        transient = without(entries, PERSISTENT)
        if transient:  # this may fail; nothing has changed then
            self._page_out(transient)
            self._page_out_slots(transient)
            sort_by_seq(transient)
            self._disk_transient.add_pairs(entry_ranges(transient))
        ordered = list(entries)
        sort_by_seq(ordered)
        self._disk_pending.add_pairs(entry_ranges(ordered))
        self._disk_pending_bytes += body_total(entries)

    def _settle_down(self) -> None:
        """After every operation: rates, paging, invariants."""
        self._operations += 1
        if not self._operations & 31 and self._rates.update(self._context.clock()):
            self._update_target()
        if len(self.q1) + len(self.q4) + len(self._ram_pending) > self._target + self._settings.ram_slack:
            self._reduce_memory()
        if self._context.debug:
            self._check()

    def _update_target(self) -> None:
        monitor = self._context.monitor
        monitor.report(id(self), self.ram_duration())
        most = self._settings.ram_target
        if monitor.ram_bytes * 2 < monitor.cap:
            self._target = most
        else:
            duration = monitor.update()
            self._target = most if math.isinf(duration) else min(most, max(1, int(duration * self._rates.total)))

    def set_ram_duration_target(self, duration: float) -> None:
        most = self._settings.ram_target
        self._target = most if math.isinf(duration) else min(most, max(1, int(duration * self._rates.total)))
        self._reduce_memory()
        self._check()

    def set_ram_target(self, count: int) -> None:
        """Page down to `count` whole messages now, and stay there until the next update."""
        self._target = count
        self._reduce_memory()
        self._check()

    def ram_duration(self) -> float:
        if self._rates.total < 0.04:
            return math.inf
        return (self._ram_count + len(self._ram_pending)) / (4 * self._rates.total)

    def _reduce_memory(self) -> None:
        """Page. What the disk cannot take stays in RAM."""
        try:
            self._page()
        except OSError as error:
            self._context.trouble(error)

    def _page(self) -> None:
        surplus = len(self.q1) + len(self.q4) + len(self._ram_pending) - self._target
        if surplus > 0:
            rates = self._rates
            if rates.ack_in - rates.ack_out > rates.in_rate - rates.out_rate:
                self._push_alphas(self._limit_ram_acks(surplus))
            else:
                self._limit_ram_acks(self._push_alphas(surplus))
        betas = len(self.q2) + len(self.q3)
        if betas > self.index.segment_size:
            surplus = betas - self._permitted_betas()
            if surplus >= self._settings.io_batch:
                self._push_betas(surplus)

    def _push_alphas(self, quota: int) -> int:
        """Alphas become betas: q1 from its head side, then q4 from its rear. What is left of the quota."""
        count = min(quota, len(self.q1))
        if count:
            moved = list(islice(self.q1, count))
            self._to_betas(moved)
            for _ in moved:
                self.q1.popleft()
            self._filling("q2" if self.delta_count else "q3").extend(moved)
            quota -= count
        count = min(quota, len(self.q4))
        if count:
            moved = list(islice(reversed(self.q4), count))
            self._to_betas(moved)
            for _ in moved:
                self.q4.pop()
            self._filling("q3").extendleft(moved)
            quota -= count
        return quota

    def _to_betas(self, entries: list[Entry]) -> None:
        """Bodies leave RAM. A body that cannot be written raises, before anything has changed."""
        self._page_out(entries)
        count, size = drop_bodies(entries)
        self._ram_count -= count
        self._add_ram(-size)

    def _page_out(self, entries: list[Entry]) -> None:
        """Make sure that the bodies of transient entries are on disk."""
        unwritten = without(entries, PERSISTENT | IN_QS | IN_STORE)
        if not unwritten:
            return
        if self._context.is_full():
            raise OSError(errno.ENOSPC, "no room for transient messages", self.index.files.directory)
        small = []
        for entry in unwritten:
            if entry.size < self._settings.embed_below:
                small.append(entry)
            else:
                store = self._context.transient_store
                entry.msg_id = store.next_id()
                entry.flags |= IN_STORE
                store.write(entry.msg_id, join_payload(entry.head, entry.body), 1)
        if small:
            self.index.page_out(small)
        self._disk_writes += len(unwritten)

    def _page_out_slots(self, entries: list[Entry]) -> None:
        unslotted = without(entries, PERSISTENT | SLOTTED)
        if unslotted:
            self.index.page_out_slots(unslotted)

    def spill(self) -> list[Entry]:
        waiting = [*self.q4, *self.q3, *self.q2, *self.q1, *self._ram_pending.values()]
        transient = without(waiting, PERSISTENT) if self.durable else waiting
        if transient:
            sort_by_seq(transient)
            self._page_out(transient)
            self._page_out_slots(transient)
        return []

    def _limit_ram_acks(self, quota: int) -> int:
        """The pending acks taken last go to disk. What is left of the quota."""
        count = min(quota, len(self._ram_pending))
        if count:
            entries = list(islice(reversed(self._ram_pending.values()), count))
            self._pend_on_disk(entries)
            for _ in entries:
                self._ram_pending.popitem()
            size, bodies = sizes(entries)
            self._unacked_bytes -= bodies
            self._add_ram(-size)
        return quota - count

    def _permitted_betas(self) -> int:
        if not self._len:
            return self._len
        if self._target == 0:
            return min(len(self.q3), self.index.segment_size)
        below = self._len - len(self.q1) - len(self.q4)
        return max(self.index.segment_size, below - below * below // (below + self._target))

    def _push_betas(self, quota: int) -> None:
        """Betas go to delta: q3 from its rear, but not below the segment of its head; then q2 from its front."""
        size = self.index.segment_size
        q3, q2 = self.q3, self.q2
        moved: list[Entry] = []
        if q3:
            boundary = (q3[0].seq // size + 1) * size
            moved = list(takewhile(lambda entry: entry.seq >= boundary, islice(reversed(q3), quota)))
            moved.reverse()
        from_q3 = len(moved)
        moved += islice(q2, quota - from_q3)
        if moved:
            self._page_out(moved)  # these may fail; nothing has moved then
            self._page_out_slots(moved)
            for _ in range(from_q3):
                q3.pop()
            for _ in range(len(moved) - from_q3):
                q2.popleft()
            self._leave_ram(moved)
            self._to_delta(moved)

    def _leave_ram(self, entries: list[Entry]) -> None:
        held, held_bytes = ram_total(entries)
        self._ram_count -= held
        self._add_ram(-held_bytes)

    def _to_delta(self, entries: list[Entry]) -> None:
        """Requires: in order; not in any container; not in the RAM counts."""
        if not entries:
            return
        self._page_out(entries)
        self._page_out_slots(entries)
        first, stop = entries[0].seq, entries[-1].seq + 1
        if self.delta_count:
            self.delta_start = min(self.delta_start, first)
            self.delta_end = max(self.delta_end, stop)
        else:
            self.delta_start, self.delta_end = first, stop
        self.delta_count += len(entries)
        self.delta_transient += len(without(entries, PERSISTENT))

    def timeout(self) -> None:
        self._rates.update(self._context.clock(), force=True)
        self._update_target()
        self._reduce_memory()
        self._check()

    def resume(self) -> None:
        self._reduce_memory()
