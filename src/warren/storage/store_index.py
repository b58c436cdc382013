"""Where each message of a message store is: msg_id -> file, offset, size, references.

Two implementations of one behaviour, `StoreIndex`:

| index        | for                             | costs                                                            |
|--------------|---------------------------------|------------------------------------------------------------------|
| `TableIndex` | the default                     | at most 57 bytes of memory a message, see `kernel/store_table`   |
| `LmdbIndex`  | many messages and little memory | a file, memory that does not grow, some microseconds a message   |

Rules:

1. A row exists exactly as long as its message has references; a count that comes to 0 removes it.
2. A file is a key, a number below 2**32 that the store hands out and never uses twice, so that two generations of one
   file number can be told apart while both exist.
3. An index is worth nothing after a crash. `clear` begins a new one without looking at the old one; `restore` takes the
   one that `save` left at a clean stop.
4. All calls are made under the engine's lock.

`hint rows` below are packed rows (msg_id, offset, size), as in a hint file: `store_format.py`.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import lmdb

from warren.errors import StoreFailedError
from warren.kernel.store_table import StoreTable
from warren.storage.store_format import HINT_ROW, INDEX_LMDB, INDEX_TABLE, TermsError


class RefCounts:
    """How many references each message has, counted anew for a dirty start: 57 bytes a message instead of a dict's 150.

    >>> refs = RefCounts()
    >>> refs.add(bytes(16))
    >>> refs.add_many([bytes(16), b"x" * 16])
    >>> refs.get(bytes(16)), refs.get(b"x" * 16), refs.get(b"y" * 16)
    (2, 1, 0)
    """

    __slots__ = ("table",)

    def __init__(self, counts: Mapping[bytes, int] | None = None) -> None:
        self.table = StoreTable()  # rows without a place
        for msg_id, count in (counts or {}).items():
            self.add(msg_id, count)

    def add(self, msg_id: bytes, count: int = 1) -> None:
        self.table.count_refs([msg_id], count)

    def add_many(self, msg_ids: Iterable[bytes]) -> None:
        """One reference more for each; an id may occur more than once."""
        self.table.count_refs(msg_ids if isinstance(msg_ids, list) else list(msg_ids))

    def get(self, msg_id: bytes) -> int:
        row = self.table.get(msg_id)
        return 0 if row is None else row[3]

    def items(self) -> list[tuple[bytes, int]]:
        return self.table.items()

    def __contains__(self, msg_id: bytes) -> bool:
        return msg_id in self.table

    def __len__(self) -> int:
        return len(self.table)


class StoreIndex(Protocol):
    """The behaviour of an index. Where a msg_id is not there, `get` and `change_refs` say None, the others False."""

    @property
    def kind(self) -> int:
        """INDEX_TABLE or INDEX_LMDB."""

    def __len__(self) -> int: ...

    def __contains__(self, msg_id: bytes) -> bool: ...

    def put(self, msg_id: bytes, file: int, offset: int, size: int, refs: int) -> None:
        """A new row. Raises ValueError for an id that is there."""

    def put_run(self, msg_ids: list[bytes], file: int, offset: int, sizes: list[int], refs: list[int]) -> None:
        """New rows of records that follow each other in `file`, the first one at `offset`."""

    def get(self, msg_id: bytes) -> tuple[int, int, int, int] | None:
        """File, offset, size, references."""

    def change_refs(self, msg_id: bytes, delta: int) -> int | None:
        """The new count; a row that comes to 0 is deleted."""

    def release(self, msg_ids: list[bytes]) -> tuple[list[bytes], dict[int, int]]:
        """Take one reference from each id (an id may occur twice; one that is not there is passed over). Returns the
        ids whose row is gone now and, for each file, the bytes of their records."""

    def move(self, msg_id: bytes, file: int, offset: int) -> bool:
        """Give a row another place."""

    def move_run(self, hint_rows: bytes, file: int, new_file: int, new_offset: int) -> int:
        """The records of `hint_rows` now follow each other in `new_file` from `new_offset`: switch the rows that still
        point to the old place. Returns the bytes of the records that were switched."""

    def delete(self, msg_id: bytes) -> bool: ...

    def live(self, hint_rows: bytes, file: int) -> bytes:
        """Those of `hint_rows` that are in use: a row with the same id, file and offset is there."""

    def rows_of(self, file: int) -> bytes:
        """The rows of one file as hint rows, by offset. Looks at every row: only for a file that has no hint file."""

    def recover(self, hint_rows: bytes, file: int, refs: RefCounts) -> int:
        """Add a row for each of `hint_rows` that `refs` counts and that is not there yet. Returns their bytes."""

    def missing(self, refs: RefCounts) -> list[bytes]:
        """The ids of `refs` that have no row."""

    def clear(self) -> None:
        """Become empty, whatever was there before."""

    def commit(self) -> None:
        """The end of a batch: an index that gathers changes writes them now (unsynced)."""

    def save(self) -> bytes:
        """Everything, or a sign that everything is safe elsewhere, for `restore` after a clean stop."""

    def restore(self, saved: bytes) -> None:
        """Raises TermsError where `saved` is not what `save` left."""

    def close(self) -> None: ...


class TableIndex:
    """All rows in memory, in the kernel's compact table."""

    __slots__ = ("table",)

    kind = INDEX_TABLE

    def __init__(self) -> None:
        self.table = StoreTable()

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, msg_id: bytes) -> bool:
        return msg_id in self.table

    def put(self, msg_id: bytes, file: int, offset: int, size: int, refs: int) -> None:
        self.table.put(msg_id, file, offset, size, refs)

    def put_run(self, msg_ids: list[bytes], file: int, offset: int, sizes: list[int], refs: list[int]) -> None:
        self.table.put_run(msg_ids, file, offset, sizes, refs)

    def get(self, msg_id: bytes) -> tuple[int, int, int, int] | None:
        return self.table.get(msg_id)

    def change_refs(self, msg_id: bytes, delta: int) -> int | None:
        return self.table.change_refs(msg_id, delta)

    def release(self, msg_ids: list[bytes]) -> tuple[list[bytes], dict[int, int]]:
        return self.table.release(msg_ids)

    def move(self, msg_id: bytes, file: int, offset: int) -> bool:
        return self.table.move(msg_id, file, offset)

    def move_run(self, hint_rows: bytes, file: int, new_file: int, new_offset: int) -> int:
        return self.table.move_run(hint_rows, file, new_file, new_offset)

    def delete(self, msg_id: bytes) -> bool:
        return self.table.delete(msg_id)

    def live(self, hint_rows: bytes, file: int) -> bytes:
        return self.table.live(hint_rows, file)

    def rows_of(self, file: int) -> bytes:
        return self.table.rows_of(file)

    def recover(self, hint_rows: bytes, file: int, refs: RefCounts) -> int:
        return self.table.recover(hint_rows, file, refs.table)

    def missing(self, refs: RefCounts) -> list[bytes]:
        return refs.table.absent_from(self.table)

    def clear(self) -> None:
        self.table.clear()

    def commit(self) -> None:
        pass

    def save(self) -> bytes:
        return self.table.dump()

    def restore(self, saved: bytes) -> None:
        self.table.clear()
        try:
            self.table.load(saved)
        except ValueError as error:
            raise TermsError(f"the message store's terms hold no index: {error}") from error

    def close(self) -> None:
        pass


_VALUE = struct.Struct("<IIII")  # file, offset, size, references
_SAVED = struct.Struct("<Q")  # number of rows
_MAP_BYTES = 1 << 38  # address space, not memory, not disk
_BATCH_OPERATIONS = 10_000  # changes that LMDB gathers in memory before it writes them


class LmdbIndex:
    """All rows in an LMDB file in `path`; its pages live in the page cache, not in the process.

    One write transaction is always open: all reads see it, and `commit` ends it and opens the next. LMDB's own locks
    are off: the data directory belongs to one process, and the engine's lock makes the calls one at a time. So the
    transaction may be used by one thread after the other.
    """

    __slots__ = ("_changes", "_count", "_env", "_failed", "_path", "_txn")

    kind = INDEX_LMDB

    def __init__(self, path: str, failed: Callable[[Exception], None] = lambda error: None) -> None:
        self._path = path
        self._failed = failed  # told when LMDB has dropped changes that cannot be repeated
        # Opened by `clear` or `restore` only: LMDB must never be shown a file that a power loss tore.
        self._env: lmdb.Environment | None = None
        self._txn: lmdb.Transaction | None = None
        self._count = 0
        self._changes = 0  # since the last commit

    def _open(self) -> None:
        os.makedirs(self._path, exist_ok=True)
        self._env = lmdb.open(
            self._path, map_size=_MAP_BYTES, subdir=True, lock=False, sync=False, metasync=False, meminit=False
        )
        self._txn = self._env.begin(write=True)

    @property
    def _rows(self) -> lmdb.Transaction:
        if self._txn is None:
            raise RuntimeError("the index is not open: it begins with clear() or restore()")
        return self._txn

    def _changed(self) -> None:
        self._changes += 1
        if self._changes >= _BATCH_OPERATIONS:
            self.commit()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, msg_id: bytes) -> bool:
        return self._rows.get(msg_id) is not None

    def put(self, msg_id: bytes, file: int, offset: int, size: int, refs: int) -> None:
        if size < 1 or refs < 1:
            raise ValueError(f"no row can hold size {size}, refs {refs}")
        if not self._rows.put(msg_id, _VALUE.pack(file, offset, size, refs), overwrite=False):
            raise ValueError(f"msg_id {msg_id.hex()} is in the index already")
        self._count += 1
        self._changed()

    def put_run(self, msg_ids: list[bytes], file: int, offset: int, sizes: list[int], refs: list[int]) -> None:
        for msg_id, size, count in zip(msg_ids, sizes, refs, strict=True):
            self.put(msg_id, file, offset, size, count)
            offset += size

    def get(self, msg_id: bytes) -> tuple[int, int, int, int] | None:
        value = self._rows.get(msg_id)
        return None if value is None else _VALUE.unpack(value)

    def change_refs(self, msg_id: bytes, delta: int) -> int | None:
        row = self.get(msg_id)
        if row is None:
            return None
        file, offset, size, refs = row
        refs += delta
        if refs <= 0:
            self.delete(msg_id)
            return 0
        self._rows.put(msg_id, _VALUE.pack(file, offset, size, refs))
        self._changed()
        return refs

    def release(self, msg_ids: list[bytes]) -> tuple[list[bytes], dict[int, int]]:
        gone: list[bytes] = []
        freed: dict[int, int] = {}
        for msg_id in msg_ids:
            row = self.get(msg_id)
            if row is None:
                continue
            file, offset, size, refs = row
            if refs > 1:
                self._rows.put(msg_id, _VALUE.pack(file, offset, size, refs - 1))
                self._changed()
            else:
                self.delete(msg_id)
                gone.append(msg_id)
                freed[file] = freed.get(file, 0) + size
        return gone, freed

    def move(self, msg_id: bytes, file: int, offset: int) -> bool:
        row = self.get(msg_id)
        if row is None:
            return False
        self._rows.put(msg_id, _VALUE.pack(file, offset, row[2], row[3]))
        self._changed()
        return True

    def move_run(self, hint_rows: bytes, file: int, new_file: int, new_offset: int) -> int:
        moved = 0
        for msg_id, offset, size in HINT_ROW.iter_unpack(hint_rows):
            row = self.get(msg_id)
            if row is not None and row[0] == file and row[1] == offset:
                self.move(msg_id, new_file, new_offset)
                moved += size
            new_offset += size
        return moved

    def delete(self, msg_id: bytes) -> bool:
        if not self._rows.delete(msg_id):
            return False
        self._count -= 1
        self._changed()
        return True

    def _all(self) -> Iterator[tuple[bytes, tuple[int, int, int, int]]]:
        for msg_id, value in self._rows.cursor():
            file, offset, size, refs = _VALUE.unpack(value)
            yield bytes(msg_id), (file, offset, size, refs)

    def live(self, hint_rows: bytes, file: int) -> bytes:
        out = bytearray()
        for msg_id, offset, size in HINT_ROW.iter_unpack(hint_rows):
            row = self.get(msg_id)
            if row is not None and row[0] == file and row[1] == offset:
                out += HINT_ROW.pack(msg_id, offset, size)
        return bytes(out)

    def rows_of(self, file: int) -> bytes:
        found = [(row[1], row[2], msg_id) for msg_id, row in self._all() if row[0] == file]
        found.sort()
        return b"".join(HINT_ROW.pack(msg_id, offset, size) for offset, size, msg_id in found)

    def recover(self, hint_rows: bytes, file: int, refs: RefCounts) -> int:
        valid = 0
        for msg_id, offset, size in HINT_ROW.iter_unpack(hint_rows):
            count = refs.get(msg_id)
            if count and msg_id not in self:
                self.put(msg_id, file, offset, size, count)
                valid += size
        return valid

    def missing(self, refs: RefCounts) -> list[bytes]:
        # Every row has its count in `refs`, so equal numbers mean equal sets: the common case looks at nothing.
        if len(refs) == self._count:
            return []
        return [msg_id for msg_id, _ in refs.items() if msg_id not in self]

    def clear(self) -> None:
        self.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._open()

    def commit(self) -> None:
        if self._changes == 0 or self._env is None:
            return
        try:
            self._rows.commit()
        except lmdb.Error as error:
            self._failed(error)
            raise StoreFailedError(f"the index in {self._path} could not be written: {error}") from error
        self._txn = self._env.begin(write=True)
        self._changes = 0

    def save(self) -> bytes:
        self.commit()
        if self._env is not None:
            self._env.sync(True)
        return _SAVED.pack(self._count)

    def restore(self, saved: bytes) -> None:
        self.close()
        if len(saved) != _SAVED.size or not os.path.exists(os.path.join(self._path, "data.mdb")):
            raise TermsError(f"there is no index in {self._path}")
        self._open()
        count = self._env.stat()["entries"] if self._env is not None else 0
        if count != _SAVED.unpack(saved)[0]:
            raise TermsError(f"the index in {self._path} has {count} rows, not {_SAVED.unpack(saved)[0]}")
        self._count = count

    def close(self) -> None:
        """What was not committed is dropped."""
        if self._txn is not None:
            self._txn.abort()
            self._txn = None
        if self._env is not None:
            self._env.close()
            self._env = None
        self._count = 0
        self._changes = 0
