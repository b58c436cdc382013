"""What can go wrong, as exceptions that name the value and the remedy."""

from __future__ import annotations


class WarrenError(Exception):
    """The base of every error that Warren raises on purpose."""


class StoreLockedError(WarrenError):
    """Another process owns the data directory."""


class StoreFormatError(WarrenError):
    """The directory is not a Warren store, or a newer Warren wrote it."""


class StorePathError(WarrenError):
    """The path cannot hold a store: it is a file, or the process may not write there."""


class StoreFailedError(WarrenError):
    """A write or sync of the store failed; what was not synced is unknown. Close it and open it again to recover."""


class StoreClosedError(WarrenError):
    """The store was closed."""


class DiskFullError(WarrenError):
    """The disk is full: publishing is refused, consuming goes on and frees room."""


class DurabilityError(WarrenError):
    """The durability asked for does not fit the directory."""


class InvalidArgumentError(WarrenError, TypeError, ValueError):
    """A value of a wrong type, or one that cannot be: a body that is not bytes, a header that AMQP cannot carry."""


class QueueArgumentError(WarrenError, ValueError):
    """An unknown queue argument, or one with a wrong type or value."""


class QueueMismatchError(WarrenError):
    """The queue exists with other properties."""


class QueueNotFoundError(WarrenError, KeyError):
    """There is no such queue."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class QueueFullError(WarrenError):
    """The queue is at its length limit and its overflow behaviour is reject-publish."""


class MessageTooLargeError(WarrenError, ValueError):
    """The message is over the limit."""


class MessageStateError(WarrenError):
    """The message was settled before, or does not belong to this queue."""
