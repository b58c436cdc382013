"""The message store's files: what every byte of `.rdq`, `.rdh` and the store's recovery terms is.

All numbers are little-endian and unsigned. All checksums are CRC-32C (`kernel/checksum.pyx`), seed 0.

File names, in `msg_store_persistent/` and `msg_store_transient/`:

    <number>.<generation>.rdq       data file, for example 12.0.rdq; both numbers decimal, without leading zeros
    <number>.<generation>.rdh       hint file of the data file of the same name
    <number>.<generation>.rdq.part  a large body that is still being written; worth nothing after a crash
    index.lmdb/                     the index, where it is LMDB's; worth nothing after a crash

Numbers rise in the order in which files were begun. A file that compaction made of two others has the lower of their
numbers, and a generation that no other file of the store has or had. Where two files hold the same msg_id, the records
are equal, and the file of the higher generation counts.

Data file `.rdq` := header record*

    header, 64 bytes
      offset  size  field
           0     8  magic "WARRNRDQ"
           8     4  version, 1
          12     4  generation
          16     8  number
          24    36  zeros
          60     4  CRC of bytes 0 to 59

    record, 29 bytes + payload
      offset  size  field
           0     8  L, length of the payload
           8    16  msg_id
          24     4  CRC of bytes 0 to 23 (length, msg_id) followed by the payload
          28     L  payload
        28+L     1  end marker, 0xFF

Records follow each other without gaps. A file is rolled when a record took it to the file size limit (16 MiB) or over,
so it is larger than that by less than one record. A body over 1 MiB that was written in slices has a file of its own:
header and one record. A file is written from its beginning to its end, synced, and never changed after that. What
follows the last good record of a file was not finished when the process or the machine died.

A msg_id is any 16 bytes; Warren's are 8 random bytes, new at every start, and a counter of 8 bytes, big-endian, so that
they sort by age.

Hint file `.rdh` := header row* trailer. What a scan of the data file would find, without the payloads. It may be
missing or damaged, then the data file is scanned and a new hint file written.

    header, 64 bytes
      offset  size  field
           0     8  magic "WARRNRDH"
           8     4  version, 1
          12     4  generation
          16     8  number
          24     8  size of the data file in bytes; a hint file for another size is void
          32     8  N, number of rows
          40    24  zeros

    row, 32 bytes, by rising offset; one for every record, with references or without
      offset  size  field
           0    16  msg_id
          16     8  offset of the record in the data file
          24     8  size of the record: 29 + L

    trailer, 4 bytes
           0     4  CRC of everything before it: bytes 0 to 63 + 32 N

Recovery terms of a store := header file-row* index trailer. The whole state of the store after a clean stop.

    header, 64 bytes
      offset  size  field
           0     8  magic "WARRNMST"
           8     4  version, 1
          12     4  kind of the index: 1 table, 2 LMDB
          16     8  F, number of file rows
          24     8  I, bytes of the index
          32     8  next file number
          40     8  next file key
          48    16  zeros

    file row, 40 bytes
      offset  size  field
           0     4  file key, as the rows of the index name the file
           4     4  generation
           8     8  number
          16     8  size of the data file in bytes
          24     8  valid bytes: records that have references
          32     4  number of records
          36     4  zeros

    index, I bytes
      kind 1: rows of 32 bytes in any order: msg_id (16), file key (4), offset (4), size of the record (4),
              references (4)
      kind 2: number of rows (8); the rows themselves are in index.lmdb/, key: msg_id, value: file key (4), offset (4),
              size (4), references (4)

    trailer, 4 bytes
           0     4  CRC of everything before it

A worked example: message 000102...0f with the payload "hello" as the only one of file 7, generation 0

    7.0.rdq, 98 bytes
      0000  57 41 52 52 4e 52 44 51  01 00 00 00 00 00 00 00   WARRNRDQ, version 1, generation 0
      0010  07 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00   number 7
      0020  00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00
      0030  00 00 00 00 00 00 00 00  00 00 00 00 ec 51 29 f3   CRC of the header
      0040  05 00 00 00 00 00 00 00  00 01 02 03 04 05 06 07   5 bytes of payload; msg_id
      0050  08 09 0a 0b 0c 0d 0e 0f  f3 6a eb 64 68 65 6c 6c   msg_id; CRC; payload
      0060  6f ff                                              payload; end marker
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from warren.errors import StoreFormatError, WarrenError
from warren.kernel.checksum import crc32c
from warren.kernel.store_table import HINT_ROW_BYTES, hint_rows, scan_records
from warren.storage.disk import Disk, DiskFile
from warren.storage.reading import open_to_read, read_around, read_whole

VERSION = 1
DATA_MAGIC = b"WARRNRDQ"
HINT_MAGIC = b"WARRNRDH"
TERMS_MAGIC = b"WARRNMST"

DATA_SUFFIX = ".rdq"
HINT_SUFFIX = ".rdh"
PART_SUFFIX = ".rdq.part"

HEADER_BYTES = 64
MSG_ID_BYTES = 16
RECORD_HEAD_BYTES = 28
RECORD_OVERHEAD_BYTES = 29
END_MARKER = b"\xff"
CRC_BYTES = 4

FILE_SIZE_LIMIT_BYTES = 16 * 1024 * 1024
LARGE_BODY_BYTES = 1024 * 1024  # over that, a body gets a file of its own
MAX_RECORD_BYTES = 2**31 - 1  # an index row has 32 bits for a size, and for an offset
MAX_FILE_SIZE_LIMIT_BYTES = 2**31

INDEX_TABLE = 1
INDEX_LMDB = 2

_DATA_HEADER = struct.Struct("<8sIIQ36x")
_HINT_HEADER = struct.Struct("<8sIIQQQ24x")
_TERMS_HEADER = struct.Struct("<8sIIQQQQ16x")
_FILE_ROW = struct.Struct("<IIQQQI4x")
_CRC = struct.Struct("<I")
_RECORD_LENGTH = struct.Struct("<Q")
HINT_ROW = struct.Struct("<16sQQ")
assert HINT_ROW.size == HINT_ROW_BYTES

_NAME = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(\.rdq|\.rdh|\.rdq\.part)")


Quarantine = Callable[[str, int, int, str], None]  # path, offset, length, why


class TermsError(WarrenError):
    """The recovery terms are damaged, or do not fit the directory: the store has to be opened dirty."""


class FileName(NamedTuple):
    number: int
    generation: int
    suffix: str


def file_name(number: int, generation: int, suffix: str) -> str:
    return f"{number}.{generation}{suffix}"


def parse_name(name: str) -> FileName | None:
    """None for a name that is not one of a message store's file."""
    match = _NAME.fullmatch(name)
    return FileName(int(match[1]), int(match[2]), match[3]) if match else None


# ---- data files ----


def data_header(number: int, generation: int) -> bytes:
    header = _DATA_HEADER.pack(DATA_MAGIC, VERSION, generation, number)
    return header + _CRC.pack(crc32c(header))


def check_data_header(data: bytes, number: int, generation: int) -> str | None:
    """What is wrong with the header of a data file, or None. Raises StoreFormatError for one of a newer Warren."""
    if len(data) < HEADER_BYTES:
        return f"the file has {len(data)} bytes, its header alone needs {HEADER_BYTES}"
    if _CRC.unpack_from(data, HEADER_BYTES - CRC_BYTES)[0] != crc32c(data[: HEADER_BYTES - CRC_BYTES]):
        return "the CRC of the file header is wrong"
    magic, version, found_generation, found_number = _DATA_HEADER.unpack_from(data)
    if magic != DATA_MAGIC:
        return f"the file begins with {magic!r}, not {DATA_MAGIC!r}"
    _check_version(version, file_name(number, generation, DATA_SUFFIX))
    if (found_number, found_generation) != (number, generation):
        return f"the header says file {found_number}, generation {found_generation}"
    return None


def record_head(msg_id: bytes, length: int, crc: int) -> bytes:
    return _RECORD_LENGTH.pack(length) + msg_id + _CRC.pack(crc)


def record_crc_seed(msg_id: bytes, length: int) -> int:
    """The CRC of a record before its payload: go on from here with the payload's slices."""
    return crc32c(_RECORD_LENGTH.pack(length) + msg_id)


# ---- hint files ----


def encode_hint(number: int, generation: int, data_size: int, rows: bytes | bytearray) -> bytes:
    header = _HINT_HEADER.pack(HINT_MAGIC, VERSION, generation, number, data_size, len(rows) // HINT_ROW_BYTES)
    body = header + rows
    return body + _CRC.pack(crc32c(body))


def decode_hint(data: bytes, number: int, generation: int, data_size: int) -> bytes | None:
    """The rows of a hint file, or None where it is damaged or belongs to another data file."""
    if len(data) < HEADER_BYTES + CRC_BYTES:
        return None
    if _CRC.unpack_from(data, len(data) - CRC_BYTES)[0] != crc32c(memoryview(data)[:-CRC_BYTES]):
        return None
    magic, version, *found, count = _HINT_HEADER.unpack_from(data)
    if magic != HINT_MAGIC or found != [generation, number, data_size]:
        return None
    _check_version(version, file_name(number, generation, HINT_SUFFIX))
    rows = data[HEADER_BYTES:-CRC_BYTES]
    return rows if len(rows) == count * HINT_ROW_BYTES else None


# ---- recovery terms ----


class FileTerms(NamedTuple):
    """A sealed data file, as the recovery terms describe it."""

    key: int
    generation: int
    number: int
    size: int
    valid: int
    records: int


class StoreTerms(NamedTuple):
    index_kind: int
    files: list[FileTerms]
    index_rows: bytes
    next_number: int
    next_key: int

    def check_files(self, disk: Disk, path: str) -> list[FileName]:
        """Raises TermsError unless `path` has these data files, with these sizes. Returns those that it has besides:
        they could not be unlinked, or came back after a power loss, and nothing refers to them."""
        expected = {file_name(file.number, file.generation, DATA_SUFFIX): file.size for file in self.files}
        names = set(disk.listdir(path))
        if not expected.keys() <= names:
            raise TermsError(f"{path} has not the files that its terms name")
        for name, size in expected.items():
            found = disk.size(os.path.join(path, name))
            if found != size:
                raise TermsError(f"{name} in {path} has {found} bytes, not {size}")
        others = [parse_name(name) for name in sorted(names - expected.keys())]
        return [name for name in others if name is not None and name.suffix == DATA_SUFFIX]


def encode_terms(terms: StoreTerms) -> bytes:
    header = _TERMS_HEADER.pack(
        TERMS_MAGIC,
        VERSION,
        terms.index_kind,
        len(terms.files),
        len(terms.index_rows),
        terms.next_number,
        terms.next_key,
    )
    body = b"".join([header, *(_FILE_ROW.pack(*file) for file in terms.files), terms.index_rows])
    return body + _CRC.pack(crc32c(body))


def decode_terms(data: bytes) -> StoreTerms:
    """Raises TermsError for damaged terms, StoreFormatError for those of a newer Warren."""
    if len(data) < HEADER_BYTES + CRC_BYTES:
        raise TermsError(f"the message store's terms have {len(data)} bytes, fewer than a header")
    if _CRC.unpack_from(data, len(data) - CRC_BYTES)[0] != crc32c(memoryview(data)[:-CRC_BYTES]):
        raise TermsError("the CRC of the message store's terms is wrong")
    magic, version, kind, file_count, index_bytes, next_number, next_key = _TERMS_HEADER.unpack_from(data)
    if magic != TERMS_MAGIC:
        raise TermsError(f"the message store's terms begin with {magic!r}, not {TERMS_MAGIC!r}")
    _check_version(version, "the message store's terms")
    index_from = HEADER_BYTES + file_count * _FILE_ROW.size
    if index_from + index_bytes + CRC_BYTES != len(data):
        raise TermsError(f"the message store's terms have {len(data)} bytes, which is not what their header says")
    files = [FileTerms(*row) for row in _FILE_ROW.iter_unpack(data[HEADER_BYTES:index_from])]
    return StoreTerms(kind, files, data[index_from:-CRC_BYTES], next_number, next_key)


def _check_version(version: int, what: str) -> None:
    if version != VERSION:
        raise StoreFormatError(f"{what} has format version {version}; this Warren reads version {VERSION}")


# ---- files on disk ----


class DataFile:
    """One `.rdq` file as the store knows it. The writing side is used by one thread at a time for any one offset."""

    __slots__ = (
        "_creating",
        "_disk",
        "_handle",
        "damaged",
        "generation",
        "hint_path",
        "hinted",
        "key",
        "name_synced",
        "number",
        "path",
        "pins",
        "records",
        "rows",
        "sealed",
        "size",
        "valid",
    )

    def __init__(self, disk: Disk, directory: str, key: int, number: int, generation: int) -> None:
        self.key = key  # how the index names it
        self.number = number
        self.generation = generation
        self.path = os.path.join(directory, file_name(number, generation, DATA_SUFFIX))
        self.hint_path = os.path.join(directory, file_name(number, generation, HINT_SUFFIX))
        self.size = HEADER_BYTES  # where the next record goes
        self.valid = 0  # bytes of records that have references
        self.records = 0
        self.rows = bytearray()  # the hint file to be; empty once that is written
        self.sealed = False  # nothing is placed in it any more
        self.hinted = False
        self.damaged = False  # a compaction found a bad record: let it be
        self.pins = 0  # who needs it to stay on disk
        self.name_synced = False
        self._disk = disk
        self._handle: DiskFile | None = None
        # A commit without the lock and a full buffer under it may both come first to a new file.
        self._creating = threading.Lock()

    @property
    def record_bytes(self) -> int:
        return self.size - HEADER_BYTES

    @property
    def is_large(self) -> bool:
        """Whether it holds one large body and nothing else: that is all valid or gone, never half garbage."""
        return self.records == 1 and self.record_bytes > LARGE_BODY_BYTES

    def write(self, data: bytes, offset: int) -> None:
        with self._creating:
            if self._handle is None:
                handle = self._disk.create(self.path)
                try:
                    handle.pwrite(data_header(self.number, self.generation), 0)
                except BaseException:
                    handle.close()
                    with contextlib.suppress(OSError):
                        self._disk.unlink(self.path)
                    raise
                self._handle = handle
        self._handle.pwrite(data, offset)

    def sync(self) -> None:
        handle = self._handle
        if handle is not None:
            handle.sync()
            return
        handle = self._disk.open(self.path)
        try:
            handle.sync()
        finally:
            handle.close()

    def write_hint(self, *, sync: bool = False) -> bool:
        """Whether it could be written; without it the next recovery takes longer, that is all."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(self.hint_path)
            handle = self._disk.create(self.hint_path)
            try:
                handle.append(encode_hint(self.number, self.generation, self.size, self.rows))
                if sync:
                    handle.sync()
            finally:
                handle.close()
        except OSError:
            return False
        self.hinted = True
        self.rows = bytearray()
        return True

    def terms(self) -> FileTerms:
        return FileTerms(self.key, self.generation, self.number, self.size, self.valid, self.records)

    def restore(self, terms: FileTerms) -> None:
        """Take over a file that a clean stop left."""
        self.size, self.valid, self.records = terms.size, terms.valid, terms.records
        self.sealed = self.name_synced = True
        self.hinted = self._disk.exists(self.hint_path)

    def recover_rows(self, quarantine: Quarantine, torn: list[tuple[str, int, int, str]]) -> bytes:
        """Take over a file that was there before a crash: its hint rows, from its hint file or else from itself.

        Bytes that are no record go to `quarantine`, but those at the end of the file to `torn`.
        """
        self.size = self._disk.size(self.path)
        self.sealed = True
        handle = open_to_read(self._disk, self.path)
        try:
            header = read_around(handle, HEADER_BYTES, 0)
        finally:
            handle.close()
        trouble = check_data_header(header, self.number, self.generation)
        if trouble is not None and self.size > HEADER_BYTES:
            quarantine(self.path, 0, HEADER_BYTES, trouble)
        rows = self.read_hint()
        self.hinted = rows is not None
        if rows is None:
            rows, damage = scan_records(read_whole(self._disk, self.path), HEADER_BYTES)
            for offset, length in damage:
                if offset + length == self.size:
                    torn.append((self.path, offset, length, "the end of the file holds no whole record"))
                else:
                    quarantine(self.path, offset, length, "no good record")
        self.size = max(self.size, HEADER_BYTES)
        self.records = len(rows) // HINT_ROW_BYTES
        return rows

    def read_hint(self) -> bytes | None:
        """The rows of the hint file, or None where there is none or it is no good."""
        try:
            data = self._disk.read(self.hint_path)
        except OSError:
            return None
        return decode_hint(data, self.number, self.generation, self.size)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def unlink(self) -> None:
        """The hint first: a hint file without its data file must not wait for a namesake."""
        self.close()
        for path in (self.hint_path, self.path):
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(path)


class LargeWrite:
    """A body with a file of its own. All methods are called without the engine's lock, by one thread."""

    __slots__ = (
        "_crc",
        "_disk",
        "_handle",
        "_length",
        "_part_path",
        "_received",
        "file",
        "finished",
        "msg_id",
        "synced",
    )

    def __init__(self, disk: Disk, file: DataFile, msg_id: bytes, length: int) -> None:
        self.file = file
        self.msg_id = msg_id
        self.finished = False
        self.synced = False
        self._disk = disk
        self._length = length  # of the payload
        self._received = 0
        self._crc = record_crc_seed(msg_id, length)
        self._part_path = file.path.removesuffix(DATA_SUFFIX) + PART_SUFFIX
        self._handle: DiskFile | None = None

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """The next slice of the body. After an OSError the same slice may be given again."""
        if self._received + len(data) > self._length:
            raise ValueError(f"the body has more than the {self._length} bytes it was announced with")
        if self._handle is None:
            self._handle = self._disk.create(self._part_path)
        self._handle.pwrite(data, HEADER_BYTES + RECORD_HEAD_BYTES + self._received)
        self._crc = crc32c(data, self._crc)
        self._received += len(data)

    def finish(self, sync: bool) -> None:
        """Complete the file and give it its name; safe from power loss when this returns, if `sync`. After an OSError
        it may be called again, unless it was that of a sync."""
        if self._received != self._length:
            raise ValueError(f"the body has {self._received} bytes, not the {self._length} it was announced with")
        if self._handle is None:
            self._handle = self._disk.create(self._part_path)
        file = self.file
        head = data_header(file.number, file.generation) + record_head(self.msg_id, self._length, self._crc)
        self._handle.pwrite(END_MARKER, HEADER_BYTES + RECORD_HEAD_BYTES + self._length)
        self._handle.pwrite(head, 0)
        if sync:
            self._handle.sync()
        self._disk.rename(self._part_path, file.path)
        self._handle.close()
        size = self._length + RECORD_OVERHEAD_BYTES
        file.size = HEADER_BYTES + size
        file.records = 1
        file.rows = bytearray(hint_rows([self.msg_id], HEADER_BYTES, [size]))
        self.finished = True
        if sync:
            self._disk.sync_dir(os.path.dirname(file.path))
            file.name_synced = True
        self.synced = sync

    def abort(self) -> None:
        """Remove what was written; for an upload that was given up, not for one that the store adopted. What cannot be
        removed is left to the next dirty start."""
        if self._handle is not None:
            self._handle.close()
            with contextlib.suppress(OSError):
                self._disk.unlink(self._part_path)
            with contextlib.suppress(OSError):
                self.file.unlink()
