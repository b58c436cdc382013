"""The message store: large payloads of one vhost, each stored once for any number of queues, with reference counts.

Theory of operation. Payloads are appended to the current file; at 16 MiB it is sealed and the next one begun. The index
(`store_index.py`) knows each message's file, offset, size and references; a message whose last reference goes becomes
garbage in its file; a sealed file with nothing but garbage is unlinked; `compaction.py` merges files that are mostly
garbage. `store_format.py` says what every byte is.

The life of a payload:

    write()         flying: in memory only. If its last reference goes now, nothing is ever written: a cancelled write.
    begin_commit()  placed: it has a file, an offset and a row in the index; served from memory, because
    Commit.run()    written and synced, without the engine's lock
    Commit.done()   stored: read from its file, or from the cache of what was written last

More than 1 MiB of flying writes is placed and written at once, unsynced; the next commit syncs it. A body over 1 MiB
may have a file of its own, which `LargeWrite` fills without the lock: nobody's commit waits for somebody's upload.

Rules:

1. Append, sync, switch. A file is written once, from its beginning to its end; nobody ever appends to a file that was
   there when the store was opened. So all files but the current one can be hard-linked, and hint files stay true.
2. All methods are called under the engine's lock, except `sweep`, `Commit.run`, `compaction.Job.run` and those of
   `LargeWrite`. Commits do not overlap.
3. A reference is removed only after the record that says so is synced in the journal: the payload may be gone for good.
4. A file is doomed when it is sealed, has no valid bytes, and nobody (a commit, compaction, reader) has it pinned.
   Unlinking 16 MiB takes milliseconds, so `sweep` does it, without the lock; a commit sweeps what it finds. It is not
   synced: a file that comes back after power loss has no references, or equal copies elsewhere.
5. Reference counts and the index are never read from disk after a crash, they are counted anew.
6. Hint files are a help, not a promise: they are not synced, and one that cannot be written fails no commit.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypedDict, Unpack

from warren.errors import MessageTooLargeError, WarrenError
from warren.kernel.store_table import hint_rows, pack_records, unpack_record
from warren.storage.disk import Disk
from warren.storage.file_cache import FileCache
from warren.storage.store_format import (
    DATA_SUFFIX,
    FILE_SIZE_LIMIT_BYTES,
    HEADER_BYTES,
    HINT_SUFFIX,
    MAX_FILE_SIZE_LIMIT_BYTES,
    MAX_RECORD_BYTES,
    PART_SUFFIX,
    RECORD_OVERHEAD_BYTES,
    DataFile,
    LargeWrite,
    Quarantine,
    StoreTerms,
    TermsError,
    decode_terms,
    encode_terms,
    parse_name,
)
from warren.storage.store_index import RefCounts, StoreIndex

WRITE_BUFFER_BYTES = 1024 * 1024
CACHE_BYTES = 4 * 1024 * 1024
MAX_READERS = 64  # files kept open for reading

Payload = bytes | tuple[bytes, ...]


class MessageMissing(WarrenError):
    """The store does not have the message."""

    def __init__(self, msg_id: bytes) -> None:
        super().__init__(f"message {msg_id.hex()} is not in the message store")
        self.msg_id = msg_id


class MessageDamaged(WarrenError):
    """The message's record on disk is not what was written. Its bytes can be copied to quarantine."""

    def __init__(self, path: str, offset: int, length: int, why: str) -> None:
        super().__init__(f"the record of {length} bytes at offset {offset} of {path} is damaged: {why}")
        self.path = path
        self.offset = offset
        self.length = length
        self.why = why


class StoreTotals(NamedTuple):
    """What `MessageStore.garbage` says. Bytes are those of records, without the files' headers."""

    file_count: int
    total_bytes: int
    valid_bytes: int

    @property
    def garbage_fraction(self) -> float:
        return 1 - self.valid_bytes / self.total_bytes if self.total_bytes else 0.0


class StoreOptions(TypedDict, total=False):
    file_size_limit: int  # a file is rolled when a record takes it there or over
    garbage_fraction: float  # of all records; compaction begins above it
    cache_bytes: int  # payloads kept in memory after they were written


class _Flying:
    """A write that has no place yet."""

    __slots__ = ("payload", "refs", "size")

    def __init__(self, payload: Payload, refs: int, size: int) -> None:
        self.payload = payload
        self.refs = refs
        self.size = size  # of the payload


class _Chunk:
    """Records that have their place, one behind the other in one file, and have to be written there."""

    __slots__ = ("file", "msg_ids", "offset", "payloads", "written")

    def __init__(self, file: DataFile, offset: int, msg_ids: list[bytes], payloads: list[Payload]) -> None:
        self.file = file
        self.offset = offset
        self.msg_ids = msg_ids
        self.payloads = payloads
        self.written = False

    def write(self) -> None:
        self.file.write(pack_records(self.msg_ids, self.payloads), self.offset)
        self.written = True


class Commit:
    """Placed records on their way to the disk. After `run` returns they are written, and synced if the commit syncs."""

    __slots__ = ("_chunks", "_failed", "_sealing", "_store", "_sync", "_unsynced", "running")

    def __init__(
        self, store: MessageStore, chunks: list[_Chunk], unsynced: list[DataFile], sealing: list[DataFile], sync: bool
    ) -> None:
        self._store = store
        self._chunks = chunks
        self._unsynced = unsynced
        self._sealing = sealing
        self._sync = sync
        self._failed: OSError | None = None
        self.running = False
        for file in self._files():
            file.pins += 1

    def _files(self) -> list[DataFile]:
        return [*self._unsynced, *self._sealing]

    def run(self) -> None:
        """Write and sync. Called without the engine's lock.

        An OSError of a write (a full disk) may be followed by another `run`, which writes the same bytes to the same
        places. An OSError of a sync is final: what is on the disk is unknown, and `run` raises it again.
        """
        if self._failed is not None:
            raise self._failed
        self.running = True
        try:
            for chunk in self._chunks:
                if not chunk.written:
                    chunk.write()
            if self._sync:
                try:
                    self._sync_files()
                except OSError as error:
                    self._failed = error
                    raise
            for file in self._sealing:
                if not file.hinted:
                    file.write_hint()
            self._store.sweep()
        finally:
            self.running = False

    @property
    def poisoned(self) -> bool:
        """A sync has failed."""
        return self._failed is not None

    def _sync_files(self) -> None:
        for file in self._unsynced:
            file.sync()
        if not all(file.name_synced for file in self._unsynced):
            self._store.disk.sync_dir(self._store.path)
            for file in self._unsynced:
                file.name_synced = True

    def done(self) -> None:
        """The payloads may leave memory. Requires: `run` has returned; the engine's lock."""
        store = self._store
        for chunk in self._chunks:
            store.stored(chunk)
        for file in self._sealing:
            file.close()
        for file in self._files():
            store.unpin(file)
        store.committed([file for file in self._sealing if not file.hinted])


class MessageStore:
    """An empty store in `path`; `open_clean` and `open_dirty` open one that is there, `open_empty` empties it first.

    store = MessageStore(Disk(), "data/msg_store_persistent", index=TableIndex(), sync=True)
    store.write(msg_id := store.next_id(), payload, refs=2)
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        *,
        index: StoreIndex,
        sync: bool,
        file_size_limit: int = FILE_SIZE_LIMIT_BYTES,
        garbage_fraction: float = 0.5,
        cache_bytes: int = CACHE_BYTES,
        saved_index: bytes | None = None,
    ) -> None:
        if not HEADER_BYTES < file_size_limit <= MAX_FILE_SIZE_LIMIT_BYTES:
            raise ValueError(f"file_size_limit is {file_size_limit}; it can be up to {MAX_FILE_SIZE_LIMIT_BYTES}")
        self.disk = disk
        self.path = path
        self.index = index
        self.file_size_limit = file_size_limit
        self.garbage_fraction = garbage_fraction
        self.missing: list[bytes] = []  # ids that had references at a dirty start, and no body
        self.compacting = False  # one compaction at a time
        self.next_id = self.new_id_source()
        self._sync = sync
        self._files: dict[int, DataFile] = {}  # by key; all that the index may name
        self._current: DataFile | None = None  # None until there is something to place
        self._next_number = 0
        self._next_key = 1
        self._next_generation = 1  # one for each compaction, so that no two files ever have one name
        self._total = 0  # bytes of all records
        self._valid = 0  # bytes of records that have references
        self._flying: dict[bytes, _Flying] = {}
        self._flying_bytes = 0
        self._backlog: list[_Chunk] = []  # placed, but could not be written at once
        self._unwritten: dict[bytes, Payload] = {}  # placed, not known to be written
        self._cache: OrderedDict[bytes, Payload] = OrderedDict()  # written lately, oldest first
        self._cache_limit = cache_bytes
        self._cache_bytes = 0
        self._sealing: dict[int, DataFile] = {}  # sealed, without a hint file yet
        self._unsynced: dict[int, DataFile] = {}  # written to since their last sync
        self._doomed: deque[DataFile] = deque()
        self._commit: Commit | None = None
        self._readers = FileCache(disk, MAX_READERS)
        disk.make_dirs(path)
        if saved_index is None:
            index.clear()
        else:
            index.restore(saved_index)

    @staticmethod
    def new_id_source(prefix: bytes | None = None) -> Callable[[], bytes]:
        """Ids that no other start of the store has used or will use."""
        start = secrets.token_bytes(8) if prefix is None else prefix
        numbers = itertools.count(1)
        return lambda: start + next(numbers).to_bytes(8, "big")

    # ---- messages ----

    def write(self, msg_id: bytes, payload: Payload, refs: int) -> None:
        """Take a payload, of `refs` references. It can be read at once; it is on disk after the next commit.

        Requires: an id from `next_id` that was not written before; parts of a payload are bytes, not to be changed.
        """
        size = _size_of(payload)
        _check_size(size)
        if refs < 1 or msg_id in self._flying:
            raise ValueError(f"message {msg_id.hex()} was written before, or with {refs} references")
        self._flying[msg_id] = _Flying(payload, refs, size)
        self._flying_bytes += size
        # On a full disk the rest keeps flying, until a commit has written the backlog.
        if self._flying_bytes >= WRITE_BUFFER_BYTES and not self._backlog:
            self._hand_over()

    def write_large(self, msg_id: bytes, payload: Payload, refs: int) -> None:
        """`write` into a file of its own, at once; the next commit syncs it. For whoever may hold the lock that long;
        others use `begin_large`."""
        parts = (payload,) if isinstance(payload, bytes) else payload
        large = self.begin_large(msg_id, sum(map(len, parts)))
        try:
            for part in parts:
                large.append(part)
            large.finish(sync=False)
        except BaseException:
            large.abort()
            raise
        self.adopt(large, refs)

    def begin_large(self, msg_id: bytes, size: int) -> LargeWrite:
        """Begin a body of `size` bytes in a file of its own. Until `adopt` the store knows nothing of it."""
        _check_size(size)
        return LargeWrite(self.disk, self._new_file(), msg_id, size)

    def adopt(self, large: LargeWrite, refs: int) -> None:
        """Make a finished large body a message of `refs` references."""
        if not large.finished:
            raise ValueError(f"the body of message {large.msg_id.hex()} is not finished")
        file = large.file
        self.index.put(large.msg_id, file.key, HEADER_BYTES, file.record_bytes, refs)
        file.valid = file.record_bytes
        file.sealed = True
        self.register(file)
        self._sealing[file.key] = file
        if not large.synced:
            self._unsynced[file.key] = file

    def remove(self, msg_id: bytes, count: int = 1) -> None:
        """Drop `count` references. An id that is not there is passed over: its body was missing at a dirty start.

        Requires: the record that says so is synced in the journal (rule 3).
        """
        self.remove_many([msg_id] * count)

    def remove_many(self, msg_ids: Iterable[bytes]) -> None:
        """Drop one reference of each; an id may occur more than once. Requires: as `remove`."""
        stored = msg_ids if isinstance(msg_ids, list) else list(msg_ids)
        if self._flying:
            stored = [msg_id for msg_id in stored if not self._cancelled(msg_id)]
        gone, freed = self.index.release(stored)
        for msg_id in gone:
            if self._unwritten.pop(msg_id, None) is None and self._cache:
                payload = self._cache.pop(msg_id, None)
                if payload is not None:
                    self._cache_bytes -= _size_of(payload)
        for key, size in freed.items():
            self.release_bytes(self._files[key], size)

    def _cancelled(self, msg_id: bytes) -> bool:
        """Take one reference of a flying write; whether it was one."""
        flying = self._flying.get(msg_id)
        if flying is None:
            return False
        flying.refs -= 1
        if flying.refs == 0:
            del self._flying[msg_id]
            self._flying_bytes -= flying.size
        return True

    def add_refs(self, msg_id: bytes, count: int) -> None:
        """Raises MessageMissing."""
        flying = self._flying.get(msg_id)
        if flying is not None:
            flying.refs += count
        elif self.index.change_refs(msg_id, count) is None:
            raise MessageMissing(msg_id)

    def contains(self, msg_id: bytes) -> bool:
        return msg_id in self._flying or msg_id in self.index

    def read(self, msg_id: bytes) -> bytes:
        """The payload. Raises MessageMissing, or MessageDamaged where the disk does not have what was written."""
        flying = self._flying.get(msg_id)
        payload = self._unwritten.get(msg_id) if flying is None else flying.payload
        if payload is None:
            payload = self._cache.get(msg_id)
        if payload is not None:
            return payload if isinstance(payload, bytes) else b"".join(payload)
        row = self.index.get(msg_id)
        if row is None:
            raise MessageMissing(msg_id)
        key, offset, size, _ = row
        file = self._files[key]
        try:
            return unpack_record(self._readers.read(file.path, size, offset), msg_id, size)
        except ValueError as error:
            raise MessageDamaged(file.path, offset, size, str(error)) from error
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOENT):
                raise
            raise MessageDamaged(file.path, offset, size, str(error)) from error

    # ---- commits ----

    def begin_commit(self, sync: bool | None = None) -> Commit | None:
        """Place everything that is flying and hand it out to be written; None where there is nothing to do.

        `sync` is the store's unless told: a checkpoint syncs a store whose commits do not.
        Requires: the commit before is done.
        """
        if self._commit is not None:
            raise RuntimeError("the commit before this one is not done")
        sync = self._sync if sync is None else sync
        self._backlog += self._place()
        self.index.commit()
        if not (self._backlog or self._sealing or self._doomed or (sync and self._unsynced)):
            return None
        unsynced = list(self._unsynced.values()) if sync else []
        self._commit = Commit(self, self._backlog, unsynced, list(self._sealing.values()), sync)
        self._backlog = []
        self._sealing = {}
        if sync:
            self._unsynced = {}
        return self._commit

    def stored(self, chunk: _Chunk) -> None:
        """A chunk was written: what is still wanted of it moves to the cache."""
        for msg_id in chunk.msg_ids:
            payload = self._unwritten.pop(msg_id, None)
            if payload is None:
                continue
            size = _size_of(payload)
            if 2 * size <= self._cache_limit:
                self._cache[msg_id] = payload
                self._cache_bytes += size
        while self._cache_bytes > self._cache_limit:
            self._cache_bytes -= _size_of(self._cache.popitem(last=False)[1])
        self.unpin(chunk.file)

    def committed(self, unhinted: list[DataFile]) -> None:
        """A commit is done; files that have no hint file yet get another try with the next one."""
        self._sealing.update({file.key: file for file in unhinted if file.key in self._files})
        self._commit = None

    def flush(self) -> None:
        """Write everything, without a sync. Requires: no commit is under way."""
        self._commit_now(sync=False)

    def seal(self, sync: bool | None = None) -> None:
        """Everything written is in sealed files with hint files when this returns. Requires: no commit is under way."""
        self._backlog += self._place()
        self._roll()
        self._commit_now(sync)

    def _commit_now(self, sync: bool | None) -> None:
        if self._commit is not None and not self._commit.running:
            # It met a full disk in an earlier `flush` or `seal`.
            self._commit.run()
            self._commit.done()
        commit = self.begin_commit(sync)
        if commit is not None:
            commit.run()
            commit.done()

    def _hand_over(self) -> None:
        """Write what is flying, unsynced. What cannot be written waits for the next commit, whose `run` may fail."""
        chunks = self._place()
        for i, chunk in enumerate(chunks):
            try:
                chunk.write()
            except OSError:
                self._backlog += chunks[i:]
                break
            self.stored(chunk)

    def _place(self) -> list[_Chunk]:
        """Give everything that is flying its file and offset."""
        chunks: list[_Chunk] = []
        flying = self._flying
        self._flying = {}
        self._flying_bytes = 0
        msg_ids: list[bytes] = []
        waiting: list[_Flying] = []
        room = 0
        for msg_id, write in flying.items():
            if not msg_ids:
                room = self.file_size_limit - self._open_file().size
            msg_ids.append(msg_id)
            waiting.append(write)
            room -= write.size + RECORD_OVERHEAD_BYTES
            if room <= 0:
                chunks.append(self._chunk(msg_ids, waiting))
                self._roll()
                msg_ids, waiting = [], []
        if msg_ids:
            chunks.append(self._chunk(msg_ids, waiting))
        return chunks

    def _chunk(self, msg_ids: list[bytes], writes: list[_Flying]) -> _Chunk:
        file = self._open_file()
        sizes = [write.size + RECORD_OVERHEAD_BYTES for write in writes]
        payloads = [write.payload for write in writes]
        offset = file.size
        self.index.put_run(msg_ids, file.key, offset, sizes, [write.refs for write in writes])
        file.rows += hint_rows(msg_ids, offset, sizes)
        total = sum(sizes)
        file.size += total
        file.valid += total
        file.records += len(sizes)
        file.pins += 1  # until it is written
        self._total += total
        self._valid += total
        self._unsynced[file.key] = file
        self._unwritten.update(zip(msg_ids, payloads, strict=True))
        return _Chunk(file, offset, msg_ids, payloads)

    # ---- files ----

    def _open_file(self) -> DataFile:
        if self._current is None:
            self._current = self._new_file()
            self._files[self._current.key] = self._current
        return self._current

    def _roll(self) -> None:
        file = self._current
        if file is not None:
            file.sealed = True
            self._sealing[file.key] = file
            self._current = None
            self._drop_if_empty(file)

    def _new_file(self) -> DataFile:
        self._next_number += 1
        return self._data_file(self._next_number - 1, 0)

    def new_generation(self, number: int) -> DataFile:
        """A file for a compaction, which the store does not know yet."""
        self._next_generation += 1
        return self._data_file(number, self._next_generation - 1)

    def _data_file(self, number: int, generation: int) -> DataFile:
        self._next_key += 1
        return DataFile(self.disk, self.path, self._next_key - 1, number, generation)

    def register(self, file: DataFile) -> None:
        """Count a sealed file in; from now on the index may name it."""
        self._files[file.key] = file
        self._total += file.record_bytes
        self._valid += file.valid

    def data_files(self) -> list[DataFile]:
        """All files, the current one included, in the order of their numbers."""
        return sorted(self._files.values(), key=lambda file: (file.number, file.generation))

    def pin(self, file: DataFile) -> None:
        """Keep a file on disk until `unpin`."""
        file.pins += 1

    def unpin(self, file: DataFile) -> None:
        file.pins -= 1
        self._drop_if_empty(file)

    def release_bytes(self, file: DataFile, size: int) -> None:
        """Records of `size` bytes in `file` have no row in the index any more."""
        file.valid -= size
        self._valid -= size
        self._drop_if_empty(file)

    def _drop_if_empty(self, file: DataFile) -> None:
        if file.valid or file.pins or not file.sealed or file.key not in self._files:
            return
        del self._files[file.key]
        self._total -= file.record_bytes
        self._sealing.pop(file.key, None)
        self._unsynced.pop(file.key, None)
        self._readers.drop(file.path)
        file.close()
        self._doomed.append(file)

    def sweep(self) -> None:
        """Unlink doomed files. Called without the engine's lock, by any thread; a file that cannot be unlinked is left
        to the next dirty start."""
        with contextlib.suppress(IndexError):
            while True:
                file = self._doomed.popleft()
                with contextlib.suppress(OSError):
                    file.unlink()

    def files(self) -> list[str]:
        """The names of all sealed data files and their hint files: after `seal`, of everything."""
        names = []
        for file in self.data_files():
            if file.sealed:
                names.append(os.path.basename(file.path))
                if file.hinted:
                    names.append(os.path.basename(file.hint_path))
        return names

    def garbage(self) -> StoreTotals:
        return StoreTotals(len(self._files), self._total, self._valid)

    def close(self) -> None:
        """Let go of all files. What was not committed is lost: a clean stop calls `save_terms` before."""
        self._readers.close()
        for file in self._files.values():
            file.close()
        self.index.close()

    # ---- start and stop ----

    def save_terms(self) -> bytes:
        """Seal and sync everything and say in a few bytes a message where it is, for `open_clean`."""
        self.seal(sync=True)
        self.sweep()
        files = [file.terms() for file in self.data_files()]
        return encode_terms(StoreTerms(self.index.kind, files, self.index.save(), self._next_number, self._next_key))

    @classmethod
    def open_empty(
        cls, disk: Disk, path: str, *, index: StoreIndex, sync: bool, **options: Unpack[StoreOptions]
    ) -> MessageStore:
        """Forget whatever is in `path`: the start of a transient store."""
        disk.remove_tree(path)
        return cls(disk, path, index=index, sync=sync, **options)

    @classmethod
    def open_clean(
        cls, disk: Disk, path: str, *, index: StoreIndex, sync: bool, terms: bytes, **options: Unpack[StoreOptions]
    ) -> MessageStore:
        """Open a store as `save_terms` left it. Raises TermsError where the terms do not fit: then open it dirty."""
        saved = decode_terms(terms)
        if saved.index_kind != index.kind:
            raise TermsError(f"the terms of {path} are for an index of kind {saved.index_kind}, not {index.kind}")
        left = saved.check_files(disk, path)
        store = cls(disk, path, index=index, sync=sync, saved_index=saved.index_rows, **options)
        store._next_number = saved.next_number
        store._next_key = saved.next_key
        for row in saved.files:
            file = DataFile(disk, path, row.key, row.number, row.generation)
            file.restore(row)
            store._next_generation = max(store._next_generation, file.generation + 1)
            store.register(file)
            store._drop_if_empty(file)
        for parsed in left:
            store._next_generation = max(store._next_generation, parsed.generation + 1)
            store._doomed.append(store._data_file(parsed.number, parsed.generation))
        store.sweep()
        return store

    @classmethod
    def open_dirty(
        cls,
        disk: Disk,
        path: str,
        *,
        index: StoreIndex,
        sync: bool,
        refs: RefCounts | Mapping[bytes, int],
        quarantine: Quarantine,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[StoreOptions],
    ) -> MessageStore:
        """Open a store after a crash: find the body of everything that `refs` counts; the rest is garbage.

        `store.missing` are the ids that have references and no body. `quarantine` is called for bytes that are no
        record (the caller copies them) before any file is unlinked; for the torn end of a file only if something is
        missing, because otherwise nothing in it was ever promised. `progress` gets the files done and their number.
        """
        store = cls(disk, path, index=index, sync=sync, **options)
        counts = refs if isinstance(refs, RefCounts) else RefCounts(refs)
        names = [(name, parsed) for name in disk.listdir(path) if (parsed := parse_name(name)) is not None]
        data = {(parsed.generation, parsed.number) for _, parsed in names if parsed.suffix == DATA_SUFFIX}
        hinted = {(parsed.generation, parsed.number) for _, parsed in names if parsed.suffix == HINT_SUFFIX}
        for name, parsed in names:
            store._next_number = max(store._next_number, parsed.number + 1)
            store._next_generation = max(store._next_generation, parsed.generation + 1)
            if (parsed.generation, parsed.number) not in data or parsed.suffix == PART_SUFFIX:
                disk.unlink(os.path.join(path, name))
        torn, empty = list[tuple[str, int, int, str]](), list[DataFile]()
        # Of two copies that a crashed compaction left the newest counts, if it was synced: its hint came after that.
        ranked = sorted(((not key[0] or key in hinted, key) for key in data), reverse=True)
        for done, (_, (generation, number)) in enumerate(ranked):
            file = store._data_file(number, generation)
            rows = file.recover_rows(quarantine, torn)
            file.valid = index.recover(rows, file.key, counts)
            if file.valid == 0:
                empty.append(file)
            else:
                store.register(file)
                # A killed process may have left bytes that only the kernel has; the next commit makes them safe.
                store._unsynced[file.key] = file
                if not file.hinted:
                    file.rows = bytearray(rows)
                    store._sealing[file.key] = file
            if progress is not None:
                progress(done + 1, len(data))
        index.commit()
        store.missing = index.missing(counts)
        if store.missing:
            for region in torn:
                quarantine(*region)
        if empty:
            disk.sync_dir(path)  # of a killed compaction, perhaps: the name of its copy must be safe before they go
        for file in empty:
            file.unlink()
        return store


def _size_of(payload: Payload) -> int:
    return len(payload) if isinstance(payload, bytes) else sum(map(len, payload))


def _check_size(size: int) -> None:
    if size + RECORD_OVERHEAD_BYTES > MAX_RECORD_BYTES:
        raise MessageTooLargeError(f"a message of {size} bytes; the message store holds up to {MAX_RECORD_BYTES}")
