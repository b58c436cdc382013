"""What a channel has done, by exchange and by queue: RabbitMQ's channel_exchange_stats and channel_queue_stats.

Counted once a batch. Confirms are counted for the exchange that they confirm, so runs of publishes to one exchange are kept
until they are confirmed; who publishes to one exchange keeps one run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class ExchangeCounts:
    """Messages that a channel published to one exchange."""

    publish: int = 0
    confirm: int = 0
    return_unroutable: int = 0


@dataclass(slots=True)
class QueueCounts:
    """Messages that a channel got from one queue."""

    deliver: int = 0
    deliver_no_ack: int = 0
    get: int = 0
    get_no_ack: int = 0
    ack: int = 0
    redeliver: int = 0


class ChannelStatistics:
    """
    >>> statistics = ChannelStatistics()
    >>> statistics.published("logs", 3, last=3)
    >>> statistics.confirmed(2)
    >>> statistics.info()["exchanges"]
    [{'exchange': 'logs', 'publish': 3, 'confirm': 2, 'return_unroutable': 0}]
    """

    __slots__ = ("_confirmed", "_runs", "exchanges", "queues")

    def __init__(self) -> None:
        self.exchanges: dict[str, ExchangeCounts] = {}
        self.queues: dict[str, QueueCounts] = {}
        self._runs: deque[tuple[int, str]] = deque()  # (number of the last publish, exchange), not confirmed yet
        self._confirmed = 0

    def exchange(self, name: str) -> ExchangeCounts:
        counts = self.exchanges.get(name)
        if counts is None:
            counts = self.exchanges[name] = ExchangeCounts()
        return counts

    def queue(self, name: str) -> QueueCounts:
        counts = self.queues.get(name)
        if counts is None:
            counts = self.queues[name] = QueueCounts()
        return counts

    def queue_gone(self, name: str) -> None:
        """As in RabbitMQ its counts go with it: the next one of that name is another queue."""
        self.queues.pop(name, None)

    def published(self, exchange: str, count: int, last: int | None = None) -> None:
        """`last` is the number of the last of them in confirm mode."""
        self.exchange(exchange).publish += count
        if last is not None:
            if self._runs and self._runs[-1][1] == exchange:
                self._runs[-1] = (last, exchange)
            else:
                self._runs.append((last, exchange))

    def confirmed(self, upto: int) -> None:
        """All publishes up to this number were confirmed, or refused."""
        while self._runs and self._confirmed < upto:
            last, exchange = self._runs[0]
            end = min(last, upto)
            self.exchange(exchange).confirm += end - self._confirmed
            self._confirmed = end
            if end == last:
                self._runs.popleft()

    def info(self) -> dict[str, Any]:
        return {
            "exchanges": [{"exchange": name, **asdict(counts)} for name, counts in self.exchanges.items()],
            "queues": [{"queue": name, **asdict(counts)} for name, counts in self.queues.items()],
        }
