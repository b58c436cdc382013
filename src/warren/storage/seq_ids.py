"""The seq_ids of one queue: handed out once, never twice, also not across a crash.

A seq_id may be handed out only when a reservation above it is synced. Reservations are made ahead, so a publisher
rarely waits; each time one had to, the next reservation reaches further. After a dirty stop the queue goes on at the
segment after the highest reserved or found. A new queue owns its first segment without a record: its uid is new.

Each reservation is written twice: a damaged one must not take the queue back to where it was, because a message with a
seq_id that was acked before is dead at the next start.
"""

from __future__ import annotations

from warren.storage.journal import Journal

_MOST_AHEAD = 1 << 20


class SeqIds:
    __slots__ = ("_ahead", "_asked", "_journal", "file", "next", "reserved", "uid")

    def __init__(self, journal: Journal, uid: int, ahead: int, reserved: int, next_seq: int = 0) -> None:
        self._journal = journal
        self._ahead = ahead
        self._asked = reserved  # a record up to here is in the journal, perhaps not synced
        self.uid = uid
        self.next = next_seq
        self.reserved = reserved  # safe up to here
        self.file = -1  # journal file of the newest reservation; -1: there is none

    def available(self, count: int) -> bool:
        """May `count` be taken now? Asks for a reservation where it runs low; False: sync the journal, then try again."""
        wanted = self.next + count
        if wanted + self._ahead // 2 > self._asked:
            if wanted > self._asked:
                self._ahead = min(max(self._ahead * 2, count), _MOST_AHEAD)
            self._reserve(wanted + self._ahead)
        return wanted <= self.reserved

    @property
    def asking(self) -> bool:
        """Is a reservation on its way to the disk?"""
        return self._asked > self.reserved

    def take(self, count: int) -> int:
        """The first of `count` consecutive seq_ids. Requires: available(count)."""
        first = self.next
        self.next = first + count
        return first

    def carry(self) -> None:
        """Repeat the newest reservation in the journal's newest file."""
        for _ in range(2):
            self._journal.buffer.append_reserve(self.uid, self._asked)
        self.file = self._journal.buffer.file

    def _reserve(self, upto: int) -> None:
        self._asked = upto
        self.carry()
        self._journal.after(lambda: self._granted(upto))

    def _granted(self, upto: int) -> None:
        self.reserved = max(self.reserved, upto)

    def unlimited(self) -> None:
        """No restart brings this queue back, so nothing has to be reserved."""
        self.reserved = self._asked = 1 << 62
