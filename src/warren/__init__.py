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

import importlib
from typing import TYPE_CHECKING, Any

from warren import errors
from warren.errors import WarrenError

if TYPE_CHECKING:
    from warren.library import Snapshot, Store, Transaction, open
    from warren.queueing.message import Message
    from warren.queueing.queue import Queue

__version__ = "0.1.0"

__all__ = ["Message", "Queue", "Snapshot", "Store", "Transaction", "WarrenError", "errors", "open"]

_HOME = {
    "Message": "warren.queueing.message",
    "Queue": "warren.queueing.queue",
    "Snapshot": "warren.library",
    "Store": "warren.library",
    "Transaction": "warren.library",
    "open": "warren.library",
}


def __getattr__(name: str) -> Any:
    """The engine is imported when it is first used: processes of Spark, which only read files, do without. So is
    `warren.aio`: who has no loop does not pay for asyncio."""
    if name == "aio":
        return importlib.import_module("warren.aio")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'warren' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "aio"})
