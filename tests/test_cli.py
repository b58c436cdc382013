"""The `warren` command: what it shows, what it changes (nothing, unless asked to) and how it says that it cannot."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import warren
from warren.cli.main import app
from warren.kernel.checksum import crc32c
from warren.storage.settings import EngineSettings
from warren.storage.verify import verify_vhost, vhost_roots
from warren.storage.vhost_store import VhostStore

SMALL = EngineSettings(
    segment_entries=64,
    journal_file_bytes=8 * 1024,
    io_batch=32,
    load_entries=32,
    ram_target=16,
    ram_slack=0,
    carry_below=256,
    store_file_bytes=16 * 1024,
    reserve_bytes=0,
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result: Result) -> str:
    """The error of a command that failed: one line."""
    assert result.exit_code == 1
    assert re.fullmatch(r"warren: [^\n]*\n", result.stderr), result.stderr
    return result.stderr


def fill(path: Path, *, clean: bool = True) -> None:
    """A store with something in every kind of file: journal, segments, acks, stored bodies, priorities, SQLite."""
    store = warren.open(path, settings=SMALL)
    orders = store.queue("orders")
    for number in range(12):
        orders.publish_many([b"order %d" % n for n in range(number * 20, number * 20 + 20)], headers={"n": number})
        orders.publish(b"large %d " % number + bytes(5000))
        if number % 3 == 0:
            orders.ack_many(orders.get_many(8))
        store.sync()
    ranked = store.queue("ranked", arguments={"x-max-priority": 2})
    for number in range(60):
        ranked.publish(b"ranked %d" % number, priority=number % 3)
    store.queue("table", arguments={"x-backing-queue": "sqlite"}).publish_many([b"row"] * 30)
    store.engine.checkpoint(seal=True, carry_below=0)
    ranked.ack_many(ranked.get_many(5))
    orders.nack_many(orders.get_many(3))
    with store.transaction() as tx:
        tx.publish("orders", b"one of two")
        tx.publish("ranked", b"two of two", priority=1)
    store.sync()
    if clean:
        store.close()
    else:
        store.engine.abandon()


@pytest.fixture(scope="module", params=["clean", "dirty"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "data"
    fill(path, clean=request.param == "clean")
    return path


@pytest.fixture
def data(filled: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(filled, tmp_path / "data")
    return tmp_path / "data"


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def unchanged(data: Path) -> Iterator[None]:
    before = contents(data)
    yield
    assert contents(data) == before


# ---- the command ----


def test_the_version_is_that_of_the_package():
    assert run("--version").stdout == f"warren {warren.__version__}\n"


def test_the_installed_command_runs(tmp_path):
    command = Path(sys.executable).with_name("warren")
    done = subprocess.run([command, "store", "info", tmp_path / "nothing"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("warren: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [[], ["store"], ["store", "verify", "--help"]])
def test_help_is_shown(command):
    assert "Usage" in run(*command).output


@pytest.mark.parametrize("command", [("info",), ("browse", "q"), ("verify",), ("snapshot", "target")])
def test_a_directory_without_a_store_is_refused_and_nothing_is_made(tmp_path, command):
    name, *rest = command
    rest = [tmp_path / argument if argument == "target" else argument for argument in rest]
    assert "holds no store" in said(run("store", name, tmp_path / "nothing", *rest))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("info",), ("browse", "orders"), ("verify",), ("snapshot", "target")])
def test_a_live_owner_is_named_with_what_to_do(tmp_path, command):
    name, *rest = command
    rest = [tmp_path / argument if argument == "target" else argument for argument in rest]
    with warren.open(tmp_path / "data") as store:
        store.queue("orders").publish(b"1")
        message = said(run("store", name, tmp_path / "data", *rest))
        assert f"in use by process {os.getpid()}" in message
        assert "snapshot()" in message
        with store.snapshot() as snapshot:
            assert run("store", "verify", snapshot.path).exit_code == 0
    assert not (tmp_path / "target").exists()


def test_an_unknown_vhost_is_refused_with_those_there_are(data):
    assert "no vhost 'other'; there is '/'" in said(run("store", "info", data, "--vhost", "other"))


# ---- info ----


@pytest.mark.usefixtures("unchanged")
def test_info_shows_every_queue_and_leaves_the_directory_as_it_is(data):
    result = run("store", "info", data)
    assert result.exit_code == 0, result.output
    for word in ("orders", "ranked", "table", "q1", "delta", "q4", "RAM"):
        assert word in result.stdout
    assert not list(data.glob("vhosts/*/snapshots"))


def test_info_as_json_counts_as_the_store_does(data):
    [vhost] = json.loads(run("store", "info", data, "--json").stdout)
    queues = {queue["name"]: queue for queue in vhost["queues"]}
    with warren.open(data, settings=SMALL) as store:
        assert vhost["last_stop"] == ("clean" if store.engine.clean_start else "dirty")
        assert {name: queue["len"] for name, queue in queues.items()} == {
            name: len(store.queue(name)) for name in store.queues()
        }
    for queue in queues.values():
        if queue["name"] != "table":
            assert queue["len"] == sum(queue[part] for part in ("q1", "q2", "delta", "q3", "q4"))


def test_info_of_every_vhost_and_of_one(tmp_path):
    for vhost in ("one", "two"):
        with warren.open(tmp_path, vhost=vhost) as store:
            store.queue(f"in {vhost}").publish(b"1")
    both = run("store", "info", tmp_path).stdout
    assert "in one" in both
    assert "in two" in both
    one = run("store", "info", tmp_path, "--vhost", "one").stdout
    assert "in one" in one
    assert "in two" not in one


def test_a_view_of_a_process_that_was_killed_is_removed_by_the_next(data):
    [root] = vhost_roots(str(data))
    left = Path(root, "snapshots", "view-1", "vhosts")
    left.mkdir(parents=True)
    assert run("store", "info", data).exit_code == 0
    assert not Path(root, "snapshots").exists()


# ---- browse ----


@pytest.mark.usefixtures("unchanged")
def test_browse_shows_messages_and_leaves_the_directory_as_it_is(data):
    result = run("store", "browse", data, "orders", "--limit", 3)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].split()[0] == "32"
    assert lines[0].endswith("order 31")


def test_browse_as_json_is_an_object_a_line(data):
    result = run("store", "browse", data, "orders", "--start-seq", 250, "--limit", 0, "--format", "json")
    messages = [json.loads(line) for line in result.stdout.splitlines()]
    assert [message["seq_id"] for message in messages] == [250, 251, 252]
    assert messages[0]["properties"] == {"headers": {"n": 11}, "delivery_mode": 2}
    assert messages[-1]["body"] == "one of two"
    assert messages[-1]["routing_key"] == "orders"


def test_browse_shows_bodies_that_are_no_text_without_harm(tmp_path):
    with warren.open(tmp_path) as store:
        queue = store.queue("q")
        queue.publish(b"\xff\x00\x1b[31mred" + b"x" * 100, headers={"raw": b"\xff"})
    line = run("store", "browse", tmp_path, "q").stdout
    assert "\x1b" not in line
    assert line.rstrip().endswith("…")
    message = json.loads(run("store", "browse", tmp_path, "q", "--format", "json").stdout)
    assert message["body_base64"].startswith("/wAbWzMx")


def test_browse_of_an_unknown_queue_names_those_there_are(data):
    message = said(run("store", "browse", data, "order"))
    assert "no queue 'order' in vhost '/'; there is 'orders', 'ranked', 'table'" in message


# ---- verify ----


@pytest.mark.usefixtures("unchanged")
def test_verify_of_a_sound_store_finds_nothing_and_touches_nothing(data):
    result = run("store", "verify", data)
    assert result.exit_code == 0, result.output
    assert "no damage" in result.stdout


def test_verify_counts_every_message_that_the_store_has(data):
    [root] = vhost_roots(str(data))
    counts = verify_vhost(root).counts
    with warren.open(data, settings=SMALL) as store:
        assert counts["messages"] == sum(len(store.queue(name)) for name in store.queues())
    assert all(counts[kind] for kind in ("files", "bytes", "slots", "bodies", "segments", "store records"))


def checked_files(root: str) -> list[Path]:
    """Files whose every byte is under a checksum."""
    files = [path for path in Path(root).rglob("*") if path.is_file()]
    suffixes = (".wal", ".qi", ".qa", ".rdq", ".rdh")
    chosen = [path for path in files if path.suffix in suffixes and "transient" not in str(path)]
    return chosen + [path for path in files if path.name in ("FLOOR", "recovery")]


def test_a_flipped_bit_in_any_file_is_found_where_it_is(data, seed, scale, record_property):
    [root] = vhost_roots(str(data))
    chance = random.Random(seed)
    files = checked_files(root)
    kinds = {path.suffix or path.name for path in files}
    assert {".wal", ".qi", ".rdq", ".rdh", "FLOOR"} <= kinds
    flips = scale.scale(2000)
    for _ in range(flips):
        path = chance.choice(files)
        good = path.read_bytes()
        position = chance.randrange(len(good))
        bad = bytearray(good)
        bad[position] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        name = str(path.relative_to(root))
        findings = [finding for finding in verify_vhost(root).findings if finding.file == name]
        path.write_bytes(good)
        assert any(f.offset <= position < f.offset + f.length for f in findings), (name, position, findings)
    record_property("flips", flips)


def test_a_flipped_bit_in_a_body_names_queue_and_seq_id(data):
    [root] = vhost_roots(str(data))
    path = next(path for path in sorted(Path(root).rglob("*.qs")) if b"order 100" in path.read_bytes())
    content = path.read_bytes()
    position = content.index(b"order 100")
    path.write_bytes(content[:position] + b"O" + content[position + 1 :])
    result = run("store", "verify", data, "--json")
    assert result.exit_code == 1
    [vhost] = json.loads(result.stdout)
    [finding] = vhost["findings"]
    assert vhost["damaged"]
    assert finding["file"] == str(path.relative_to(root))
    assert finding["offset"] <= position < finding["offset"] + finding["length"]
    assert (finding["queue"], finding["why"], finding["harmless"]) == ("orders", "body", False)
    text = run("store", "verify", data)
    assert text.exit_code == 1
    assert "1 damaged places" in text.stdout
    assert str(finding["offset"]) in text.stdout
    with warren.open(data, settings=SMALL) as store:
        assert finding["seq_id"] not in [message.seq_id for message in store.queue("orders").browse()]


def test_a_flipped_bit_in_a_row_of_sqlite_is_found(data):
    [root] = vhost_roots(str(data))
    [path] = Path(root).rglob("queue.db")
    content = path.read_bytes()
    position = content.rindex(b"row")
    path.write_bytes(content[:position] + b"R" + content[position + 1 :])
    findings = verify_vhost(root).findings
    assert {(finding.file, finding.queue) for finding in findings} == {(str(path.relative_to(root)), "table")}
    assert any("checksum" in finding.why for finding in findings)


@pytest.mark.parametrize("filled", ["dirty"], indirect=True)
def test_the_torn_end_of_the_journal_is_harmless_at_every_byte(data, seed):
    [root] = vhost_roots(str(data))
    path = max(Path(root, "journal").glob("*.wal"), key=lambda path: int(path.stem))
    content = path.read_bytes()
    last_block = content.rindex(b"WBLK")
    chance = random.Random(seed)
    for cut in [last_block + 1, len(content) - 1, *(chance.randrange(last_block + 1, len(content)) for _ in range(10))]:
        path.write_bytes(content[:cut] + bytes(chance.choice((0, 100))))
        verification = verify_vhost(root)
        assert verification.damage == [], cut
        assert all("torn" in finding.why for finding in verification.findings)
    assert run("store", "verify", data).exit_code == 0


@pytest.mark.parametrize("filled", ["dirty"], indirect=True)
def test_the_torn_end_of_an_older_journal_file_is_harmless_and_a_flipped_bit_there_is_not(data):
    [root] = vhost_roots(str(data))
    path = max(Path(root, "journal").glob("*.wal"), key=lambda path: int(path.stem))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    # A start begins a file of its own; this one dies before a checkpoint, which would make the old file needless.
    VhostStore(str(data), settings=SMALL, background=False).abandon()
    assert len(list(Path(root, "journal").glob("*.wal"))) > 1
    verification = verify_vhost(root)
    assert verification.damage == []
    assert [finding.file for finding in verification.findings] == [str(path.relative_to(root))]
    path.write_bytes(whole[:-5] + b"?" + whole[-4:])
    [finding] = verify_vhost(root).damage
    assert finding.offset <= len(whole) - 5 < finding.offset + finding.length


@pytest.mark.parametrize("filled", ["dirty"], indirect=True)
def test_damage_inside_of_the_journal_is_not_taken_for_a_torn_end(data):
    [root] = vhost_roots(str(data))
    path = max(Path(root, "journal").glob("*.wal"), key=lambda path: int(path.stem))
    content = bytearray(path.read_bytes())
    content[64 + 40] ^= 1
    path.write_bytes(content)
    [finding] = verify_vhost(root).damage
    assert finding.offset <= 104 < finding.offset + finding.length


def test_a_stored_body_that_is_missing_is_found_by_who_refers_to_it(data):
    [root] = vhost_roots(str(data))
    store_file = min(Path(root, "msg_store_persistent").glob("*.rdq"), key=lambda path: int(path.name.split(".")[0]))
    store_file.unlink()
    damage = verify_vhost(root).damage
    missing = [finding for finding in damage if "is in no file of the message store" in finding.why]
    assert missing
    assert all(finding.queue == "orders" and finding.seq_id is not None for finding in missing)


def test_what_a_crash_leaves_is_harmless_and_shown(data):
    [root] = vhost_roots(str(data))
    Path(root, "msg_store_persistent", "999.0.rdq.part").write_bytes(b"half")
    Path(root, "queues", "0" * 24 + "-999").mkdir()
    hint = min(Path(root, "msg_store_persistent").glob("*.rdh"))
    hint.write_bytes(hint.read_bytes()[:70])
    result = run("store", "verify", data)
    assert result.exit_code == 0
    assert "999.0.rdq.part" in result.stdout
    assert "lost+found" in result.stdout
    assert hint.name in result.stdout


@pytest.mark.parametrize("damage", [b"", b"nonsense" * 100])
def test_damaged_metadata_are_found_and_the_rest_is_still_checked(data, damage):
    [root] = vhost_roots(str(data))
    Path(root, "meta.db").write_bytes(damage)
    Path(root, "meta.db-wal").unlink(missing_ok=True)
    verification = verify_vhost(root)
    if damage:
        assert "meta.db" in {finding.file for finding in verification.damage}
    assert verification.counts["slots"] > 100


def test_a_store_of_a_newer_warren_is_refused(data):
    [root] = vhost_roots(str(data))
    path = next(path for path in Path(root).rglob("*.qi"))
    header = bytearray(path.read_bytes())
    header[4] = 9
    header[60:64] = crc32c(bytes(header[:60])).to_bytes(4, "little")
    path.write_bytes(header)
    assert "format version 9" in said(run("store", "verify", data))


# ---- snapshot and restore ----


@pytest.mark.usefixtures("unchanged")
def test_a_snapshot_is_a_store_and_a_restored_one_too(data, tmp_path):
    result = run("store", "snapshot", data, tmp_path / "backup")
    assert result.exit_code == 0, result.output
    kept = contents(tmp_path / "backup")
    result = run("store", "restore", tmp_path / "backup", tmp_path / "restored")
    assert result.exit_code == 0, result.output
    assert contents(tmp_path / "backup") == kept
    shutil.copytree(data, tmp_path / "original")
    with (
        warren.open(tmp_path / "restored", settings=SMALL) as restored,
        warren.open(tmp_path / "original", settings=SMALL) as original,
    ):
        assert restored.queues() == original.queues()
        assert restored.info()["damage"] == []
        for name in original.queues():
            ours, theirs = (
                [(message.seq_id, message.body, message.properties) for message in store.queue(name).browse()]
                for store in (restored, original)
            )
            assert ours == theirs


def test_a_target_that_is_not_empty_is_refused_and_left_alone(data, tmp_path):
    (tmp_path / "target").mkdir()
    run("store", "snapshot", data, tmp_path / "target")
    before = contents(tmp_path / "target")
    assert before
    for command in ("snapshot", "restore"):
        assert "not an empty directory" in said(run("store", command, data, tmp_path / "target"))
    assert contents(tmp_path / "target") == before


def test_a_damaged_snapshot_is_not_restored_unless_asked_to(data, tmp_path):
    run("store", "snapshot", data, tmp_path / "backup")
    path = next(path for path in sorted((tmp_path / "backup").rglob("*.qs")) if path.stat().st_size > 200)
    content = bytearray(path.read_bytes())
    content[64 + 20] ^= 1
    path.write_bytes(content)
    message = said(run("store", "restore", tmp_path / "backup", tmp_path / "restored"))
    assert "is damaged in 1 places" in message
    assert "--no-verify" in message
    assert not (tmp_path / "restored").exists()
    assert not (tmp_path / "restored.part").exists()
    assert run("store", "restore", tmp_path / "backup", tmp_path / "restored", "--no-verify").exit_code == 0
    warren.open(tmp_path / "restored", settings=SMALL).close()
