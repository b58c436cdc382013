"""What `columns.pyx` has. Sources are numbers that the caller gives to files; pairs are packed u64 first, count."""

from collections.abc import Callable
from typing import Any

Fetch = Callable[[bytes], tuple[bytes, int, int] | None]

class Memory:
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class ColumnBuilder:
    rows: int
    has_expiry: bool
    def __init__(
        self,
        most_rows: int,
        most_bytes: int,
        payloads: bool = True,
        bodies: bool = True,
        since: int = 0,
        until: int | None = None,
    ) -> None: ...
    @property
    def body_bytes(self) -> int: ...
    def add_segment(
        self,
        slots: Any,
        bodies: Any | None,
        first_seq: int,
        from_slot: int,
        sid: int,
        boot: int,
        wanted: bytes | bytearray,
        expected: bool,
        source: int,
        fetch: Fetch,
        damaged: list[tuple[int, int]],
    ) -> int: ...
    def add_rows(
        self,
        rows: bytes,
        from_row: int,
        data: Any,
        file: int,
        sid: int,
        wanted: bytes,
        source: int,
        fetch: Fetch,
        damaged: list[tuple[int, int, bool]],
    ) -> int: ...
    def add_message(
        self, seq: int, published: int, expiry: int, head: bytes, body: bytes, source: int, offset: int
    ) -> bool: ...
    def finish(self) -> dict[str, Memory]: ...

def in_ranges(seqs: Any, pairs: bytes) -> bytes: ...
def numbers_at(seqs: Any, table: bytes) -> bytes: ...
