"""The two indexes of the message store are one behaviour: a dict of rows, without its price."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from warren.kernel.store_table import HINT_ROW_BYTES, ROW_BYTES, StoreTable
from warren.storage.store_format import HINT_ROW, TermsError
from warren.storage.store_index import LmdbIndex, RefCounts, StoreIndex, TableIndex

MAX_BYTES_PER_ROW = 64

Row = tuple[int, int, int, int]


def id_number(number: int) -> bytes:
    return b"boot-id." + number.to_bytes(8, "big")


def hint(*rows: tuple[bytes, int, int]) -> bytes:
    return b"".join(HINT_ROW.pack(*row) for row in rows)


@pytest.fixture(params=["table", "lmdb"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreIndex]:
    index: StoreIndex = TableIndex() if request.param == "table" else LmdbIndex(str(tmp_path / "index.lmdb"))
    index.clear()
    yield index
    index.close()


def reopened(index: StoreIndex, tmp_path: Path) -> StoreIndex:
    """The index after a clean stop and start."""
    saved = index.save()
    index.close()
    again: StoreIndex = TableIndex() if isinstance(index, TableIndex) else LmdbIndex(str(tmp_path / "index.lmdb"))
    again.restore(saved)
    return again


def test_a_row_says_file_offset_size_and_references(index):
    index.put(id_number(1), 7, 64, 5029, 2)
    assert index.get(id_number(1)) == (7, 64, 5029, 2)
    assert id_number(1) in index
    assert index.get(id_number(2)) is None
    assert id_number(2) not in index
    assert len(index) == 1


def test_an_id_can_be_put_only_once(index):
    index.put(id_number(1), 7, 64, 5029, 2)
    with pytest.raises(ValueError, match="already"):
        index.put(id_number(1), 8, 64, 5029, 1)
    assert index.get(id_number(1)) == (7, 64, 5029, 2)


def test_a_row_needs_a_size_and_a_reference(index):
    with pytest.raises(ValueError, match="refs 0"):
        index.put(id_number(1), 7, 64, 5029, 0)
    with pytest.raises(ValueError, match="size 0"):
        index.put(id_number(1), 7, 64, 0, 1)


def test_records_of_a_run_follow_each_other(index):
    index.put_run([id_number(1), id_number(2), id_number(3)], 4, 100, [10, 20, 30], [1, 2, 3])
    assert [index.get(id_number(n)) for n in (1, 2, 3)] == [(4, 100, 10, 1), (4, 110, 20, 2), (4, 130, 30, 3)]


def test_a_row_whose_references_come_to_zero_is_gone(index):
    index.put(id_number(1), 7, 64, 5029, 2)
    assert index.change_refs(id_number(1), 3) == 5
    assert index.change_refs(id_number(1), -4) == 1
    assert index.change_refs(id_number(1), -1) == 0
    assert index.get(id_number(1)) is None
    assert index.change_refs(id_number(1), 1) is None
    assert len(index) == 0


def test_release_says_which_ids_are_gone_and_what_that_frees_in_each_file(index):
    index.put_run([id_number(1), id_number(2)], 4, 64, [100, 200], [1, 2])
    index.put_run([id_number(3), id_number(4)], 5, 64, [1000, 2000], [1, 1])
    gone, freed = index.release([id_number(n) for n in (3, 1, 2, 99, 4)])
    assert gone == [id_number(3), id_number(1), id_number(4)]
    assert freed == {4: 100, 5: 3000}
    assert index.get(id_number(2)) == (4, 164, 200, 1)


def test_release_of_one_id_twice_takes_two_references(index):
    index.put(id_number(1), 4, 64, 100, 2)
    assert index.release([id_number(1), id_number(1)]) == ([id_number(1)], {4: 100})


def test_moved_rows_are_those_that_still_point_to_the_old_place(index):
    rows = hint((id_number(1), 64, 100), (id_number(2), 164, 200), (id_number(3), 364, 50), (id_number(4), 414, 1))
    index.put_run([id_number(n) for n in (1, 2, 3, 4)], 4, 64, [100, 200, 50, 1], [1, 1, 1, 1])
    index.delete(id_number(2))
    index.move(id_number(4), 9, 77)
    assert index.move_run(rows, 4, 6, 1000) == 150
    # The removed record was copied all the same, so the ones behind it keep their distance.
    assert index.get(id_number(1)) == (6, 1000, 100, 1)
    assert index.get(id_number(2)) is None
    assert index.get(id_number(3)) == (6, 1300, 50, 1)
    assert index.get(id_number(4)) == (9, 77, 1, 1)


def test_live_rows_are_those_that_the_index_points_to(index):
    index.put(id_number(1), 4, 64, 100, 1)
    index.put(id_number(2), 5, 164, 100, 1)
    index.put(id_number(3), 4, 999, 100, 1)
    rows = [(id_number(n), 64 + 100 * (n - 1), 100) for n in (1, 2, 3, 4)]
    assert index.live(hint(*rows), 4) == hint(rows[0])


def test_the_rows_of_one_file_come_by_their_offset(index):
    for number in range(50, 0, -1):
        index.put(id_number(number), number % 2, 64 + 10 * number, 10, 1)
    assert index.rows_of(1) == hint(*((id_number(n), 64 + 10 * n, 10) for n in range(1, 51, 2)))


def test_recovery_takes_the_rows_that_have_references_and_the_first_of_two_copies(index):
    refs = RefCounts({id_number(1): 2, id_number(2): 1, id_number(4): 1})
    assert index.recover(hint((id_number(1), 64, 100), (id_number(3), 164, 100)), 7, refs) == 100
    assert index.recover(hint((id_number(1), 500, 100), (id_number(2), 600, 30)), 8, refs) == 30
    assert index.get(id_number(1)) == (7, 64, 100, 2)
    assert index.get(id_number(2)) == (8, 600, 30, 1)
    assert id_number(3) not in index
    assert index.missing(refs) == [id_number(4)]
    assert index.recover(hint((id_number(4), 64, 1)), 9, refs) == 1
    assert index.missing(refs) == []


def test_a_cleared_index_is_empty_and_usable(index):
    index.put(id_number(1), 4, 64, 100, 1)
    index.clear()
    assert len(index) == 0
    assert index.get(id_number(1)) is None
    index.put(id_number(1), 5, 64, 100, 1)
    assert index.get(id_number(1)) == (5, 64, 100, 1)


def test_a_clean_stop_keeps_every_row(index, tmp_path):
    rows = {id_number(n): (n % 5, 64 + n, 1 + n, 1 + n % 3) for n in range(2000)}
    for msg_id, row in rows.items():
        index.put(msg_id, *row)
    again = reopened(index, tmp_path)
    assert len(again) == len(rows)
    assert {msg_id: again.get(msg_id) for msg_id in rows} == rows
    again.close()


def test_both_indexes_do_what_a_dict_does(index, tmp_path, seed, scale):
    chance = random.Random(seed)
    model: dict[bytes, Row] = {}
    ids = [id_number(n) for n in range(500)]
    for step in range(scale.scale(50_000)):
        msg_id = chance.choice(ids)
        match chance.randrange(7):
            case 0 | 1 | 2:
                if msg_id not in model:
                    row = (chance.randrange(1, 4), chance.randrange(2**32), chance.randrange(1, 2**31), 1 + step % 3)
                    index.put(msg_id, *row)
                    model[msg_id] = row
            case 3:
                batch = chance.choices(ids, k=20)
                gone, freed = index.release(batch)
                assert (gone, freed) == model_release(model, batch)
            case 4:
                assert index.delete(msg_id) == (model.pop(msg_id, None) is not None)
            case 5:
                moved = index.move(msg_id, 9, step)
                assert moved == (msg_id in model)
                if moved:
                    model[msg_id] = (9, step, *model[msg_id][2:])
            case 6:
                if step % 1000 == 6:
                    index = reopened(index, tmp_path)
        assert index.get(msg_id) == model.get(msg_id)
        assert len(index) == len(model)
    assert {msg_id: index.get(msg_id) for msg_id in ids if msg_id in index} == model
    index.close()


def model_release(model: dict[bytes, Row], batch: list[bytes]) -> tuple[list[bytes], dict[int, int]]:
    gone: list[bytes] = []
    freed: dict[int, int] = {}
    for msg_id in batch:
        if msg_id not in model:
            continue
        file, offset, size, refs = model[msg_id]
        if refs > 1:
            model[msg_id] = (file, offset, size, refs - 1)
        else:
            del model[msg_id]
            gone.append(msg_id)
            freed[file] = freed.get(file, 0) + size
    return gone, freed


# ---- the table ----


def test_a_row_of_the_table_costs_at_most_64_bytes_at_any_time_of_growth(scale, record_property):
    table = StoreTable()
    empty = table.allocated_bytes()
    worst = 0.0
    rows = scale.scale(1_000_000)
    for start in range(0, rows, 500):
        table.put_run([id_number(n) for n in range(start, start + 500)], 1, 64, [1] * 500, [1] * 500)
        if len(table) > 20_000:
            worst = max(worst, (table.allocated_bytes() - empty) / len(table))
    record_property("worst bytes a row", round(worst, 1))
    assert len(table) == rows
    assert worst < MAX_BYTES_PER_ROW


def test_the_table_gives_memory_back_when_messages_go(scale):
    table = StoreTable()
    ids = [id_number(n) for n in range(scale.scale(500_000))]
    table.put_run(ids, 1, 64, [1] * len(ids), [1] * len(ids))
    full = table.allocated_bytes()
    table.release(ids[100:])
    assert len(table) == 100
    assert table.allocated_bytes() < full / 4 + 1_000_000
    assert all(msg_id in table for msg_id in ids[:100])


def test_a_table_in_which_messages_come_and_go_for_ever_does_not_grow():
    table = StoreTable()
    waiting = 1000
    sizes: set[int] = set()
    for number in range(50_000):
        table.put(id_number(number), 1, 64, 1, 1)
        if number >= waiting:
            table.release([id_number(number - waiting)])
        if number > 10 * waiting:
            sizes.add(table.allocated_bytes())
    assert len(table) == waiting
    assert max(sizes) < 2 * min(sizes)


def test_ids_that_differ_only_in_their_random_half_are_spread_as_well():
    table = StoreTable()
    ids = [random.Random(n).randbytes(8) + bytes(8) for n in range(20_000)]
    table.put_run(ids, 1, 64, [1] * len(ids), [1] * len(ids))
    assert all(msg_id in table for msg_id in ids)
    assert table.allocated_bytes() < MAX_BYTES_PER_ROW * len(ids) + 100_000


def test_the_table_refuses_what_does_not_fit_its_row():
    table = StoreTable()
    for row in [(2**32, 64, 1, 1), (1, 2**32, 1, 1), (1, 64, 2**32, 1), (1, 64, 1, 2**32)]:
        with pytest.raises(ValueError, match="no row can hold"):
            table.put(id_number(1), *row)
    with pytest.raises(ValueError, match="16 bytes"):
        table.put(b"short", 1, 64, 1, 1)
    table.put(id_number(1), 1, 64, 1, 2**32 - 1)
    with pytest.raises(OverflowError):
        table.change_refs(id_number(1), 1)
    with pytest.raises(OverflowError):
        table.count_refs([id_number(1)])


def test_a_dump_that_is_no_table_is_refused():
    index = TableIndex()
    index.put(id_number(1), 1, 64, 1, 1)
    saved = index.save()
    assert len(saved) == ROW_BYTES
    assert HINT_ROW.size == HINT_ROW_BYTES
    for broken in [saved[:-1], saved + saved, bytes(ROW_BYTES)]:
        with pytest.raises(TermsError):
            TableIndex().restore(broken)


def test_references_are_counted_by_id():
    refs = RefCounts()
    refs.add(id_number(1))
    refs.add(id_number(1), 3)
    refs.add_many(iter([id_number(1), id_number(2), id_number(2)]))
    assert sorted(refs.items()) == [(id_number(1), 5), (id_number(2), 2)]
    assert (refs.get(id_number(1)), refs.get(id_number(3))) == (5, 0)
    assert len(refs) == 2
    assert id_number(2) in refs
    assert id_number(3) not in refs


# ---- LMDB ----


def test_an_lmdb_index_never_looks_at_what_a_crash_left(tmp_path):
    path = tmp_path / "index.lmdb"
    path.mkdir()
    (path / "data.mdb").write_bytes(os.urandom(1 << 16))
    index = LmdbIndex(str(path))
    index.clear()
    assert len(index) == 0
    index.put(id_number(1), 1, 64, 1, 1)
    assert id_number(1) in index
    index.close()


def test_an_lmdb_index_whose_file_is_gone_or_another_one_is_refused(tmp_path):
    index = LmdbIndex(str(tmp_path / "index.lmdb"))
    index.clear()
    index.put(id_number(1), 1, 64, 1, 1)
    saved = index.save()
    index.put(id_number(2), 1, 65, 1, 1)
    index.commit()
    index.close()
    with pytest.raises(TermsError, match="2 rows, not 1"):
        index.restore(saved)
    index.close()
    with pytest.raises(TermsError, match="no index"):
        LmdbIndex(str(tmp_path / "another.lmdb")).restore(saved)


def test_an_lmdb_index_may_be_used_by_one_thread_after_the_other(tmp_path):
    index = LmdbIndex(str(tmp_path / "index.lmdb"))
    index.clear()
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(300):
                msg_id = id_number(number * 1000 + step)
                with lock:
                    index.put(msg_id, 1, 64, 1, 1)
                    index.commit()
                with lock:
                    if step % 3:
                        index.release([msg_id])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(index) == 400
    index.close()
