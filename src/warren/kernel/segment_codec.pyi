from warren.kernel.entry import Entry

SLOT_BYTES: int
BODY_PREFIX_BYTES: int
PRESENT_FLAG: int

def convert_rows(
    rows: bytes,
    data: bytes,
    base: int,
    sid: int,
    segment_size: int,
    qs_offset: int,
    damaged: list[tuple[int, int, int]],
) -> tuple[bytes, list[tuple[int, bytes]]]: ...
def measure_rows(rows: bytes, data: bytes, base: int) -> int: ...
def encode_bodies(entries: list[Entry], sid: int, qs_offset: int) -> bytes: ...
def encode_slots(entries: list[Entry], sid: int, segment_size: int, boot: int) -> list[tuple[int, bytes]]: ...
def read_slots(
    data: bytes,
    first_seq: int,
    from_slot: int,
    sid: int,
    boot: int,
    live: bytearray,
    limit: int,
    entries: list[Entry],
    damaged: list[int],
    stale: list[int],
) -> int: ...
def scan_slots(
    data: bytes,
    first_seq: int,
    sid: int,
    boot: int,
    live: bytearray,
    store_refs: list[tuple[int, bytes]],
    damaged: list[int],
) -> tuple[int, int, int, int, int]: ...
def fill_bodies(entries: list[Entry], data: bytes, base: int, sid: int, damaged: list[Entry]) -> None: ...
def set_bits(bits: bytearray, first: int, count: int) -> int: ...
def clear_bits(bits: bytearray, first: int, count: int, cleared: list[int]) -> int: ...
def bit_runs(bits: bytearray, first: int, stop: int) -> list[int]: ...
def live_bytes(slots: bytes, live: bytearray) -> int: ...
