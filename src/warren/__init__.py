"""Warren: a RabbitMQ-compatible message broker whose queues are also Spark tables.

This module is the library face: durable queues in this process.

>>> import tempfile, warren
>>> with tempfile.TemporaryDirectory() as data, warren.open(data) as store:
...     queue = store.queue("orders")
...     _ = queue.publish(b"hello")
...     store.sync()
...     message = queue.get()
...     message.ack()
...     message.body
b'hello'
"""

from typing import Any

from warren import errors
from warren.errors import WarrenError
from warren.library import Snapshot, Store, Transaction, open
from warren.queueing.message import Message
from warren.queueing.queue import Queue

__version__ = "0.1.0"

__all__ = ["Message", "Queue", "Snapshot", "Store", "Transaction", "WarrenError", "errors", "open"]


def __getattr__(name: str) -> Any:
    """`warren.aio` is imported when it is first used: who has no loop does not pay for asyncio."""
    if name == "aio":
        import importlib

        return importlib.import_module("warren.aio")
    raise AttributeError(f"module 'warren' has no attribute {name!r}")
