"""When a checkpoint is due, and which queues it gives segments.

A file for a few hundred bytes is a poor bargain, so a checkpoint repeats what small queues have left in the newest journal
file (it carries it). Two things keep that from becoming the same work for ever:

1. The more of the sealed files would be carried, the more of them wait, and go at once: there is more time to consume
   what they hold, and a queue that gets a segment gets it for more.
2. At most a quarter of what the files hold is carried; the smallest queues first.
"""

from __future__ import annotations

from warren.storage.queue_index import QueueIndex
from warren.storage.settings import EngineSettings

Sizes = list[tuple[int, QueueIndex]]  # journal bytes that each queue still needs of some files


_LEAST_BYTES = 16  # of a record


class CheckpointPace:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.lag = 0  # sealed files that wait for more of them

    def due(self, sealed: int) -> int:
        """How many of the sealed files the next run takes; 0: it is not time yet."""
        if sealed <= self.lag:
            return 0
        return self.lag + 1

    def wait(self, sizes: Sizes, files: int) -> bool:
        """Rather wait for more files? Also adapts to what it sees."""
        settings = self._settings
        size = files * settings.journal_file_bytes
        carried = sum(size for size, _ in sizes if size < settings.carry_below)
        if carried * 2 > size and self.lag < settings.journal_files_behind:
            self.lag += 1
            return True
        if carried * 8 < size and self.lag:
            self.lag -= 1
        return False

    def divide(self, sizes: Sizes, files: int) -> tuple[list[QueueIndex], list[QueueIndex]]:
        """Queues that get segments, and queues that are carried: what fits in a quarter of a file, by bytes and by records.
        If it filled one, that would be sealed and due, too, and there would be no end."""
        settings = self._settings
        room = files * min(settings.journal_file_bytes, settings.journal_file_records * _LEAST_BYTES) // 4
        movers: list[QueueIndex] = []
        small: list[QueueIndex] = []
        for size, index in sorted(sizes, key=lambda pair: pair[0]):
            room -= size
            (small if size < self._settings.carry_below and room >= 0 else movers).append(index)
        return movers, small


def divide_at(sizes: Sizes, carry_below: int) -> tuple[list[QueueIndex], list[QueueIndex]]:
    """As `divide`, by size alone."""
    return (
        [index for size, index in sizes if size >= carry_below],
        [index for size, index in sizes if size < carry_below],
    )
