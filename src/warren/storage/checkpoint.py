"""The checkpoint: what is alive in sealed journal files moves to segments, so that the files can go.

Order, and why a crash between any two steps is harmless: until step 6 the journal still has everything, and replay of
what already reached a segment is recognised by its slot.

    1  carry     a queue with little left in the sealed files has it repeated in the newest one; commit
    2  bodies    .qs appended, synced (and the directory, for new files)
    3  slots     .qi filled (a full one gets its trailer), ack batches appended to .qa, .qi of segments without a live
                 slot unlinked; all synced; then the rest of those segments unlinked: a .qi that came back without its
                 .qa would undo acks
    4  switch    with the lock: overlay rows are gone, slots are alive; acks that came meanwhile are taken over
    5  files     queues that are kept in SQLite commit what they changed (`sqlite_queue.py`)
    6  floor     journal/FLOOR is replaced; only then are journal files below it unlinked

The lock is held for steps 1, 4 and 5 queue by queue, and for small pieces of the others; no publisher waits for a sync,
except for that of a queue in SQLite.
Files that many queues touched are synced by one syncfs.

A run that fails for want of disk may be repeated: what it took it gives back, and what it wrote is written again.
"""

from __future__ import annotations

import contextlib
import threading
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from warren.kernel.overlay import ROW_BYTES, row_pairs, split_rows
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import SLOT_BYTES, convert_rows, measure_rows
from warren.storage.disk import Disk, DiskFile
from warren.storage.journal import Journal
from warren.storage.layout import ACKS_MAGIC, BODIES_MAGIC, HEADER_BYTES, INDEX_MAGIC, journal_path
from warren.storage.queue_index import QueueIndex
from warren.storage.reading import read_around
from warren.storage.segment import Segment
from warren.storage.seq_ids import SeqIds
from warren.storage.settings import EngineSettings

_SPAN_BYTES = 2 * 1024 * 1024
_MANY_QUEUES = 8  # whose records lie between each other's: then the file is read once, as a whole
_UNLIMITED = 1 << 62


class Owner(Protocol):
    """What a checkpoint needs of the vhost."""

    lock: threading.RLock

    def indexes(self) -> list[QueueIndex]: ...
    def seq_ids(self) -> list[SeqIds]: ...
    def carry_state(self, upto: int) -> None:
        """Repeat leases, checkouts and the like whose newest record lies in files up to `upto`."""

    def commit(self) -> None: ...
    def commit_databases(self) -> None:
        """Make safe in its file what a queue in SQLite changed."""

    def report(self, path: str, offset: int, length: int, seq: int, why: str) -> None: ...


class _Touched:
    """Files and directories that wait for one sync. Above a limit the handles are let go, and one syncfs serves all."""

    def __init__(self, disk: Disk, root: str, most: int) -> None:
        self._disk = disk
        self._root = root
        self._most = most
        self._files: dict[str, DiskFile] = {}
        self._many = False
        self.directories: set[str] = set()

    def get(self, path: str) -> DiskFile | None:
        return self._files.get(path)

    def add(self, path: str, file: DiskFile) -> None:
        if len(self._files) >= self._most:
            self._many = True
            self.close()
        self._files[path] = file

    def sync(self) -> None:
        if self._many or len(self._files) + len(self.directories) > self._most:
            self._disk.sync_all(self._root)
        else:
            for file in self._files.values():
                file.sync()
            for directory in sorted(self.directories):
                self._disk.sync_dir(directory)
        self.close()
        self._many = False
        self.directories.clear()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


_Part = tuple[int, int, int, int, bytes]  # segment, file, start, stop, rows: what is read at once
_segment_of = itemgetter(0)
_Batch = tuple[Segment, list[int], dict[int, int]]  # acks as slot, count, ...; delivery counts by slot
_Slots = list[tuple[QueueIndex, Segment, list[tuple[int, bytes]]]]  # runs that wait for their bodies to be synced


class Checkpoint:
    """One run over the oldest sealed files, up to and with `upto`. Its memory is bounded by their size."""

    def __init__(
        self, owner: Owner, disk: Disk, root: str, journal: Journal, settings: EngineSettings, upto: int
    ) -> None:
        self._owner = owner
        self._journal = journal
        self._settings = settings
        self._upto = upto
        self._files: dict[int, DiskFile] = {}  # journal files being read
        self._whole: dict[int, bytes] = {}  # all of them
        self._many = False  # so many queues are in the files that each is read once, as a whole
        self._bodies = _Touched(disk, root, settings.sync_all_above)
        self._slots = _Touched(disk, root, settings.sync_all_above)
        self._moved: list[tuple[QueueIndex, bytes]] = []
        self._batches: list[tuple[QueueIndex, _Batch]] = []  # acks and counts taken from segments
        self._dropped: list[tuple[QueueIndex, int]] = []  # segments whose .qi was unlinked
        self._renamed: list[QueueIndex] = []  # whose directory is synced with the slots

    def measure(self) -> list[tuple[int, QueueIndex]]:
        """How many bytes of the files each queue still needs, where that is not 0."""
        with self._owner.lock:
            indexes = self._owner.indexes()
        sizes = []
        for index in indexes:
            with self._owner.lock:
                size = index.overlay.bytes_upto(self._upto)
            if size:
                sizes.append((size, index))
        return sizes

    def run(self, movers: list[QueueIndex], small: list[QueueIndex]) -> None:
        """`movers` get segments for what they need, that of `small` is carried; both are of `measure`."""
        try:
            self._many = len(movers) + len(small) > _MANY_QUEUES
            if self._many:
                self._read_all()
            self._carry(small)
            self._move(movers)
            self._write_acks_and_unlink()
            self._slots.sync()
            while self._moved:
                with self._owner.lock:
                    index, rows = self._moved[-1]
                    index.take_over(rows)
                    self._moved.pop()  # nothing to give back: the overlay has forgotten rows that are alive
            for index in self._renamed:
                index.unsynced_parents.clear()
        except BaseException:
            self._give_back()
            raise
        finally:
            self.close()
        self._unlink_dropped()
        self._owner.commit_databases()
        self._journal.move_floor(self._upto + 1)
        with self._owner.lock:
            self._journal.close_below_floor()
        self._journal.unlink_below_floor()  # some milliseconds a file: nobody waits for that

    def close(self) -> None:
        """Let go of files; done by `run`, too."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._whole.clear()
        self._bodies.close()
        self._slots.close()

    # -- 1: carry ----------------------------------------------------------------------------------------------------

    def _carry(self, small: list[QueueIndex]) -> None:
        for index in small:
            with self._owner.lock:
                self._carry_queue(index)
                much = len(self._journal.buffer) > self._settings.commit_bytes
            if much:
                self._owner.commit()
        with self._owner.lock:
            for seqs in self._owner.seq_ids():
                if 0 <= seqs.file <= self._upto:
                    seqs.carry()
            self._owner.carry_state(self._upto)
        self._owner.commit()  # acks that were under way for carried rows are synced by this, too

    def _carry_queue(self, index: QueueIndex) -> None:
        """What is acked is left out: its ack is in the buffer or on its way, and the commit that follows makes it safe."""
        buffer = self._journal.buffer
        carried: list[int] = []
        for _, file, start, stop, rows in self._parts(index.overlay.rows_upto(self._upto), _UNLIMITED):
            damaged: list[tuple[int, int, int]] = []
            data, base = self._read(file, start, stop)
            carried += buffer.carry(index.sid, rows, data, base, index.overlay, damaged)
            self._report(file, damaged)
        counts = [(seq, index.counts_unsaved[seq]) for seq in carried if seq in index.counts_unsaved]
        if counts:
            buffer.append_requeue(index.sid, counts)

    def _parts(self, rows: bytes, segment_size: int) -> list[_Part]:
        return split_rows(rows, segment_size, _UNLIMITED if self._many else _SPAN_BYTES)

    def _read(self, file: int, start: int, stop: int) -> tuple[bytes, int]:
        """Bytes of a file that hold [start, stop), and the offset at which they begin."""
        if file not in self._files:
            self._files[file] = self._journal.open_sealed(file)
        reader = self._files[file]
        if not self._many:
            return read_around(reader, stop - start, start), start
        if file not in self._whole:
            self._whole[file] = read_around(reader, reader.size, 0)
        return self._whole[file], 0

    def _read_all(self) -> None:
        """Ahead of the carrying, which has the lock: publishers would wait for 128 MiB to be read."""
        for file in range(self._journal.floor, self._upto + 1):
            with contextlib.suppress(FileNotFoundError):  # a hole in the numbers: nothing refers to it
                self._read(file, 0, 0)

    def _report(self, file: int, damaged: list[tuple[int, int, int]]) -> None:
        for seq, offset, size in damaged:
            self._owner.report(journal_path(self._journal.directory, file), offset, size, seq, "publish record")

    # -- 2 and 3: bodies, slots, acks --------------------------------------------------------------------------------

    def _move(self, movers: list[QueueIndex]) -> None:
        slots: _Slots = []
        waiting = 0
        for index in movers:
            with self._owner.lock:
                rows = index.overlay.rows_upto(self._upto)
            if not rows:
                continue
            self._moved.append((index, rows))
            for number, parts in groupby(self._parts(rows, index.segment_size), key=_segment_of):
                slots.append(self._write_bodies(index, number, list(parts)))
            waiting += len(rows) // ROW_BYTES
            if waiting >= self._settings.checkpoint_batch_rows:
                self._write_slots(slots)
                waiting = 0
        self._write_slots(slots)

    def _write_bodies(
        self, index: QueueIndex, number: int, parts: list[_Part]
    ) -> tuple[QueueIndex, Segment, list[tuple[int, bytes]]]:
        """Those of one segment, in one piece."""
        read = [(rows, file, *self._read(file, start, stop)) for _, file, start, stop, rows in parts]
        wanted = sum(measure_rows(rows, data, base) for rows, _, data, base in read)
        with self._owner.lock:  # reserve the place: transient messages are paged out to the same file
            segment = index.segment(number)
            index.ensure_created(segment)
            offset = place = segment.qs_end
            segment.qs_end += wanted
        target = self._open(self._bodies, index, segment, "qs", BODIES_MAGIC)
        written: list[bytes] = []
        runs: list[tuple[int, bytes]] = []
        for rows, file, data, base in read:
            damaged: list[tuple[int, int, int]] = []
            bodies, more = convert_rows(rows, data, base, index.sid, index.segment_size, place, damaged)
            self._report(file, damaged)
            written.append(bodies)
            place += len(bodies)
            if runs and more and runs[-1][0] + len(runs[-1][1]) // SLOT_BYTES == more[0][0]:
                runs[-1] = (runs[-1][0], runs[-1][1] + more.pop(0)[1])
            runs += more
        if place > offset:
            target.pwrite(b"".join(written), offset)
        return index, segment, runs

    def _write_slots(self, slots: _Slots) -> None:
        """The bodies are made safe, then the slots that point to them are written."""
        if not slots:
            return
        self._bodies.sync()
        for index, segment, runs in slots:
            file = self._open(self._slots, index, segment, "qi", INDEX_MAGIC)
            for slot, data in runs:
                file.pwrite(data, HEADER_BYTES + slot * SLOT_BYTES)
                segment.written += len(data) // SLOT_BYTES
            if segment.written >= index.segment_size:
                index.files.write_trailer(segment.number, file, self._upto)
        slots.clear()

    def _open(self, touched: _Touched, index: QueueIndex, segment: Segment, suffix: str, magic: bytes) -> DiskFile:
        path = index.files.path(segment.number, suffix)
        file = touched.get(path)
        if file is None:
            with self._owner.lock:
                file = index.open_append(segment, suffix, magic)
            touched.add(path, file)
        return file

    def _write_acks_and_unlink(self) -> None:
        """Acks and delivery counts of messages in segments, as one batch a segment; segments with nothing alive go."""
        with self._owner.lock:
            lsn = self._journal.synced_lsn
            indexes = self._owner.indexes()
        moving = {index: RangeSet(row_pairs(rows)) for index, rows in self._moved}
        for index in indexes:
            with self._owner.lock:
                batches = self._take_unsaved(index, moving.get(index, RangeSet()))
            for segment, acks, counts in batches:
                file = self._open(self._slots, index, segment, "qa", ACKS_MAGIC)
                file.append(index.files.ack_batch(lsn, acks, counts))
            with self._owner.lock:
                self._note_names(index)

    def _take_unsaved(self, index: QueueIndex, moving: RangeSet) -> list[_Batch]:
        size = index.segment_size
        for seq in list(index.counts_unsaved):
            number, slot = divmod(seq, size)
            if number in index.segments and (seq in moving or index.overlay.locate(seq) is None):
                index.segments[number].counts[slot] = index.counts_unsaved.pop(seq)
        out: list[_Batch] = []
        for segment in list(index.segments.values()):
            base = segment.number * size
            if segment.empty and not moving.count_in(base, base + size):
                index.drop_segment(segment.number)
                self._dropped.append((index, segment.number))
            elif segment.unsaved or segment.counts:
                out.append((segment, segment.unsaved, segment.counts))
                segment.unsaved, segment.counts = [], {}
        self._batches += [(index, batch) for batch in out]
        return out

    def _unlink_dropped(self) -> None:
        for index, number in self._dropped:
            with self._owner.lock:
                if number not in index.segments:  # it may be back; then old bodies and acks are in nobody's way
                    index.files.unlink_rest(number)

    def drop_dead(self) -> None:
        """Only unlink segments with nothing alive: that makes room without needing any."""
        with self._owner.lock:
            indexes = self._owner.indexes()
        try:
            for index in indexes:
                with self._owner.lock:
                    for segment in [segment for segment in index.segments.values() if segment.empty]:
                        index.drop_segment(segment.number)
                        self._dropped.append((index, segment.number))
                    self._note_names(index)
            self._slots.sync()
        except BaseException:
            self._give_back()
            raise
        finally:
            self._slots.close()
        self._unlink_dropped()

    def _note_names(self, index: QueueIndex) -> None:
        """Names of files changed: their directory is synced with the slots."""
        if index.names_changed:
            index.names_changed = False
            self._renamed.append(index)
            self._slots.directories.add(index.files.directory)
            self._slots.directories.update(index.unsynced_parents)

    def _give_back(self) -> None:
        with self._owner.lock:
            for index, rows in self._moved:
                index.shadow(rows)
            for index, (segment, acks, counts) in self._batches:
                segment.unsaved = acks + segment.unsaved
                base = segment.number * index.segment_size
                for slot, count in counts.items():
                    index.counts_unsaved.setdefault(base + slot, count)
            for index in self._renamed:
                index.names_changed = True
