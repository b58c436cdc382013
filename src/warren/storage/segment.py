"""One segment of a queue: 4096 seq_ids in three files.

    <n>.qi   slots: where each message is; written once; a trailer when every slot is written
    <n>.qs   bodies, append-only
    <n>.qa   what happened later: acks and delivery counts, append-only batches

A slot is alive while its bit in `live` is set: it was written, and no ack of it is in the journal or in .qa. A segment
whose last slot dies, and whose acks are all synced, is unlinked as a whole; its number may come back later.

Before a file that a snapshot shares is appended to, it is replaced by a copy: the snapshot's bytes never change.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

from warren.kernel.checksum import crc32c
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import SLOT_BYTES, clear_bits, live_bytes, scan_slots, set_bits
from warren.storage.disk import Disk, DiskFile
from warren.storage.layout import (
    ACKS_MAGIC,
    BODIES_MAGIC,
    HEADER_BYTES,
    INDEX_MAGIC,
    TRAILER_MAGIC,
    pack_header,
    unpack_header,
)
from warren.storage.reading import open_to_read, read_around, read_whole

# magic, number of entries, LSN, length of the entries, CRC of sid, these 20 bytes and the entries
_BATCH = struct.Struct("<4sIQII")
_BATCH_MAGIC = b"WQAB"
_ENTRY = struct.Struct("<HHI")  # slot, kind, value
_ACK_RUN = 1  # value: how many slots from this one on are acked
_COUNT = 2  # value: the delivery count of this slot
# magic, slots written, lowest and highest published-at, body bytes, CRC of the slots, flags, the last journal file of the
# checkpoint that wrote it, CRC of sid and these 60 bytes
_TRAILER = struct.Struct("<4sIQQQIIQ12xI")
_BAD_HEADER = "header of an index segment; its slots are still read"
_HAS_STORED = 1  # a slot refers to the message store
_HAS_TRANSIENT = 2  # a slot is of a transient message: it dies with its boot
_NO_BOOT = 0  # of no transient slot

Report = Callable[[str, int, int, int, str], None]  # path, offset, length, seq_id or -1, why


class Segment:
    __slots__ = (
        "counts",
        "created",
        "live",
        "live_count",
        "number",
        "qs_end",
        "shadowed",
        "trailer",
        "transients",
        "unsaved",
        "unsynced",
        "written",
    )

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.live = bytearray((size + 7) // 8)
        self.live_count = 0
        self.unsynced = 0  # slots whose ack is in the journal but not synced: they hold the files
        self.unsaved: list[int] = []  # synced acks that .qa does not have yet: slot, count, ...
        self.counts: dict[int, int] = {}  # delivery counts that .qa does not have yet: slot -> count
        self.created = False  # .qi and .qs exist
        self.qs_end = HEADER_BYTES  # where the next body goes
        self.shadowed = False  # slots on disk of messages that the journal still has: a checkpoint was cut off
        self.written = 0  # slots; one that was written again after a crash may count twice
        self.trailer: Trailer | None = None  # what a dirty start found
        self.transients = False  # slots of transient messages were written: no ack of them is on disk

    @property
    def empty(self) -> bool:
        return self.live_count == 0 and self.unsynced == 0

    def is_live(self, slot: int) -> bool:
        return bool(self.live[slot >> 3] & 1 << (slot & 7))

    def add(self, first: int, count: int) -> None:
        """Slots were written, and are to be read."""
        self.live_count += int(set_bits(self.live, first, count))

    def kill(self, first: int, count: int, cleared: list[int]) -> int:
        """Slots are not to be read any more; those that were alive go to `cleared` as pairs."""
        gone = int(clear_bits(self.live, first, count, cleared))
        self.live_count -= gone
        return gone


class Trailer(NamedTuple):
    """The zone map of a segment whose slots are all written."""

    written: int
    low: int  # published at, in microseconds
    high: int
    body_bytes: int
    slots_crc: int
    flags: int
    checkpoint: int  # the last journal file of the checkpoint that wrote it: once the floor is above, all was synced


class FoundSegment(NamedTuple):
    """What a dirty start read of a segment."""

    segment: Segment
    slots: bytes | None  # None: the trailer spoke for them
    refs: list[tuple[int, bytes]]  # slot and msg_id of what refers to the message store; perhaps acked
    counts: dict[int, int]  # slot -> delivery count
    bad_header: bool = False

    def live_bytes(self) -> int:
        """Body bytes of the live slots."""
        if self.slots is None:
            assert self.segment.trailer is not None
            return self.segment.trailer.body_bytes
        return int(live_bytes(self.slots, self.segment.live))


class SegmentFiles:
    """Paths and bytes of the segments of one stream. Stateless but for its directory."""

    __slots__ = ("_directory", "_disk", "segment_size", "sid")

    def __init__(self, disk: Disk, directory: str, sid: int, segment_size: int) -> None:
        self._disk = disk
        self._directory = directory
        self.sid = sid
        self.segment_size = segment_size

    @property
    def directory(self) -> str:
        return self._directory

    def path(self, number: int, suffix: str) -> str:
        return os.path.join(self._directory, f"{number}.{suffix}")

    def numbers(self) -> list[int]:
        """Segments that have an index file."""
        stems = (name.removesuffix(".qi") for name in self._disk.listdir(self._directory) if name.endswith(".qi"))
        return sorted(int(stem) for stem in stems if stem.isdigit())

    def _header(self, number: int, magic: bytes) -> bytes:
        return pack_header(magic, self.sid, number * self.segment_size, self.segment_size)

    def open_append(self, number: int, suffix: str, magic: bytes) -> tuple[DiskFile, bool]:
        """A handle for writing, and whether a name was made, which only `sync_dir` makes safe."""
        path = self.path(number, suffix)
        try:
            file = self._disk.open(path)
        except FileNotFoundError:
            file = self._disk.create(path)
            try:
                file.append(self._header(number, magic))
            except BaseException:
                file.close()
                raise
            return file, True
        if file.links() == 1:
            if file.size >= HEADER_BYTES:
                return file, False
            # The disk was full when it was made: nobody was told of the name, so no sync has made it safe yet.
            file.pwrite(self._header(number, magic), 0)
            return file, True
        data = file.pread(file.size, 0)
        file.close()
        self._disk.replace(path, data)
        return self._disk.open(path), False

    def create(self, segment: Segment) -> None:
        """Make .qi and .qs. Requires: the directory is there."""
        for suffix, magic in (("qi", INDEX_MAGIC), ("qs", BODIES_MAGIC)):
            file, _ = self.open_append(segment.number, suffix, magic)
            if suffix == "qs":
                segment.qs_end = max(segment.qs_end, file.size)
            file.close()
        segment.created = True

    def unlink_index(self, number: int) -> bool:
        """The segment is no more once the directory is synced; only then may the rest go, or its acks would be lost.
        Whether there was one."""
        path = self.path(number, "qi")
        if not self._disk.exists(path):
            return False
        self._disk.unlink(path)
        return True

    def unlink_rest(self, number: int) -> None:
        """What is left of a segment that has no .qi. Best effort: alone it says nothing."""
        for suffix in ("qs", "qa"):
            path = self.path(number, suffix)
            if self._disk.exists(path):
                with contextlib.suppress(OSError):
                    self._disk.unlink(path)

    def clear_away(self, dead: list[int]) -> None:
        """At a dirty start: unlink segments that have nothing alive, and what a crash left of those before them. That a .qi
        is gone has to be safe first, also where it was gone already: the process that unlinked it may have died before its
        sync, and after a power loss it would be back, without its acks."""
        for number in dead:
            self.unlink_index(number)
        names = self._disk.listdir(self._directory)
        left = []
        for name in names:
            stem, _, suffix = name.partition(".")
            if suffix.endswith(".tmp") or (suffix in ("qs", "qa") and f"{stem}.qi" not in names):
                left.append(name)
        if dead or left:
            self._disk.sync_dir(self._directory)
        for name in left:
            with contextlib.suppress(OSError):
                self._disk.unlink(os.path.join(self._directory, name))

    # -- .qa ---------------------------------------------------------------------------------------------------------

    def ack_batch(self, lsn: int, acks: list[int], counts: dict[int, int]) -> bytes:
        """The bytes of one batch: ack runs (flat: slot, count, ...) and delivery counts."""
        entries = [_ENTRY.pack(acks[i], _ACK_RUN, acks[i + 1]) for i in range(0, len(acks), 2)]
        entries += [_ENTRY.pack(slot, _COUNT, count) for slot, count in counts.items()]
        body = b"".join(entries)
        head = _BATCH.pack(_BATCH_MAGIC, len(entries), lsn, len(body), 0)[:-4]
        return head + struct.pack("<I", self._batch_crc(head, body)) + body

    def _batch_crc(self, head: bytes, body: bytes) -> int:
        return crc32c(body, crc32c(head, crc32c(struct.pack("<Q", self.sid))))

    def read_ack_batches(self, number: int, report: Report) -> tuple[list[int], dict[int, int]]:
        """All acks and delivery counts of .qa. A bad batch is void and reported; reading goes on at the next one."""
        path = self.path(number, "qa")
        acks: list[int] = []
        counts: dict[int, int] = {}
        if not self._disk.exists(path):
            return acks, counts
        data = read_whole(self._disk, path)
        if unpack_header(ACKS_MAGIC, data, path) is None and any(data[:HEADER_BYTES]):
            report(path, 0, min(len(data), HEADER_BYTES), -1, "header of an ack file")
        at = HEADER_BYTES
        while at < len(data):
            batch = self._batch_at(data, at)
            if batch is None:
                following = self._next_batch(data, at + 1)
                if any(data[at:following]):
                    report(path, at, following - at, -1, "ack batch: its acks are void, its messages come back")
                at = following
                continue
            body, at = batch
            for offset in range(0, len(body), _ENTRY.size):
                slot, kind, value = _ENTRY.unpack_from(body, offset)
                if kind == _ACK_RUN:
                    acks += (slot, value)
                else:
                    counts[slot] = value
        return acks, counts

    def _batch_at(self, data: bytes, at: int) -> tuple[bytes, int] | None:
        if len(data) - at < _BATCH.size:
            return None
        magic, _, _, length, crc = _BATCH.unpack_from(data, at)
        start = at + _BATCH.size
        body = data[start : start + length]
        if magic != _BATCH_MAGIC or len(body) != length or self._batch_crc(data[at : start - 4], body) != crc:
            return None
        return body, start + length

    def _next_batch(self, data: bytes, at: int) -> int:
        while (at := data.find(_BATCH_MAGIC, at)) >= 0:
            if self._batch_at(data, at) is not None:
                return at
            at += 1
        return len(data)

    def check_header(self, number: int, report: Report) -> None:
        """Raises StoreFormatError for a segment of another version. A damaged header is reported; a file that is not there
        is noticed by who reads it."""
        path = self.path(number, "qi")
        try:
            file = open_to_read(self._disk, path)
        except FileNotFoundError:
            return
        try:
            data = file.pread(HEADER_BYTES, 0)
        finally:
            file.close()
        if unpack_header(INDEX_MAGIC, data, path) is None:
            report(path, 0, len(data), -1, _BAD_HEADER)
            self.mend_header(number)

    def mend_header(self, number: int) -> None:
        """All that a header says is known, so it is written again, and no later start has to report it. Best effort."""
        with contextlib.suppress(OSError):
            file, _ = self.open_append(number, "qi", INDEX_MAGIC)
            try:
                file.pwrite(self._header(number, INDEX_MAGIC), 0)
                file.sync()
            finally:
                file.close()

    # -- recovery ----------------------------------------------------------------------------------------------------

    def recover(
        self, number: int, boot: int, acked: RangeSet | None, report: Report, *, floor: int = 0
    ) -> FoundSegment:
        """Rebuild a segment from its files; `acked` are the acks of the journal. The slots of a segment that is whole and
        has no acks, by the word of a trailer whose checkpoint ended (it is below `floor`), are not read: one that is
        damaged is found when it is needed. Requires, where there is a floor: the journal has none of its messages."""
        segment = Segment(number, self.segment_size)
        first = number * self.segment_size
        pairs = acked.pairs(first, first + self.segment_size) if acked else []
        if floor and not pairs and not self._disk.exists(self.path(number, "qa")):
            segment.trailer = self.read_trailer(number)
            if segment.trailer is not None and not segment.trailer.flags and segment.trailer.checkpoint < floor:
                segment.add(0, self.segment_size)
                segment.written = self.segment_size
                return self._with_bodies(FoundSegment(segment, None, [], {}))
        path = self.path(number, "qi")
        data = read_whole(self._disk, path)
        bad_header = unpack_header(INDEX_MAGIC, data, path) is None
        if bad_header and any(data[:HEADER_BYTES]):
            report(path, 0, min(len(data), HEADER_BYTES), -1, _BAD_HEADER)
        slots = data[HEADER_BYTES : HEADER_BYTES + self.segment_size * SLOT_BYTES]
        slots = slots[: len(slots) // SLOT_BYTES * SLOT_BYTES]
        refs: list[tuple[int, bytes]] = []
        damaged: list[int] = []
        kept, _, segment.written, _, _ = scan_slots(slots, first, self.sid, boot, segment.live, refs, damaged)
        segment.live_count = kept
        for slot in damaged:
            report(path, HEADER_BYTES + slot * SLOT_BYTES, SLOT_BYTES, first + slot, "slot")
        segment.trailer = self.parse_trailer(data[self._slots_end :])
        for i in range(0, len(pairs), 2):
            segment.kill(pairs[i] - first, pairs[i + 1], segment.unsaved)
        acks, counts = self.read_ack_batches(number, report)
        for i in range(0, len(acks), 2):
            segment.kill(acks[i], acks[i + 1], [])
        return self._with_bodies(FoundSegment(segment, slots, refs, counts, bad_header))

    def _with_bodies(self, found: FoundSegment) -> FoundSegment:
        segment = found.segment
        bodies = self.path(segment.number, "qs")
        segment.created = self._disk.exists(bodies)
        segment.qs_end = max(HEADER_BYTES, self._disk.size(bodies)) if segment.created else HEADER_BYTES
        return found

    # -- the trailer -------------------------------------------------------------------------------------------------

    @property
    def _slots_end(self) -> int:
        return HEADER_BYTES + self.segment_size * SLOT_BYTES

    def write_trailer(self, number: int, file: DiskFile, checkpoint: int) -> bool:
        """Whether every slot in `file`, a segment's .qi, is written and sound; then they get a trailer. It is synced with
        the slots: where it is wrong after a crash, its checkpoint did not end."""
        slots = file.pread(self.segment_size * SLOT_BYTES, HEADER_BYTES)
        refs: list[tuple[int, bytes]] = []
        damaged: list[int] = []
        live = bytearray((self.segment_size + 7) // 8)
        kept, bodies, written, low, high = scan_slots(
            slots, number * self.segment_size, self.sid, _NO_BOOT, live, refs, damaged
        )
        if written < self.segment_size or damaged:
            return False
        flags = (_HAS_STORED if refs else 0) | (_HAS_TRANSIENT if kept < written else 0)
        file.pwrite(
            self.trailer(Trailer(written, low, high, bodies, crc32c(slots), flags, checkpoint)), self._slots_end
        )
        return True

    def trailer(self, trailer: Trailer) -> bytes:
        head = _TRAILER.pack(TRAILER_MAGIC, *trailer, 0)[:-4]
        return head + struct.pack("<I", self._trailer_crc(head))

    def _trailer_crc(self, head: bytes) -> int:
        return crc32c(head, crc32c(struct.pack("<Q", self.sid)))

    def read_trailer(self, number: int) -> Trailer | None:
        """Of a segment that is whole, as far as its header and its trailer know."""
        path = self.path(number, "qi")
        file = open_to_read(self._disk, path)
        try:
            if file.size < self._slots_end + _TRAILER.size:
                return None
            if unpack_header(INDEX_MAGIC, read_around(file, HEADER_BYTES, 0), path) is None:
                return None
            return self.parse_trailer(file.pread(_TRAILER.size, self._slots_end))
        finally:
            file.close()

    def parse_trailer(self, data: bytes) -> Trailer | None:
        """What stands behind the slots; None: no trailer, or a bad one."""
        if len(data) < _TRAILER.size:
            return None
        magic, written, low, high, bodies, slots_crc, flags, checkpoint, crc = _TRAILER.unpack_from(data)
        if (
            magic != TRAILER_MAGIC
            or crc != self._trailer_crc(data[: _TRAILER.size - 4])
            or written != self.segment_size
        ):
            return None
        return Trailer(written, low, high, bodies, slots_crc, flags, checkpoint)
