"""`verify` on Spark names what `verify` in one process names: nothing less, nothing more, with the same places."""

# ruff: noqa: F811  (the fixture is imported)

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import warren
from tests.spark_session import spark  # noqa: F401
from tests.test_cli import checked_files, fill
from warren.errors import StoreFormatError, WarrenError
from warren.kernel.checksum import crc32c
from warren.pipeline.jobs import verify as job
from warren.pipeline.jobs.verify import SparkVerification, verify_on_spark
from warren.storage.verify import Verification, verify_vhost, vhost_roots

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")

Damage = Callable[[Path], None]  # does something to a vhost's directory


@pytest.fixture(scope="module", params=["clean", "dirty"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "data"
    fill(path, clean=request.param == "clean")
    return path


@pytest.fixture
def root(filled: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(filled, tmp_path / "data")
    [root] = vhost_roots(str(tmp_path / "data"))
    return Path(root)


def findings(verification: Verification) -> list[tuple[object, ...]]:
    return sorted((dataclasses.astuple(finding) for finding in verification.findings), key=repr)


def compare(spark: SparkSession, root: Path) -> SparkVerification:
    """Both ways of looking say the same."""
    alone = verify_vhost(str(root))
    together = verify_on_spark(spark, str(root))
    assert findings(together) == findings(alone)
    assert together.counts == alone.counts
    assert (together.vhost, together.root) == (alone.vhost, alone.root)
    return together


def files(root: Path, pattern: str) -> list[Path]:
    found = sorted(path for path in root.rglob(pattern) if "transient" not in str(path))
    assert found, pattern
    return found


def test_a_sound_store_has_no_finding_and_every_message_is_counted(spark, root):
    verification = compare(spark, root)
    assert verification.findings == []
    assert verification.counts["messages"] > 250
    assert verification.counts["references to stored bodies"] > 5
    assert verification.messages_per_second > 0


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def test_flipped_bits_in_every_kind_of_file_are_all_named_and_nothing_else_is(
    spark, root, seed, scale, record_property
):
    """Many at once: one run of Spark for each round, not for each bit."""
    chance = random.Random(seed)
    sound = {path: path.read_bytes() for path in checked_files(str(root))}
    kinds: dict[str, list[Path]] = {}
    for path in sound:
        kinds.setdefault(path.suffix or path.name, []).append(path)
    assert {".wal", ".qi", ".rdq", ".rdh", "FLOOR"} <= set(kinds)
    kinds[".qs"] = files(root, "*.qs")
    sound.update((path, path.read_bytes()) for path in kinds[".qs"])
    rounds = scale.scale(30)
    for _ in range(rounds):
        places = [
            (path, chance.randrange(len(sound[path]))) for paths in kinds.values() for path in [chance.choice(paths)]
        ]
        for path, position in places:
            flip(path, position, chance.randrange(8))
        verification = compare(spark, root)
        touched = {str(path.relative_to(root)) for path, _ in places}
        for path, position in places:
            if path.suffix == ".qs":
                continue  # bytes of a file of bodies that no slot points to are nobody's
            name = str(path.relative_to(root))
            mine = [each for each in verification.findings if each.file == name]
            assert any(each.offset <= position < each.offset + max(each.length, 1) for each in mine), (name, position)
        # A stored body that is gone is named where it is referred to.
        others = [each for each in verification.findings if each.file not in touched]
        assert all("is in no file of the message store" in each.why for each in others), others
        for path, content in sound.items():
            path.write_bytes(content)
    record_property("rounds", rounds)


def missing_store_file(root: Path) -> None:
    min(files(root, "*.rdq"), key=lambda path: int(path.name.split(".")[0])).unlink()


def missing_bodies(root: Path) -> None:
    files(root, "*.qs")[0].unlink()


def missing_index(root: Path) -> None:
    files(root, "*.qi")[0].unlink()


def missing_metadata(root: Path) -> None:
    for path in root.glob("meta.db*"):
        path.unlink()


def missing_name(root: Path) -> None:
    (root / ".vhost").unlink()


def torn_journal(root: Path) -> None:
    path = max(files(root, "*.wal"), key=lambda path: int(path.stem))
    path.write_bytes(path.read_bytes()[:-3])


def torn_index(root: Path) -> None:
    path = files(root, "*.qi")[-1]
    path.write_bytes(path.read_bytes()[:-5])


def torn_bodies(root: Path) -> None:
    path = files(root, "*.qs")[0]
    path.write_bytes(path.read_bytes()[:-3])


def torn_store_file(root: Path) -> None:
    path = files(root, "*.rdq")[-1]
    path.write_bytes(path.read_bytes()[:-3])


def hint_with_a_wrong_count(root: Path) -> None:
    """A hint that checks out and says that it has one row more."""
    path = files(root, "*.rdh")[0]
    content = bytearray(path.read_bytes()[:-4])
    content[32:40] = (int.from_bytes(content[32:40], "little") + 1).to_bytes(8, "little")
    path.write_bytes(bytes(content) + crc32c(bytes(content)).to_bytes(4, "little"))


def what_a_crash_leaves(root: Path) -> None:
    (root / "msg_store_persistent" / "999.0.rdq.part").write_bytes(b"half")
    (root / "msg_store_persistent" / "998.0.rdh").write_bytes(b"a hint")
    (root / "queues" / ("0" * 24 + "-999")).mkdir()
    (files(root, "*.qi")[0].parent / "9999.qs").write_bytes(b"bodies")


def bad_row_of_sqlite(root: Path) -> None:
    [path] = files(root, "queue.db")
    content = path.read_bytes()
    flip(path, content.rindex(b"row"))


@pytest.mark.parametrize(
    ("damage", "harmless"),
    [
        (missing_store_file, False),
        (missing_bodies, False),
        (missing_index, True),
        (missing_metadata, False),
        (missing_name, False),
        (torn_journal, True),
        (torn_index, True),
        (torn_bodies, False),
        (torn_store_file, False),
        (hint_with_a_wrong_count, False),
        (what_a_crash_leaves, True),
        (bad_row_of_sqlite, False),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.parametrize("filled", ["dirty"], indirect=True)
def test_damage_of_every_kind_is_named_as_one_process_names_it(spark, root, damage, harmless):
    damage(root)
    verification = compare(spark, root)
    assert verification.findings
    if harmless:
        assert verification.damage == []
    else:
        assert verification.damage


@pytest.mark.parametrize("filled", ["clean"], indirect=True)
def test_terms_that_know_another_size_are_named(spark, root):
    path = files(root, "*.rdq")[0]
    path.write_bytes(path.read_bytes() + b"more")
    verification = compare(spark, root)
    assert any("recovery terms know it with" in each.why for each in verification.damage)


def test_a_file_of_a_newer_warren_ends_the_job_with_its_version(spark, root):
    path = files(root, "*.qi")[0]
    header = bytearray(path.read_bytes())
    header[4] = 9
    header[60:64] = crc32c(bytes(header[:60])).to_bytes(4, "little")
    path.write_bytes(header)
    with pytest.raises(StoreFormatError, match="format version 9"):
        verify_on_spark(spark, str(root))


def test_a_directory_that_executors_do_not_see_is_an_error_that_says_so(spark, root, monkeypatch):
    checks = job._check_groups
    monkeypatch.setattr(job, "_check_groups", lambda spark, root, groups: checks(spark, root + "-elsewhere", groups))
    with pytest.raises(WarrenError, match="Every executor has to see that directory"):
        verify_on_spark(spark, str(root))


def test_a_store_without_queues_is_sound(spark, tmp_path):
    warren.open(tmp_path / "data").close()
    [root] = vhost_roots(str(tmp_path / "data"))
    assert compare(spark, Path(root)).damage == []
