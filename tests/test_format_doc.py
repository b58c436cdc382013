"""docs/format.md says what the code does: its worked example is built here by the code, and compared byte by byte."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from warren.kernel import journal_codec, segment_codec, store_table
from warren.kernel.entry import IN_QS, IN_STORE, PERSISTENT, SLOTTED, Entry
from warren.kernel.journal_codec import ACK, RecordBuffer, replay
from warren.kernel.overlay import LIVE, Overlay
from warren.kernel.ranges import RangeSet
from warren.kernel.segment_codec import convert_rows
from warren.queueing.properties import encode_head
from warren.storage import layout, recovery_terms, segment, store_format
from warren.storage.disk import Disk
from warren.storage.journal import read_floor, write_floor
from warren.storage.layout import HEADER_BYTES, hashed, pack_header, stream_id, unpack_header
from warren.storage.segment import SegmentFiles

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "format.md"

ORDERS, DONE = stream_id(1), stream_id(2)
PUBLISHED_AT = 1_767_225_600_000_000  # 2026-01-01T00:00:00 UTC, in microseconds
SEGMENT_ENTRIES = 4096
HEX_LINE = re.compile(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} )*[0-9a-f]{2}(?: \* \d+)?)(?:   |$)")


def text() -> str:
    return DOCUMENT.read_text()


# ---- the worked example ----


def message(seq: int, queue: str) -> Entry:
    return Entry(seq, encode_head("", queue, persistent=True), b"hello", PERSISTENT, PUBLISHED_AT, 0)


def journal_file() -> tuple[bytes, Overlay]:
    """A message is published to `orders`, then moved to `done` by a transaction."""
    overlays = {ORDERS: Overlay(), DONE: Overlay()}
    data = pack_header(layout.JOURNAL_MAGIC, 0, 0)
    buffer = RecordBuffer()
    buffer.reset(0, len(data))
    buffer.append_reserve(1, 8192)
    buffer.append_publishes(ORDERS, [message(0, "orders")], overlays[ORDERS], LIVE)
    buffer.finish(1)
    data += bytes(buffer)
    buffer.reset(0, len(data))
    buffer.begin_group()
    buffer.append_publishes(DONE, [message(0, "done")], overlays[DONE], LIVE)
    buffer.append_ranges(ACK, ORDERS, [0, 1])
    buffer.end_group()
    buffer.finish(2)
    return data + bytes(buffer), overlays[DONE]


def segment_files(directory: Path) -> dict[str, bytes]:
    """What the checkpoint makes of it, and the ack that follows."""
    journal, overlay = journal_file()
    headers = {
        suffix: pack_header(magic, DONE, 0, SEGMENT_ENTRIES)
        for suffix, magic in (("qi", layout.INDEX_MAGIC), ("qs", layout.BODIES_MAGIC), ("qa", layout.ACKS_MAGIC))
    }
    bodies, [(slot, slots)] = convert_rows(overlay.rows_upto(0), journal, 0, DONE, SEGMENT_ENTRIES, HEADER_BYTES, [])
    assert slot == 0
    files = SegmentFiles(Disk(), str(directory), DONE, SEGMENT_ENTRIES)
    return {
        "0.qi": headers["qi"] + slots,
        "0.qs": headers["qs"] + bodies,
        "0.qa": headers["qa"] + files.ack_batch(3, [0, 1], {}),
    }


def floor_file(directory: Path) -> bytes:
    write_floor(Disk(), str(directory), 1)
    assert read_floor(Disk(), str(directory)) == (1, None)
    return (directory / "FLOOR").read_bytes()


def store_file() -> bytes:
    record = store_table.pack_records([bytes(range(16))], [b"hello"])
    return store_format.data_header(7, 0) + record


def built(directory: Path) -> dict[str, bytes]:
    return {
        "0.wal": journal_file()[0],
        "FLOOR": floor_file(directory),
        **segment_files(directory),
        "7.0.rdq": store_file(),
    }


def documented() -> dict[str, bytes]:
    """The blocks that begin with "```hex <file>": an offset, bytes (`00 * 28` is 28 times 00) and a comment a line."""
    found = {}
    for name, block in re.findall(r"^```hex (\S+)\n(.*?)^```$", text(), re.MULTILINE | re.DOTALL):
        data = b""
        for line in block.splitlines():
            offset, numbers = HEX_LINE.match(line).groups()
            assert int(offset, 16) == len(data), f"{name}: {line}"
            byte, _, times = numbers.partition(" * ")
            data += bytes.fromhex(byte) * int(times or 1)
        found[name] = data
    return found


@pytest.mark.parametrize("name", ["0.wal", "FLOOR", "0.qi", "0.qs", "0.qa", "7.0.rdq"])
def test_the_worked_example_is_what_the_code_writes(tmp_path, name):
    assert documented()[name].hex(" ") == built(tmp_path)[name].hex(" ")


def test_every_block_of_the_document_is_compared():
    assert sorted(documented()) == ["0.qa", "0.qi", "0.qs", "0.wal", "7.0.rdq", "FLOOR"]


def test_the_code_reads_the_worked_example_as_the_document_tells_it(tmp_path):
    files = documented()
    assert unpack_header(layout.JOURNAL_MAGIC, files["0.wal"], "0.wal") == (0, 0, 0)
    overlays = {ORDERS: Overlay(), DONE: Overlay()}
    acks: dict[int, RangeSet] = {}
    reserved: dict[int, int] = {}
    damaged: list[tuple[int, int]] = []
    result = replay(files["0.wal"], HEADER_BYTES, 0, overlays, acks, {}, reserved, [], damaged)
    assert (result, damaged) == ((2, 2, 3, 0), [])
    assert reserved == {1: 8192}
    assert [overlays[sid].live_totals()[0] for sid in (ORDERS, DONE)] == [0, 1]
    for name in ("0.qi", "0.qs", "0.qa"):
        (tmp_path / name).write_bytes(files[name])
    complaints: list[object] = []
    files_of_done = SegmentFiles(Disk(), str(tmp_path), DONE, SEGMENT_ENTRIES)
    found = files_of_done.recover(0, 1, None, lambda *report: complaints.append(report))
    assert (found.segment.live_count, complaints) == (0, [])
    rows, damage = store_table.scan_records(files["7.0.rdq"], HEADER_BYTES)
    assert (len(rows), damage) == (store_table.HINT_ROW_BYTES, [])


def test_the_directories_of_the_example_are_named_as_the_document_says():
    for name in ("/", "orders", "done"):
        assert hashed(name) in text()


# ---- names and numbers ----


def test_every_record_type_is_in_the_table_with_its_number():
    types = {
        name: value
        for name, value in vars(journal_codec).items()
        if name.isupper()
        and isinstance(value, int)
        and not name.endswith(("_BYTES", "_TARGETS"))
        and name not in BORROWED
    }
    assert len(types) == 12
    table = {name: int(number) for number, name in re.findall(r"^\| (\d+) \| `([A-Z]+)` \|", text(), re.MULTILINE)}
    assert table == types


BORROWED = {"IN_STORE", "PERSISTENT", "IN_QS", "SLOTTED", "LIVE", "ACKED", "DEAD", "GONE", "HIDDEN"}  # of other modules


def constants() -> dict[str, int]:
    modules = (layout, journal_codec, segment_codec, store_table, store_format, recovery_terms)
    found = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if re.fullmatch(r"[A-Z_]+_BYTES|FORMAT_VERSION|VERSION", name) and isinstance(value, int)
    }
    return {**found, "PRESENT_FLAG": segment_codec.PRESENT_FLAG, "PERSISTENT": PERSISTENT, "IN_STORE": IN_STORE}


def test_every_constant_is_in_the_table_with_its_value():
    table = {
        name: int(value.replace(",", ""), 0)
        for name, value in re.findall(r"^\| `([A-Z_]+)` \| ([\d,x]+[0-9a-f]*) \|", text(), re.MULTILINE)
    }
    assert table == constants()


def test_every_magic_word_is_in_the_document():
    modules = (layout, segment, recovery_terms, store_format)
    words = {value for module in modules for name, value in vars(module).items() if name.endswith("_MAGIC")}
    assert len(words) == 11
    assert [word for word in words | {b"WBLK"} if f'"{word.decode()}"' not in text()] == []


def test_the_sizes_in_the_grammar_are_those_of_the_structures():
    sizes = {
        "header": layout._HEADER.size,
        "FLOOR": 20,
        "block header": journal_codec.BLOCK_HEADER_BYTES,
        "slot": segment_codec.SLOT_BYTES,
        "trailer": segment._TRAILER.size,
        "batch header": segment._BATCH.size,
        "ack entry": segment._ENTRY.size,
        "terms header": recovery_terms.TERMS_HEADER_BYTES,
        "hint row": store_format.HINT_ROW.size,
    }
    for what, size in sizes.items():
        assert re.search(rf"^{what} +:= (?:.|\n {{8}})*?\b{size} bytes$", text(), re.MULTILINE), (what, size)


def test_flags_that_live_in_ram_only_are_not_written(tmp_path):
    flags = segment_files(tmp_path)["0.qi"][HEADER_BYTES + 8]
    assert not flags & (IN_QS | SLOTTED)
    assert flags == PERSISTENT | segment_codec.PRESENT_FLAG
    assert struct.unpack_from("<Q", segment_files(tmp_path)["0.qi"], HEADER_BYTES + 16) == (HEADER_BYTES,)
