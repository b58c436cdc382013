"""Compaction of a message store: two files that are mostly garbage become one of a new generation.

    with lock:
        job = compaction.plan(store)      # None: nothing worth doing
    if job is not None:
        whole = job.run(bytes_per_second=50_000_000)
        with lock:
            job.commit() if whole else job.abort()

Rules:

1. No file is changed. The valid records of two files are copied to a third; it, its hint file and its directory are
   synced; only then the index switches, in one step under the lock, and the old files are unlinked. So a crash leaves
   at worst two good copies of a message.
2. Two files are merged when the store has at least three, more than `garbage_fraction` of all records is garbage, both
   are sealed and pinned by nobody, both have valid records, and these fit into one file. They are neighbours in the
   order of their numbers, so that messages that came together stay together; a file with one large body is no
   neighbour to anybody. Of several pairs the one that frees most is taken.
3. What is removed while the job runs is copied and becomes garbage of the new file: the index switches only rows that
   still point to the old place.
4. A record that is damaged ends the job, and its file is left alone from then on: it is quarantined when somebody wants
   to read it, and the file goes with its last message.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

from warren.kernel.store_table import check_run, hint_rows
from warren.storage.message_store import MessageStore
from warren.storage.reading import open_to_read, read_around
from warren.storage.store_format import HEADER_BYTES, HINT_ROW, DataFile

BYTES_PER_SECOND = 64 * 1024 * 1024
BATCH_BYTES = 1024 * 1024  # copied between two looks at the clock
MIN_FILES = 3


def plan(store: MessageStore) -> Job | None:
    """The most useful compaction, if there is one. Requires: the engine's lock."""
    totals = store.garbage()
    if store.compacting or totals.file_count < MIN_FILES or totals.garbage_fraction <= store.garbage_fraction:
        return None
    pair = _best_pair(store)
    if pair is None:
        return None
    sources = [(file, rows) for file in pair if (rows := _valid_rows(store, file)) is not None]
    return Job(store, sources) if len(sources) == 2 else None


def _best_pair(store: MessageStore) -> tuple[DataFile, DataFile] | None:
    files = [file for file in store.data_files() if not file.is_large]
    best = None
    most_garbage = 0
    for left, right in itertools.pairwise(files):
        if not (_is_free(left) and _is_free(right)):
            continue
        valid = left.valid + right.valid
        garbage = left.record_bytes + right.record_bytes - valid
        if HEADER_BYTES + valid <= store.file_size_limit and garbage > most_garbage:
            best, most_garbage = (left, right), garbage
    return best


def _is_free(file: DataFile) -> bool:
    hint_is_due = bool(file.rows)
    return file.sealed and file.valid > 0 and file.pins == 0 and not file.damaged and not hint_is_due


def _valid_rows(store: MessageStore, file: DataFile) -> bytes | None:
    """Hint rows of the valid records of `file`; None, and the file is left alone, if they cannot be told."""
    hint = file.read_hint()
    rows = store.index.live(hint, file.key) if hint is not None else b""
    if _bytes_of(rows) != file.valid:
        rows = store.index.rows_of(file.key)
    if _bytes_of(rows) != file.valid:
        file.damaged = True
        return None
    return rows


def _bytes_of(rows: bytes) -> int:
    return sum(size for _, _, size in HINT_ROW.iter_unpack(rows))


class Job:
    """One compaction. After `run` either `commit` or `abort` is called."""

    def __init__(self, store: MessageStore, sources: list[tuple[DataFile, bytes]]) -> None:
        self._store = store
        self._sources = sources  # each with the hint rows of what was valid when the job was planned
        files = [file for file, _ in sources]
        self.target = store.new_generation(min(file.number for file in files))
        self.damaged: tuple[DataFile, int, int] | None = None  # file, offset, length of a bad record
        self._complete = False
        self._stopped = threading.Event()
        store.compacting = True
        for file in files:
            store.pin(file)

    @property
    def copy_bytes(self) -> int:
        """Bytes of records to copy."""
        return sum(_bytes_of(rows) for _, rows in self._sources)

    def run(
        self,
        *,
        bytes_per_second: float = BYTES_PER_SECOND,
        sync: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> bool:
        """Copy, at most `bytes_per_second` on average. Called without the engine's lock.

        True when the copy is safe and `commit` may follow; False after `stop`, or when a record is damaged. `sync` is
        False for a transient store only: a store whose commits do not sync has checkpoints that do.
        """
        began = clock()
        copied = 0
        target = self.target
        for file, rows in self._sources:
            reader = open_to_read(self._store.disk, file.path)
            try:
                for batch in _batches(rows):
                    data = b"".join(read_around(reader, size, offset) for offset, size in _runs(batch))
                    packed = b"".join(HINT_ROW.pack(*row) for row in batch)
                    bad = check_run(data, packed)
                    if bad >= 0:
                        self.damaged = (file, batch[bad][1], batch[bad][2])
                        return False
                    target.write(data, target.size)
                    target.rows += hint_rows([row[0] for row in batch], target.size, [row[2] for row in batch])
                    target.size += len(data)
                    target.records += len(batch)
                    copied += len(data)
                    ahead = copied / bytes_per_second - (clock() - began)
                    if self._stopped.wait(ahead) if ahead > 0 else self._stopped.is_set():
                        return False
            finally:
                reader.close()
        if sync:
            target.sync()
        target.write_hint(sync=sync)
        if sync:
            self._store.disk.sync_dir(self._store.path)
            target.name_synced = True
        self._complete = True
        return True

    def stop(self) -> None:
        """Make a `run` in another thread return soon."""
        self._stopped.set()

    def commit(self) -> None:
        """Switch the index to the new file and let go of the old ones. Requires: `run` was True; the engine's lock."""
        if not self._complete:
            raise RuntimeError("a compaction that did not run to its end cannot be committed")
        store, target = self._store, self.target
        target.close()
        offset = HEADER_BYTES
        moved: list[int] = []
        for file, rows in self._sources:
            moved.append(store.index.move_run(rows, file.key, target.key, offset))
            offset += _bytes_of(rows)
        store.index.commit()
        target.valid = sum(moved)
        target.sealed = True
        store.pin(target)
        store.register(target)
        for (file, _), size in zip(self._sources, moved, strict=True):
            store.release_bytes(file, size)
        self._let_go()
        store.unpin(target)

    def abort(self) -> None:
        """Forget the copy. Requires: `run` has returned or raised, or was not called; the engine's lock."""
        if self.damaged is not None:
            self.damaged[0].damaged = True
        self.target.unlink()
        self._let_go()

    def _let_go(self) -> None:
        for file, _ in self._sources:
            self._store.unpin(file)
        self._store.compacting = False


def _batches(rows: bytes) -> Iterator[list[tuple[bytes, int, int]]]:
    """The rows in lists of about BATCH_BYTES."""
    batch: list[tuple[bytes, int, int]] = []
    total = 0
    for msg_id, offset, size in HINT_ROW.iter_unpack(rows):
        batch.append((msg_id, offset, size))
        total += size
        if total >= BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _runs(batch: list[tuple[bytes, int, int]]) -> Iterator[tuple[int, int]]:
    """(offset, size) of the pieces of the file in which the records of `batch` lie without a gap."""
    start = end = batch[0][1]
    for _, offset, size in batch:
        if offset != end:
            yield start, end - start
            start = offset
        end = offset + size
    yield start, end - start
