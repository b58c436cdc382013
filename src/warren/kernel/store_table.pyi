"""Table of contents of `store_table.pyx`. A file is a number below 2**32 that the message store chose.

`hint_rows` everywhere: packed rows of 32 bytes (msg_id, u64 offset, u64 size), as in a hint file.
"""

from typing import Final

ROW_BYTES: Final[int]
HINT_ROW_BYTES: Final[int]

class StoreTable:
    count: int

    def __len__(self) -> int: ...
    def __contains__(self, msg_id: bytes) -> bool: ...
    def put(self, msg_id: bytes, file: int, offset: int, size: int, refs: int) -> None:
        """A new row. Raises ValueError for an id that is there."""

    def get(self, msg_id: bytes) -> tuple[int, int, int, int] | None:
        """File, offset, size, references."""

    def change_refs(self, msg_id: bytes, delta: int) -> int | None:
        """The new count; a row that comes to 0 is deleted. None for an id that is not there."""

    def move(self, msg_id: bytes, file: int, offset: int) -> bool:
        """Give a row another place. False for an id that is not there."""

    def delete(self, msg_id: bytes) -> bool:
        """False for an id that is not there."""

    def clear(self) -> None: ...
    def allocated_bytes(self) -> int:
        """What the rows take, empty slots included."""

    def put_run(self, msg_ids: list[bytes], file: int, offset: int, sizes: list[int], refs: list[int]) -> None:
        """New rows of records that follow each other in `file`, the first one at `offset`."""

    def release(self, msg_ids: list[bytes]) -> tuple[list[bytes], dict[int, int]]:
        """Take one reference from each id (an id may occur twice; one that is not there is passed over). Returns the
        ids whose row is gone now and, for each file, the bytes of their records."""

    def count_refs(self, msg_ids: list[bytes], count: int = 1) -> None:
        """Add `count` references to each id; one that is not there gets a row with no place."""

    def live(self, hint_rows: bytes, file: int) -> bytes:
        """Those of `hint_rows` that a row of the table points to: same id, same file, same offset."""

    def move_run(self, hint_rows: bytes, file: int, new_file: int, new_offset: int) -> int:
        """The records of `hint_rows` now follow each other in `new_file` from `new_offset`: switch the rows that still
        point to the old place. Returns the bytes of the records that were switched."""

    def recover(self, hint_rows: bytes, file: int, refs: StoreTable) -> int:
        """Add a row for each of `hint_rows` that `refs` counts and that is not there yet. Returns their bytes."""

    def absent_from(self, other: StoreTable) -> list[bytes]:
        """The ids of this table that `other` does not have."""

    def items(self) -> list[tuple[bytes, int]]:
        """All ids with their references."""

    def rows_of(self, file: int) -> bytes:
        """The rows of one file as hint rows, by offset. Looks at the whole table."""

    def dump(self) -> bytes:
        """All rows, ROW_BYTES each."""

    def load(self, rows: bytes | memoryview) -> None:
        """Add the rows of a dump. Raises ValueError where they cannot be ones."""

def pack_records(msg_ids: list[bytes], payloads: list[bytes | tuple[bytes, ...]]) -> bytes:
    """The records of these messages, one behind the other."""

def unpack_record(data: bytes, msg_id: bytes, size: int) -> bytes:
    """The payload of a record of `size` bytes. Raises ValueError with what is wrong with it."""

def check_run(data: bytes, hint_rows: bytes) -> int:
    """Whether `data` is the records of `hint_rows`, one behind the other: the index of the first bad one, or -1."""

def scan_records(data: bytes, start: int) -> tuple[bytes, list[tuple[int, int]]]:
    """Search `data` for records: hint rows of all good ones, and (offset, length) of all bytes between them."""

def hint_rows(msg_ids: list[bytes], offset: int, sizes: list[int]) -> bytes:
    """Hint rows of records that follow each other, the first one at `offset`."""
