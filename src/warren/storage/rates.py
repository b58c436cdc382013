"""The four rates of a queue, and what the memory monitor makes of them."""

from __future__ import annotations

import math

_HALF_LIFE = 5.0  # seconds
_UPDATE_AFTER = 100  # messages in and out
_UPDATE_SECONDS = 5.0


class Rates:
    """Messages per second in, out, and the same for pending acks, as moving averages with a half-life of 5 s."""

    __slots__ = ("_stamp", "ack_in", "ack_out", "acked", "entered", "in_rate", "left", "out_rate", "taken")

    def __init__(self, now: float) -> None:
        self._stamp = now
        self.in_rate = self.out_rate = self.ack_in = self.ack_out = 0.0
        self.entered = self.left = self.taken = self.acked = 0  # since the last update

    def update(self, now: float, force: bool = False) -> bool:
        """Recompute when there is enough to go by; whether it did."""
        elapsed = now - self._stamp
        if elapsed <= 0 or (not force and self.entered + self.left <= _UPDATE_AFTER and elapsed < _UPDATE_SECONDS):
            return False
        weight = math.exp(elapsed * math.log(0.5) / _HALF_LIFE)
        self.in_rate = self.entered / elapsed * (1 - weight) + self.in_rate * weight
        self.out_rate = self.left / elapsed * (1 - weight) + self.out_rate * weight
        self.ack_in = self.taken / elapsed * (1 - weight) + self.ack_in * weight
        self.ack_out = self.acked / elapsed * (1 - weight) + self.ack_out * weight
        self.entered = self.left = self.taken = self.acked = 0
        self._stamp = now
        return True

    @property
    def total(self) -> float:
        return self.in_rate + self.out_rate + self.ack_in + self.ack_out


class MemoryMonitor:
    """Hands out one duration to all queues of a vhost: how many seconds of their traffic they may keep in RAM.

    Infinite while the vhost's message bytes in RAM are below half of the cap.

    Queues ask whenever their rates change, so the mean is kept up to date by differences: adding up what ten thousand of
    them report, for each of them, was a third of the time that they took.
    """

    __slots__ = ("_durations", "_total", "cap", "duration", "ram_bytes")

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.ram_bytes = 0
        self.duration = math.inf
        self._durations: dict[int, float] = {}  # by the queue's identity; only finite ones
        self._total = 0.0  # of the durations

    def report(self, queue: int, duration: float) -> None:
        if math.isinf(duration):
            self._drop(queue)
            return
        self._total += duration - self._durations.get(queue, 0.0)
        self._durations[queue] = duration

    def forget(self, queue: int, ram_bytes: int) -> None:
        self._drop(queue)
        self.ram_bytes -= ram_bytes

    def _drop(self, queue: int) -> None:
        self._total -= self._durations.pop(queue, 0.0)
        if not self._durations:
            self._total = 0.0  # what rounding left

    def update(self) -> float:
        """Recompute the duration: the mean of what the queues report, shortened as memory fills."""
        ratio = self.ram_bytes / self.cap if self.cap else 0.0
        if ratio < 0.5:
            self.duration = math.inf
        elif not self._durations:
            self.duration = 0.0
        else:
            total = max(0.0, self._total)
            if ratio < 0.95:
                total += 1.0
            self.duration = total / len(self._durations) / ratio
        return self.duration
