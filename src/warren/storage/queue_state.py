"""What a variable queue holds, and what must be true of it: the five containers, the pending acks, the counts.

Ten thousand queues are not rare, and most of them are empty: a container is made when something is first put into it
(`_filling`); until then the shared `NOTHING` stands in its place.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, TypeVar

from warren.kernel.entry import (
    IN_STORE,
    PERSISTENT,
    Entry,
    ram_total,
    seq_ranges,
    sizes,
)
from warren.kernel.ranges import RangeSet
from warren.storage.context import QueueContext
from warren.storage.nothing import NOTHING
from warren.storage.queue_index import AckTicket, QueueIndex
from warren.storage.rates import Rates
from warren.storage.seq_ids import SeqIds

T = TypeVar("T")


class QueueState:
    """The fields, their sizes and their invariants; nothing here moves a message."""

    __slots__ = (
        "_ack_ticket",
        "_bytes",
        "_bytes_in_doubt",
        "_confirmed",
        "_context",
        "_disk_pending",
        "_disk_pending_bytes",
        "_disk_reads",
        "_disk_transient",
        "_disk_writes",
        "_hidden",
        "_journal",
        "_leased",
        "_len",
        "_operations",
        "_ram_bytes",
        "_ram_count",
        "_ram_pending",
        "_rates",
        "_settings",
        "_stored",
        "_target",
        "_unacked_bytes",
        "_unconfirmed",
        "counts",
        "delta_count",
        "delta_end",
        "delta_start",
        "delta_transient",
        "durable",
        "index",
        "q1",
        "q2",
        "q3",
        "q4",
        "redelivered_below",
        "returned",
        "seqs",
    )

    def __init__(self, index: QueueIndex, seqs: SeqIds, context: QueueContext, durable: bool = True) -> None:
        self.index = index
        self.seqs = seqs
        self.durable = durable
        self._context = context
        self._settings = context.settings
        self._journal = context.journal
        self.q1 = self.q2 = self.q3 = self.q4 = NOTHING
        self.delta_start = 0  # valid while delta_count > 0
        self.delta_end = 0
        self.delta_count = 0
        self.delta_transient = 0  # transient messages among them, at most
        self._len = 0
        self._bytes = 0  # body bytes of ready messages
        self._bytes_in_doubt = False  # damage in delta took some of them; made up for when delta is read
        self._ram_count = 0  # ready messages whose body is in RAM
        self._ram_bytes = 0  # their payload, with the heads, and that of _ram_pending
        self._ram_pending: dict[int, Entry] = {}
        self._disk_pending = RangeSet()  # pending acks that are only on disk
        self._disk_transient = RangeSet()  # those of them that are transient
        self._disk_pending_bytes = 0  # body bytes
        self._unacked_bytes = 0  # body bytes of _ram_pending
        self._leased = RangeSet()  # part of _disk_pending that belongs to checkouts
        self._stored = 0  # messages, ready or pending, whose payload is in the persistent message store
        self.counts: dict[int, int] = {}  # seq_id -> delivery count, where it is not 0
        self.returned = RangeSet()  # seq_ids that were handed out and came back
        self.redelivered_below = 0  # everything below was perhaps handed out before a crash
        self._hidden = RangeSet()  # published by transactions that are not committed yet
        self._ack_ticket: AckTicket | None = None  # acks of the commit that is being filled
        self._confirmed: list[int] = []
        self._unconfirmed = 0
        self._rates = Rates(context.clock())
        self._operations = 0  # the rates are looked at every 32nd
        self._target = context.settings.ram_target
        self._disk_reads = 0
        self._disk_writes = 0

    def _filling(self, name: str) -> deque[Entry]:
        """The container q1, q2, q3 or q4, to put something into."""
        queue: deque[Entry] = getattr(self, name)
        if queue is NOTHING:
            queue = deque()
            setattr(self, name, queue)
        return queue

    def note_stored(self, entries: list[Entry]) -> None:
        """Count the messages whose payload is in the persistent store."""
        if max(entry.size for entry in entries) >= self._settings.embed_below:
            self._stored += sum(1 for entry in entries if entry.flags & IN_STORE and entry.flags & PERSISTENT)

    def _last_seq(self) -> int:
        if self.q1:
            return self.q1[-1].seq
        if self.q2:
            return self.q2[-1].seq
        if self.delta_count:
            return self.delta_end - 1
        if self.q3:
            return self.q3[-1].seq
        return self.q4[-1].seq if self.q4 else -1

    def peek(self) -> Entry | None:
        """The head, perhaps without its body; None when empty."""
        if self.q4:
            return self.q4[0]
        return self.q3[0] if self.q3 else None

    def _lowest_seq(self) -> int:
        head = self.peek()
        assert head is not None
        return head.seq

    def _add_ram(self, size: int) -> None:
        self._ram_bytes += size
        self._context.monitor.ram_bytes += size

    @property
    def target_ram_count(self) -> int:
        return self._target

    def __len__(self) -> int:
        return self._len

    def is_empty(self) -> bool:
        return self._len == 0

    def depth(self) -> int:
        return self._len + self.pending_count

    @property
    def pending_count(self) -> int:
        return len(self._ram_pending) + len(self._disk_pending)

    def ready_bytes(self) -> int:
        return self._bytes

    def total_bytes(self) -> int:
        """Body bytes of ready and pending messages."""
        return self._bytes + self._unacked_bytes + self._disk_pending_bytes

    def pending_pairs(self) -> list[int]:
        """All pending acks, leases too, as a flat list first, count, ..."""
        pending = RangeSet(self._disk_pending.pairs())
        pending.add_pairs(seq_ranges(sorted(self._ram_pending)))
        return pending.pairs()

    @property
    def leased(self) -> RangeSet:
        """Pending acks that belong to checkouts; not to be changed."""
        return self._leased

    def needs_timeout(self) -> bool:
        return self._unconfirmed > 0

    def msg_rates(self) -> tuple[float, float]:
        return self._rates.in_rate, self._rates.out_rate

    def info(self) -> dict[str, Any]:
        rates = self._rates
        return {
            "q1": len(self.q1),
            "q2": len(self.q2),
            "delta": self.delta_count,
            "q3": len(self.q3),
            "q4": len(self.q4),
            "len": self._len,
            "pending_acks": self.pending_count,
            "ram_pending_acks": len(self._ram_pending),
            "ram_msg_count": self._ram_count,
            "ram_bytes": self._ram_bytes,
            "message_bytes": self._bytes + self._unacked_bytes + self._disk_pending_bytes,
            "message_bytes_ready": self._bytes,
            "message_bytes_unacknowledged": self._unacked_bytes + self._disk_pending_bytes,
            "next_seq_id": self.seqs.next,
            "target_ram_count": self._target,
            "avg_ingress_rate": rates.in_rate,
            "avg_egress_rate": rates.out_rate,
            "avg_ack_ingress_rate": rates.ack_in,
            "avg_ack_egress_rate": rates.ack_out,
            "disk_reads": self._disk_reads,
            "disk_writes": self._disk_writes,
        }

    def _chunks(self, pairs: list[int]) -> list[list[int]]:
        """Flat pairs cut so that no piece is longer than one load."""
        most = self._settings.load_entries
        out = []
        for i in range(0, len(pairs), 2):
            first, stop = pairs[i], pairs[i] + pairs[i + 1]
            out += [[at, min(most, stop - at)] for at in range(first, stop, most)]
        return out

    def _check(self) -> None:
        """The invariants that `variable_queue.py` begins with."""
        if not self._context.debug:
            return
        q1, q2, q3, q4, delta = self.q1, self.q2, self.q3, self.q4, self.delta_count
        assert not q1 or q3, "q1 non-empty => q3 non-empty"
        assert not q2 or delta, "q2 non-empty => delta non-empty"
        assert not delta or q3, "delta non-empty => q3 non-empty"
        assert (self._len == 0) == (not q3 and not q4), "len = 0 <=> q3 and q4 empty"
        assert self._len == len(q1) + len(q2) + delta + len(q3) + len(q4), (self._len, self.info())
        order = [e.seq for e in (*q4, *q3)]
        if delta:
            assert self.delta_start < self.delta_end
            assert not order or order[-1] < self.delta_start
            order.append(self.delta_end - 1)
        order += [e.seq for e in (*q2, *q1)]
        assert all(a < b for a, b in itertools.pairwise(order)), f"order by seq_id: {order}"
        assert all(e.body is not None for e in (*q1, *q4)), "q1 and q4 hold alphas"
        held, held_bytes = 0, 0
        for queue in (q1, q2, q3, q4):
            count, size = ram_total(queue)
            held += count
            held_bytes += size
        assert held == self._ram_count, (held, self._ram_count)
        pending, unacked = sizes(self._ram_pending.values())
        assert unacked == self._unacked_bytes, (unacked, self._unacked_bytes)
        assert held_bytes + pending == self._ram_bytes, (held_bytes, pending, self._ram_bytes)
        assert min(self._bytes, self._disk_pending_bytes) >= 0
