"""One bad sector costs what lies in it, and nothing else."""

from __future__ import annotations

import errno

import pytest

from warren.storage.disk import Disk, DiskFile
from warren.storage.file_cache import FileCache
from warren.storage.reading import open_to_read, read_around, read_whole

CONTENT = bytes(range(256)) * 64  # 16 KiB


class BadFile:
    """A file with an unreadable sector: [5000, 5512); its first `stumbles` reads fail wherever they are."""

    def __init__(self, stumbles: int = 0, error: int = errno.EIO) -> None:
        self.stumbles = stumbles
        self.error = error
        self.size = len(CONTENT)

    def pread(self, count: int, offset: int) -> bytes:
        if self.stumbles:
            self.stumbles -= 1
            raise OSError(self.error, "stumble")
        if offset < 5512 and offset + count > 5000:
            raise OSError(errno.EIO, "bad sector")
        return CONTENT[offset : offset + count]

    def close(self) -> None:
        pass


def test_a_read_that_fails_once_is_done_again():
    assert read_around(BadFile(stumbles=1), 100, 50) == CONTENT[50:150]


def test_a_bad_sector_reads_as_zeros_and_everything_around_it_as_it_is():
    data = read_around(BadFile(), len(CONTENT), 0)
    assert len(data) == len(CONTENT)
    assert data[:4096] == CONTENT[:4096]
    assert data[4096:8192] == bytes(4096)
    assert data[8192:] == CONTENT[8192:]


def test_a_read_from_the_middle_past_the_end_is_as_short_as_it_would_be():
    assert read_around(BadFile(), 10_000, 5400) == bytes(8192 - 5400) + CONTENT[8192:15400]
    assert read_around(BadFile(), 100_000, 5400) == bytes(8192 - 5400) + CONTENT[8192:]


def test_other_errors_are_not_taken_for_damage():
    with pytest.raises(OSError, match="stumble"):
        read_around(BadFile(stumbles=1, error=errno.EMFILE), 100, 50)


class Stumbling(Disk):
    """Opening a file fails for a while."""

    def __init__(self, times: int, error: int) -> None:
        self.times = times
        self.error = error
        self.opened = 0

    def open_read(self, path: str) -> DiskFile:
        if self.times:
            self.times -= 1
            raise OSError(self.error, "stumble", path)
        self.opened += 1
        return super().open_read(path)


def test_a_file_that_cannot_be_opened_once_is_opened_again(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    path = str(tmp_path / "file")
    open_to_read(Stumbling(1, errno.EIO), path).close()
    assert read_whole(Stumbling(1, errno.EIO), path) == CONTENT
    with pytest.raises(OSError, match="stumble"):
        open_to_read(Stumbling(2, errno.EIO), path)
    with pytest.raises(FileNotFoundError):
        read_whole(Stumbling(0, 0), path + "x")


def test_a_cache_of_open_files_lets_go_of_them_when_the_process_has_no_more(tmp_path):
    paths = [str(tmp_path / name) for name in ("a", "b", "c")]
    for path in paths:
        with open(path, "wb") as file:
            file.write(CONTENT)
    disk = Stumbling(0, errno.EMFILE)
    cache = FileCache(disk)
    for path in paths[:2]:
        assert cache.read(path, 10, 0) == CONTENT[:10]
    disk.times = 1
    assert cache.read(paths[2], 10, 0) == CONTENT[:10]
    disk.opened = 0
    assert cache.read(paths[0], 10, 0) == CONTENT[:10]
    assert disk.opened == 1, "the first file was still open"
    cache.close()
