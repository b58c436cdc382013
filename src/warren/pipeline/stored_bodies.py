"""Payloads in the message store, found without the store: by the hint files beside its data files.

A data file that is complete has a hint file; of one that has none (the newest, or one whose hint was lost) the heads of its
records are followed from one to the next. Nothing here trusts what it found: a record is checked when it is read.

The files may be those of a running broker, whose garbage collection copies payloads to files of a higher generation and
unlinks the old ones. So a payload that is not found, or not where it should be, is looked for once more in a new listing, and
again while files vanish under the listing. The tables are kept for the next reader in this process.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections import OrderedDict

from warren.kernel.store_table import StoreTable, scan_records, unpack_record
from warren.storage.store_format import (
    DATA_SUFFIX,
    HEADER_BYTES,
    HINT_ROW,
    HINT_SUFFIX,
    MSG_ID_BYTES,
    RECORD_HEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    check_data_header,
    decode_hint,
    file_name,
    parse_name,
)

log = logging.getLogger("warren.pipeline")

STORES = ("msg_store_persistent", "msg_store_transient")
_MOST_OPEN = 32  # data files of one store
_LISTINGS = 50  # of a directory whose files vanish while they are listed
_MOST_TABLES = 8  # stores that this process remembers
_LENGTH = struct.Struct("<Q")


class StoredBodies:
    """The payloads of one message store directory. Any thread may ask."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.trouble: tuple[str, int, str] | None = None  # file, offset and why, of the last payload that was refused
        self._vanished = False  # the file of that payload was gone: not damage, but somebody who collects
        self._lock = threading.Lock()
        self._forget()
        self._open: OrderedDict[str, int] = OrderedDict()

    def _forget(self) -> None:
        self._table = StoreTable()
        self._names: list[str] = []  # by the number that the table has for a file
        self._ends: dict[str, int | None] = {}  # up to where a file without a hint is known; None: it is known whole

    def find(self, msg_id: bytes) -> tuple[bytes, str, int] | None:
        """The payload, and the name of its file and its offset there; None: no file has it, or it does not check out."""
        with self._lock:
            found = self._read(msg_id)
            for _ in range(_LISTINGS):
                if found is not None:
                    break
                if self.trouble is not None:  # the directory's files are others than those that were listed
                    self._close()
                    self._forget()
                is_quiet = self._list()
                found = self._read(msg_id)
                if is_quiet and not self._vanished:
                    break
            return found

    def rest(self) -> None:
        """Close all files until the next question: an open file holds the disk space of a snapshot that has ended."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self._close()

    # -- reading a record --------------------------------------------------------------------------------------------

    def _read(self, msg_id: bytes) -> tuple[bytes, str, int] | None:
        self.trouble, self._vanished = None, False
        place = self._table.get(msg_id)
        if place is None:
            return None
        number, offset, size, _ = place
        name = self._names[number]
        try:
            data = _read_whole(self._handle(name), size, offset)
            return unpack_record(data, msg_id, size), name, offset
        except (OSError, ValueError) as error:
            self.trouble, self._vanished = (name, offset, str(error)), isinstance(error, FileNotFoundError)
            return None

    def _handle(self, name: str) -> int:
        handle = self._open.get(name)
        if handle is None:
            handle = os.open(os.path.join(self.directory, name), os.O_RDONLY | os.O_CLOEXEC)
            self._open[name] = handle
            if len(self._open) > _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(name)
        return handle

    # -- listing -----------------------------------------------------------------------------------------------------

    def _list(self) -> bool:
        """Learn of files that are new or have grown; those of a higher generation come last and count. False: some were
        collected meanwhile, and what was in them may be in files that were not listed."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return True
        is_quiet = True
        parsed = [(name, found) for name in names if (found := parse_name(name)) and found.suffix == DATA_SUFFIX]
        for name, found in sorted(parsed, key=lambda pair: (pair[1].generation, pair[1].number)):
            if self._ends.get(name, 0) is None:
                continue
            try:
                self._learn(name, found.number, found.generation)
            except FileNotFoundError:  # compaction was faster; the payloads are in a file that comes later
                is_quiet = False
        return is_quiet

    def _learn(self, name: str, number: int, generation: int) -> None:
        rows = _hint(self.directory, number, generation)
        if rows is None:
            rows, self._ends[name] = _search(
                self.directory, name, number, generation, self._ends.get(name) or HEADER_BYTES
            )
        else:
            self._ends[name] = None
        self._add(name, rows)

    def _add(self, name: str, rows: bytes) -> None:
        if name not in self._names:
            self._names.append(name)
        key = self._names.index(name)
        table = self._table
        for msg_id, offset, size in HINT_ROW.iter_unpack(rows):
            if not table.move(msg_id, key, offset):
                table.put(msg_id, key, offset, size, 1)


def record_rows(directory: str, name: str) -> tuple[bytes, bool]:
    """The records of a data file as hint rows, and whether its hint file says so."""
    parsed = parse_name(name)
    assert parsed is not None
    rows = _hint(directory, parsed.number, parsed.generation)
    if rows is not None:
        return rows, True
    return _search(directory, name, parsed.number, parsed.generation, HEADER_BYTES)[0], False


def _hint(directory: str, number: int, generation: int) -> bytes | None:
    """The rows of a hint file that is there and fits its data file."""
    size = os.path.getsize(os.path.join(directory, file_name(number, generation, DATA_SUFFIX)))
    try:
        with open(os.path.join(directory, file_name(number, generation, HINT_SUFFIX)), "rb") as file:
            return decode_hint(file.read(), number, generation, size)
    except OSError:
        return None


def _search(directory: str, name: str, number: int, generation: int, start: int) -> tuple[bytes, int]:
    """Hint rows of the records of a data file from `start` on, and up to where they are known."""
    with open(os.path.join(directory, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        trouble = check_data_header(file.read(HEADER_BYTES), number, generation)
        if trouble is not None and size > HEADER_BYTES:
            log.warning("%s: %s", os.path.join(directory, name), trouble)
        rows, end = _follow(file.fileno(), start, size)
        if end < size and _is_record_behind(file.fileno(), end, size):
            # Damage in the middle: look for what follows it.
            file.seek(0)
            rows, _ = scan_records(file.read(), HEADER_BYTES)
        return rows, end


def _follow(handle: int, start: int, size: int) -> tuple[bytes, int]:
    """Hint rows of the records from `start` on, by their heads alone, and where they end."""
    rows = []
    while start + RECORD_OVERHEAD_BYTES <= size:
        head = os.pread(handle, RECORD_HEAD_BYTES, start)
        if len(head) < RECORD_HEAD_BYTES:
            break
        length = _LENGTH.unpack_from(head)[0] + RECORD_OVERHEAD_BYTES
        if start + length > size or os.pread(handle, 1, start + length - 1) != b"\xff":
            break
        rows.append(HINT_ROW.pack(head[8 : 8 + MSG_ID_BYTES], start, length))
        start += length
    return b"".join(rows), start


def _is_record_behind(handle: int, start: int, size: int) -> bool:
    """Is the rest of a file more than the torn end of one record? Zeros were never written."""
    piece = os.pread(handle, RECORD_HEAD_BYTES, start)
    if len(piece) < RECORD_HEAD_BYTES or not any(piece):
        return False
    length = _LENGTH.unpack_from(piece)[0] + RECORD_OVERHEAD_BYTES
    return bool(start + length <= size)


def _read_whole(handle: int, count: int, offset: int) -> bytes:
    pieces = []
    while count:
        piece = os.pread(handle, count, offset)
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


_remembered: OrderedDict[str, StoredBodies] = OrderedDict()
_remembered_lock = threading.Lock()


def stored_bodies(directory: str) -> StoredBodies:
    """The payloads of a message store directory, with what this process knows of it already."""
    directory = os.path.abspath(directory)
    with _remembered_lock:
        found = _remembered.get(directory)
        if found is None:
            found = _remembered[directory] = StoredBodies(directory)
            if len(_remembered) > _MOST_TABLES:
                _remembered.popitem(last=False)
        _remembered.move_to_end(directory)
        return found
