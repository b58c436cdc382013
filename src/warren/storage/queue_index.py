"""Where the messages of one queue are on disk: in the journal at first, in segments after a checkpoint.

The overlay (`kernel.overlay`) knows the first, the segments the second; a message is alive in one of them. This module
merges the two for reading, spreads acks over both, and pages transient messages out to segments. It keeps place, not
order: which messages are ready, and in which of q1..q4 and delta, is the backing queue's business.

An ack goes through two stages, because nothing outside the journal may happen before its record is synced:

    index.ack(pairs, ticket)       the record is in the buffer: the messages are not read any more
    index.ack_synced(ticket)       it is safe: rows are dead, slots may be forgotten at the next checkpoint
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from operator import attrgetter

from warren.kernel.entry import IN_QS, IN_STORE, SLOTTED, Entry, bodiless, body_spans, set_level, sort_by_seq
from warren.kernel.journal_codec import read_publishes
from warren.kernel.overlay import Overlay, row_pairs, split_rows
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import (
    BODY_PREFIX_BYTES,
    SLOT_BYTES,
    bit_runs,
    encode_bodies,
    encode_slots,
    fill_bodies,
    live_bytes,
    read_slots,
)
from warren.storage.disk import Disk, DiskFile
from warren.storage.file_cache import FileCache
from warren.storage.journal import Journal
from warren.storage.layout import BODIES_MAGIC, HEADER_BYTES, INDEX_MAGIC, journal_path, level_of
from warren.storage.segment import Report, Segment, SegmentFiles

_MOST_SPAN_BYTES = 4 * 1024 * 1024  # one read of the journal or of a .qs
_MOST_GAP_BYTES = 65536  # is read over rather than seeked over
_by_seq = attrgetter("seq")


@dataclass(slots=True)
class AckTicket:
    """What the acks of one commit have to finish once their records are synced."""

    lsn: int  # of that commit
    in_journal: list[int] = field(default_factory=list)  # flat: first, count, ...
    in_segments: list[int] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)  # what they held in the message store


def _join(pairs: list[int], more: list[int]) -> None:
    """Append pairs; the first of them to the last one where it goes on there, as it does when a queue is drained."""
    if pairs and pairs[-2] + pairs[-1] == more[0]:
        pairs[-1] += more[1]
        if len(more) > 2:
            pairs += more[2:]
    else:
        pairs += more


class QueueIndex:
    """Requires: the engine's lock for everything."""

    __slots__ = (  # of ten thousand queues there are at least as many
        "_boot",
        "_disk",
        "_handles",
        "_journal",
        "_journal_directory",
        "_report",
        "counts_unsaved",
        "files",
        "names_changed",
        "overlay",
        "segment_size",
        "segments",
        "shadowed",
        "sid",
        "unsynced_parents",
    )

    def __init__(
        self,
        disk: Disk,
        directory: str,
        sid: int,
        *,
        segment_size: int,
        boot: int,
        journal: Journal,
        journal_directory: str,
        handles: FileCache,
        report: Report,
    ) -> None:
        self.sid = sid
        self.overlay = Overlay()
        self.segments: dict[int, Segment] = {}
        self.files = SegmentFiles(disk, directory, sid, segment_size)
        self.segment_size = segment_size
        self.counts_unsaved: dict[int, int] = {}  # delivery counts that are only in the journal
        self.shadowed = False  # a segment is
        self.names_changed = False  # files were made or unlinked since the directory was synced
        self.unsynced_parents: list[str] = []  # of the directory itself, where it was made since
        self._disk = disk
        self._boot = boot
        self._journal = journal
        self._journal_directory = journal_directory
        self._handles = handles
        self._report = report

    # -- acks --------------------------------------------------------------------------------------------------------

    def ack(self, pairs: list[int], ticket: AckTicket) -> None:
        """Acks of persistent messages are in the journal's buffer. Ranges may have holes."""
        found, missing = self.overlay.ack(pairs)
        if found:
            _join(ticket.in_journal, found)
        if missing:
            for segment, first, count in self._split(missing):
                base = segment.number * self.segment_size
                cleared: list[int] = []
                segment.unsynced += segment.kill(first, count, cleared)
                for i in range(0, len(cleared), 2):
                    _join(ticket.in_segments, [base + cleared[i], cleared[i + 1]])

    def take_over(self, rows: bytes) -> None:
        """A checkpoint wrote `rows` to segments, and they are synced: slots replace overlay rows, and acks that came
        meanwhile are theirs now."""
        acked, dead = self.overlay.moved(rows)
        for segment, first, count in self._split(row_pairs(rows)):
            segment.add(first, count)
        for segment, first, count in self._split(acked):
            segment.unsynced += segment.kill(first, count, [])
        for segment, first, count in self._split(dead):
            segment.kill(first, count, [])
            segment.unsaved += (first, count)

    def shadow(self, rows: bytes) -> None:
        """A checkpoint of `rows` was cut off: perhaps they have slots, and the journal has them, too. Where an ack was
        synced meanwhile, nobody else will tell the slot. (A row without a segment has no slot that could come back.)"""
        for segment, _, _ in self._split(row_pairs(rows)):
            segment.shadowed = self.shadowed = True
        for segment, first, count in self._split(self.overlay.settled(rows)):
            segment.unsaved += (first, count)

    def ack_synced(self, ticket: AckTicket) -> None:
        leftover = self.overlay.ack_synced(ticket.in_journal) if ticket.in_journal else []
        if self.shadowed:  # a slot that a cut-off checkpoint left would bring the message back once the journal is gone
            for segment, first, count in self._split(ticket.in_journal):
                if segment.shadowed:
                    segment.unsaved += (first, count)
        for segment, first, count in self._split(leftover + ticket.in_segments):
            segment.unsynced -= count
            segment.unsaved += (first, count)

    def forget_transient(self, pairs: list[int]) -> None:
        """Transient messages that were paged out are gone; nothing has to be synced for them."""
        cleared: list[int] = []
        for segment, first, count in self._split(pairs):
            segment.kill(first, count, cleared)

    def _split(self, pairs: list[int]) -> list[tuple[Segment, int, int]]:
        """Pairs of seq_ids by segment: (segment, first slot, count); parts without a segment are left out."""
        size = self.segment_size
        segments = self.segments
        out = []
        for i in range(0, len(pairs), 2):
            first, stop = pairs[i], pairs[i] + pairs[i + 1]
            if (stop - first) // size > len(segments):  # a purge of a long range: go by the segments there are
                numbers = sorted(number for number in segments if first // size <= number <= (stop - 1) // size)
            else:
                numbers = [number for number in range(first // size, (stop - 1) // size + 1) if number in segments]
            for number in numbers:
                base = number * size
                low = max(first - base, 0)
                out.append((segments[number], low, min(stop - base, size) - low))
        return out

    # -- paging out transient messages -------------------------------------------------------------------------------

    def page_out(self, entries: list[Entry]) -> None:
        """Small transient messages go to the segments, bodies and slots, unsynced. Requires: they hold their bodies."""
        for segment, group in self._by_segment(entries):
            self.ensure_created(segment)
            file = self.open_append(segment, "qs", BODIES_MAGIC)
            try:
                data = encode_bodies(group, self.sid, segment.qs_end)
                file.pwrite(data, segment.qs_end)
                segment.qs_end += len(data)
            except OSError:
                for entry in group:
                    entry.flags &= ~IN_QS
                raise
            finally:
                file.close()
        try:
            self.page_out_slots(entries)
        except OSError:
            for entry in entries:  # a body without a slot does not keep its segment
                if not entry.flags & SLOTTED:
                    entry.flags &= ~IN_QS
            raise

    def page_out_slots(self, entries: list[Entry]) -> None:
        """Positions of transient messages go to .qi, unsynced."""
        for segment, group in self._by_segment(entries):
            self.ensure_created(segment)
            segment.transients = True
            file = self.open_append(segment, "qi", INDEX_MAGIC)
            try:
                for slot, data in encode_slots(group, self.sid, self.segment_size, self._boot):
                    file.pwrite(data, HEADER_BYTES + slot * SLOT_BYTES)
                    segment.add(slot, len(data) // SLOT_BYTES)
                    segment.written += len(data) // SLOT_BYTES
            except OSError:
                for entry in group:
                    entry.flags &= ~SLOTTED
                    segment.kill(entry.seq % self.segment_size, 1, [])
                raise
            finally:
                file.close()

    def _by_segment(self, entries: list[Entry]) -> list[tuple[Segment, list[Entry]]]:
        groups: dict[int, list[Entry]] = {}
        for entry in sorted(entries, key=_by_seq):
            groups.setdefault(entry.seq // self.segment_size, []).append(entry)
        return [(self.segment(number), group) for number, group in groups.items()]

    def segment(self, number: int) -> Segment:
        segment = self.segments.get(number)
        if segment is None:
            segment = self.segments[number] = Segment(number, self.segment_size)
        return segment

    def ensure_created(self, segment: Segment) -> None:
        if not segment.created:
            made = self._disk.make_dirs(self.files.directory, sync=False)
            self.unsynced_parents += made
            self.names_changed = True
            self.files.create(segment)

    def open_append(self, segment: Segment, suffix: str, magic: bytes) -> DiskFile:
        """A handle for writing. A cached reader may stand for the file before a snapshot's copy: drop it."""
        self._handles.drop(self.files.path(segment.number, suffix))
        file, made = self.files.open_append(segment.number, suffix, magic)
        self.names_changed = self.names_changed or made
        return file

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, first: int, stop: int, limit: int) -> tuple[list[Entry], list[int]]:
        """Up to `limit` live messages of [first, stop) in order, and the seq_ids that turned out to be damaged. Those
        from the journal have their bodies, those from segments do not."""
        lost: list[int] = []
        entries = self._from_journal(self.overlay.rows_between(first, stop, limit), lost)
        slotted = self._from_segments(first, stop, limit, lost)
        if entries and slotted:
            entries += slotted
            sort_by_seq(entries)
            del entries[limit:]
        elif slotted:
            entries = slotted
        if level := level_of(self.sid):
            set_level(entries, level)
        return entries, lost

    def load(self, pairs: list[int]) -> tuple[list[Entry], list[int]]:
        """The live messages of a flat list first, count, ..., in its order."""
        entries: list[Entry] = []
        lost: list[int] = []
        for i in range(0, len(pairs), 2):
            found, damaged = self.read(pairs[i], pairs[i] + pairs[i + 1], pairs[i + 1])
            entries += found
            lost += damaged
        return entries, lost

    def fill(self, entries: list[Entry]) -> list[int]:
        """Give bodies to entries that have none and are not IN_STORE; the seq_ids of those that are damaged."""
        lost: list[int] = []
        unplaced = bodiless(entries, IN_STORE | IN_QS, 0)
        if unplaced:
            self._place(unplaced, lost)
        wanted = bodiless(entries, IN_STORE | IN_QS, IN_QS)
        sort_by_seq(wanted)
        spans = body_spans(wanted, self.segment_size, BODY_PREFIX_BYTES, _MOST_SPAN_BYTES, _MOST_GAP_BYTES)
        for number, low, high, i, j in spans:
            self._fill_span(number, low, high, wanted[i:j], lost)
        return lost

    def _fill_span(self, number: int, low: int, high: int, entries: list[Entry], lost: list[int]) -> None:
        path = self.files.path(number, "qs")
        damaged: list[Entry] = []
        try:
            data = self._handles.read(path, high - low, low)
        except FileNotFoundError:
            data = b""
        fill_bodies(entries, data, low, self.sid, damaged)
        for entry in damaged:
            self._report(path, entry.offset, BODY_PREFIX_BYTES + entry.size, entry.seq, "body")
            self._lose(entry.seq, lost)

    def _place(self, entries: list[Entry], lost: list[int]) -> None:
        """Entries that only know their seq_id: give them their body from the journal, or their offset from the slot."""
        wanted = {entry.seq: entry for entry in entries}
        first, last = min(wanted), max(wanted)
        if last - first < 4 * len(wanted):
            found, _ = self.read(first, last + 1, last - first + 1)
        else:
            found, _ = self.load([number for seq in sorted(wanted) for number in (seq, 1)])
        for copy in found:
            entry = wanted.get(copy.seq)
            if entry is not None:
                entry.head, entry.body = copy.head, copy.body
                entry.flags |= copy.flags & IN_QS
                entry.offset = copy.offset
        gone = [seq for seq, entry in wanted.items() if entry.body is None and not entry.flags & IN_QS]
        lost += gone  # found damaged just now, or lost before

    def _from_journal(self, rows: bytes, lost: list[int]) -> list[Entry]:
        entries: list[Entry] = []
        damaged: list[tuple[int, int, int]] = []
        for _, number, start, stop, part in split_rows(rows, self.segment_size, _MOST_SPAN_BYTES):
            read_publishes(part, self._journal.read(number, start, stop), start, entries, damaged)
            for seq, offset, size in damaged:
                path = journal_path(self._journal_directory, number)
                self._report(path, offset, size, seq, "publish record")
                self._lose(seq, lost)
            damaged.clear()
        return entries

    def _from_segments(self, first: int, stop: int, limit: int, lost: list[int]) -> list[Entry]:
        entries: list[Entry] = []
        for segment, slot, count in self._split([first, stop - first]):
            if not segment.live_count:
                continue
            damaged: list[int] = []
            path = self.files.path(segment.number, "qi")
            base = segment.number * self.segment_size
            data = b""
            with contextlib.suppress(FileNotFoundError):  # somebody took it away: as if all of it were damaged
                data = self._handles.read(path, count * SLOT_BYTES, HEADER_BYTES + slot * SLOT_BYTES)
            short = count - len(data) // SLOT_BYTES
            if short:
                cut = slot + len(data) // SLOT_BYTES
                gone = bit_runs(segment.live, cut, slot + count)
                damaged += [number for i in range(0, len(gone), 2) for number in range(gone[i], gone[i] + gone[i + 1])]
            stale: list[int] = []
            left = limit - len(entries)
            read_slots(data, base, slot, self.sid, self._boot, segment.live, left, entries, damaged, stale)
            for number in stale:
                segment.kill(number, 1, [])
            for number in damaged:
                self._report(path, HEADER_BYTES + number * SLOT_BYTES, SLOT_BYTES, base + number, "slot")
                self._lose(base + number, lost)
            if len(entries) >= limit:
                break
        return entries

    def _lose(self, seq: int, lost: list[int]) -> None:
        """A damaged message is skipped from now on; its bytes stay where they are until its segment goes."""
        lost.append(seq)
        if not self.overlay.forget(seq, 1):
            self.forget_transient([seq, 1])

    def lose(self, seq: int) -> None:
        """A message whose stored payload is damaged is skipped from now on."""
        self._lose(seq, [])

    def drop_segment(self, number: int) -> None:
        """A segment that has nothing alive goes: its .qi at once, the rest is the checkpoint's business."""
        for suffix in ("qi", "qs"):
            self._handles.drop(self.files.path(number, suffix))
        if self.files.unlink_index(number):
            self.names_changed = True
        del self.segments[number]

    # -- counting ----------------------------------------------------------------------------------------------------

    def live_pairs(self, first: int, stop: int) -> list[int]:
        """The live seq_ids of [first, stop) in segments, as a flat list first, count, ..."""
        pairs: list[int] = []
        for segment, slot, count in self._split([first, stop - first]):
            base = segment.number * self.segment_size
            runs = bit_runs(segment.live, slot, slot + count)
            for i in range(0, len(runs), 2):
                pairs += (base + runs[i], runs[i + 1])
        return pairs

    def forgotten_pairs(self) -> list[int]:
        """seq_ids that are not alive, though a reader of the files may think so: nothing on disk says that a transient
        message is gone. As a flat list first, count, ..."""
        pairs: list[int] = []
        size = self.segment_size
        for number in sorted(number for number, segment in self.segments.items() if segment.transients):
            alive = RangeSet(self.live_pairs(number * size, (number + 1) * size))
            alive.add_pairs(row_pairs(self.overlay.rows_between(number * size, (number + 1) * size, size)))
            pairs += alive.gaps(number * size, (number + 1) * size)
        return pairs

    def live_count(self) -> int:
        """Messages that are on disk, in segments and in the journal."""
        count = int(self.overlay.live_totals()[0])
        return count + sum(segment.live_count for segment in self.segments.values())

    def live_bytes(self) -> int:
        """Payload bytes of what is alive in segments: reads all of their slots."""
        total = 0
        for number, segment in self.segments.items():
            if segment.live_count:
                path = self.files.path(number, "qi")
                slots = self._handles.read(path, self.segment_size * SLOT_BYTES, HEADER_BYTES)
                total += live_bytes(slots, segment.live)
        return total

    def close(self) -> None:
        for number in self.segments:
            for suffix in ("qi", "qs"):
                self._handles.drop(self.files.path(number, suffix))
        self.segments.clear()
