"""A message as the user of the library sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warren.kernel.entry import Delivery
from warren.queueing.properties import decode_head, headers_of, properties_of

if TYPE_CHECKING:
    from warren.queueing.queue import Queue


class Message(Delivery):
    """A message that was handed out. It waits for `ack` or `nack`; if neither comes, it returns after a restart.

    >>> import tempfile, warren
    >>> with tempfile.TemporaryDirectory() as data, warren.open(data) as store:
    ...     queue = store.queue("orders")
    ...     _ = queue.publish(b"hello", headers={"k": "v"})
    ...     message = queue.get()
    ...     print(message.body, message.headers, message.redelivered)
    ...     message.ack()
    b'hello' {'k': 'v'} False
    """

    __slots__ = ()

    queue: Queue

    @property
    def body(self) -> bytes:
        body: bytes = self.entry.body
        return body

    @property
    def seq_id(self) -> int:
        """The place in its queue: given once, never reused, kept by a requeue."""
        return self.entry.seq

    @property
    def headers(self) -> dict[str, Any]:
        return headers_of(self.entry.head)

    @property
    def properties(self) -> dict[str, Any]:
        """All AMQP properties that were set, by their AMQP names."""
        return properties_of(self.entry.head)

    @property
    def exchange(self) -> str:
        return decode_head(self.entry.head).exchange

    @property
    def routing_key(self) -> str:
        return decode_head(self.entry.head).routing_key

    @property
    def published_at(self) -> float:
        """Seconds since the epoch."""
        return self.entry.published_at / 1e6

    @property
    def expires_at(self) -> float | None:
        """Seconds since the epoch, or None."""
        return self.entry.expiry / 1e6 if self.entry.expiry else None

    def ack(self) -> None:
        """Done with it. Raises MessageStateError when it was settled before."""
        self.queue.ack_many([self])

    def nack(self, requeue: bool = True) -> None:
        """Not done: back to its place in the queue, or dropped."""
        self.queue.nack_many([self], requeue=requeue)

    def __repr__(self) -> str:
        size = "on disk" if self.entry.body is None else f"{len(self.entry.body)} bytes"
        return f"<Message {self.seq_id} of {self.queue.name!r}, {size}{', redelivered' if self.redelivered else ''}>"
