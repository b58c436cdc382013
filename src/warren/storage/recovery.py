"""How a vhost begins again: from the terms of a clean stop, or from its files after a dirty one.

Clean: the file `recovery` (`recovery_terms.py`) says which slots of which segment are alive, and the journal is empty; no
slot is read.

Dirty, for the whole vhost: FLOOR, then the journal files from there on, then headers, slots and ack batches of every
segment; bodies are not read. Acks of the journal are applied to slots. After a checkpoint that was cut short a message
is in the journal and in a slot, an ack in the journal and in .qa: then the journal's word counts, and the next checkpoint
writes the other anew. What is read of it now may be only in the page cache, of a process that was killed before the sync,
or of one whose sync failed. The message store is counted anew from what is alive.

Records of a uid that the metadata does not know are dropped: the queue was deleted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from warren.kernel.entry import IN_STORE, Entry
from warren.kernel.journal_codec import DEDUP, read_publishes, replay
from warren.kernel.overlay import Overlay, row_pairs, split_rows
from warren.kernel.ranges import RangeSet
from warren.storage.disk import Disk
from warren.storage.journal import list_files, read_floor
from warren.storage.layout import HEADER_BYTES, JOURNAL_MAGIC, journal_path, pairs_of, unpack_header
from warren.storage.ledger import Ledger
from warren.storage.queue_index import QueueIndex
from warren.storage.reading import open_to_read, read_around, read_whole
from warren.storage.segment import Report, Segment, SegmentFiles

TORN_END = "end of the journal: torn, or damaged"
_SPAN_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class JournalReplay:
    """What the journal says."""

    overlays: dict[int, Overlay]
    acks: dict[int, RangeSet] = field(default_factory=dict)
    counts: dict[int, dict[int, int]] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    floor: int = 0
    last_file: int = 0
    last_lsn: int = 0
    records: int = 0


def replay_journal(
    disk: Disk, directory: str, sids: list[int], ledger: Ledger, report: Report, progress: Callable[[int, int], None]
) -> JournalReplay:
    """Read all files from the floor on. `progress` gets (files done, files)."""
    floor, why = read_floor(disk, directory)
    if why is not None:
        report(os.path.join(directory, "FLOOR"), 0, 20, -1, f"{why}; rebuilt from the journal's headers")
    state = JournalReplay({sid: Overlay() for sid in sids}, floor=floor)
    numbers = list_files(disk, directory)
    state.last_file = max([floor - 1, *numbers])
    needed = [number for number in numbers if number >= floor]
    for done, number in enumerate(needed):
        path = journal_path(directory, number)
        data = read_whole(disk, path)
        if unpack_header(JOURNAL_MAGIC, data, path) is None and len(data) > HEADER_BYTES and any(data[:HEADER_BYTES]):
            report(path, 0, HEADER_BYTES, -1, "header of a journal file; its records are still read")
        others: list[tuple[int, Any]] = []
        damaged: list[tuple[int, int]] = []
        lsn, _, records, _ = replay(
            data, HEADER_BYTES, number, state.overlays, state.acks, state.counts, state.reserved, others, damaged
        )
        for kind, body in others:
            if kind == DEDUP and isinstance(body, tuple):
                sid, producer, publishing_id = body
                ledger.note(DEDUP, f"{sid >> 8}:{producer.decode(errors='surrogateescape')}", publishing_id, number)
            else:
                ledger.replay(kind, body, number)
        last = number == needed[-1]
        for offset, length in damaged:
            report(path, offset, length, -1, TORN_END if last else "journal record")
        state.last_lsn = max(state.last_lsn, lsn)
        state.records += records
        progress(done + 1, len(needed))
    for overlay in state.overlays.values():
        overlay.squeeze()
    return state


@dataclass(frozen=True, slots=True)
class SegmentScan:
    """A segment that a dirty start has to read, and what the journal says of its messages (flat: first, count, ...)."""

    directory: str
    sid: int
    segment_size: int
    number: int
    boot: int
    acked: list[int]
    journaled: list[int]
    floor: int = 0  # of the journal: trailers of checkpoints below it are taken at their word


@dataclass(slots=True)
class ScannedSegment:
    """What a scan found: all that a start needs of the segment, without its slots, so that it can travel."""

    segment: Segment
    live_bytes: int  # bodies of the live slots
    refs: list[tuple[int, bytes]]  # slot and msg_id of live slots that refer to the message store
    counts: dict[int, int]  # slot -> delivery count
    bad_header: bool
    damage: list[tuple[str, int, int, int, str]] = field(default_factory=list)  # as for `Report`


ScanSegments = Callable[[list[SegmentScan]], Iterable[ScannedSegment]]  # one for each, in the same order


def scan_segment(disk: Disk, scan: SegmentScan) -> ScannedSegment:
    """Read one segment. It depends on nothing but its three files, so any process that sees them can do it."""
    damage: list[tuple[str, int, int, int, str]] = []
    files = SegmentFiles(disk, scan.directory, scan.sid, scan.segment_size)
    acked = RangeSet(scan.acked) if scan.acked else None
    # Where the journal still has messages of it, slots may be newer than their trailer.
    found = files.recover(
        scan.number, scan.boot, acked, lambda *line: damage.append(line), floor=0 if scan.journaled else scan.floor
    )
    segment, base = found.segment, scan.number * scan.segment_size
    for first, length in pairs_of(scan.journaled):
        if segment.kill(first - base, length, []):
            segment.shadowed = True
    refs = [(slot, msg_id) for slot, msg_id in found.refs if segment.is_live(slot)]
    return ScannedSegment(segment, found.live_bytes(), refs, found.counts, found.bad_header, damage)


@dataclass(slots=True)
class StreamRecovery:
    """What a dirty start found of one stream."""

    count: int
    body_bytes: int
    low: int
    stop: int  # above every seq_id found
    stored: list[tuple[int, bytes]]  # (seq_id, msg_id) of what refers to the message store
    counts: dict[int, int]


def stream_scans(index: QueueIndex, state: JournalReplay, boot: int) -> list[SegmentScan]:
    """What has to be read of a stream."""
    size, overlay, acks = index.segment_size, state.overlays[index.sid], state.acks.get(index.sid)
    return [
        SegmentScan(
            index.files.directory,
            index.sid,
            size,
            number,
            boot,
            acks.pairs(number * size, (number + 1) * size) if acks else [],
            row_pairs(overlay.rows_between(number * size, (number + 1) * size, size)),
            state.floor,
        )
        for number in index.files.numbers()
    ]


def recover_stream(
    disk: Disk,
    directory: str,
    index: QueueIndex,
    state: JournalReplay,
    scanned: Iterable[ScannedSegment],
    report: Report,
) -> StreamRecovery:
    """Rebuild an index from what was found in its segments, and the journal's word."""
    index.overlay = overlay = state.overlays[index.sid]
    stored: list[tuple[int, bytes]] = []
    counts: dict[int, int] = {}
    acks = state.acks.get(index.sid)
    total = 0
    stop = max(overlay.last_seq() + 1, acks.stop() if acks else 0)
    size = index.segment_size
    dead: list[int] = []
    for found in scanned:
        for line in found.damage:
            report(*line)
        segment, base = found.segment, found.segment.number * size
        stop = max(stop, base + size)
        if segment.empty and not segment.unsaved:
            dead.append(segment.number)
            continue
        if found.bad_header:
            index.files.mend_header(segment.number)
        total += found.live_bytes
        index.segments[segment.number] = segment
        index.shadowed = index.shadowed or segment.shadowed
        stored += [(base + slot, msg_id) for slot, msg_id in found.refs]
        counts.update((base + slot, count) for slot, count in found.counts.items())
    index.files.clear_away(dead)
    journal_count, journal_bytes = overlay.live_totals()
    for entry in _unmeasured_in_journal(disk, directory, overlay, size):
        journal_bytes += entry.body_size
        if entry.flags & IN_STORE:
            stored.append((entry.seq, entry.msg_id))
    fresh = state.counts.get(index.sid, {})
    counts.update(fresh)
    alive = {seq: count for seq, count in counts.items() if _is_live(index, seq)}
    index.counts_unsaved = {seq: count for seq, count in fresh.items() if seq in alive}
    slots = sum(segment.live_count for segment in index.segments.values())
    return StreamRecovery(
        count=slots + journal_count,
        body_bytes=total + journal_bytes,
        low=_lowest(index),
        stop=stop,
        stored=stored,
        counts=alive,
    )


def _is_live(index: QueueIndex, seq: int) -> bool:
    number, slot = divmod(seq, index.segment_size)
    segment = index.segments.get(number)
    if segment is not None and segment.is_live(slot):
        return True
    return index.overlay.locate(seq) is not None


def _lowest(index: QueueIndex) -> int:
    low = index.overlay.first_seq()
    for number in sorted(index.segments):
        if index.segments[number].live_count:
            first = index.live_pairs(number * index.segment_size, (number + 1) * index.segment_size)[0]
            return first if low is None else min(first, low)
    return low or 0


def _unmeasured_in_journal(disk: Disk, directory: str, overlay: Overlay, segment_size: int) -> list[Entry]:
    """Entries of publish records that have to be read: they refer to the message store, or have very long heads."""
    entries: list[Entry] = []
    damaged: list[tuple[int, int, int]] = []
    for _, number, start, stop, rows in split_rows(overlay.unmeasured_rows(), segment_size, _SPAN_BYTES):
        file = open_to_read(disk, journal_path(directory, number))
        try:
            data = read_around(file, stop - start, start)
            read_publishes(rows, data, start, entries, damaged)
        finally:
            file.close()
    return entries


def store_references(streams: list[StreamRecovery]) -> Counter[bytes]:
    """How many queues refer to each body."""
    return Counter(msg_id for stream in streams for _, msg_id in stream.stored)
