"""An error inside of a queue is the queue's alone: it is restarted, and who asked it for something learns of that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from warren.errors import WarrenError

if TYPE_CHECKING:
    from warren.queueing.queue_process import QueueProcess

F = TypeVar("F", bound=Callable[..., Any])


class QueueCrashed(Exception):
    """The queue failed and was restarted; what was asked of it was not done."""


def guarded(function: F) -> F:
    """For methods of a queue: what they raise, but for errors of the disk, restarts the queue and becomes QueueCrashed."""

    @functools.wraps(function)
    def call(self: QueueProcess, *arguments: Any) -> Any:
        try:
            return function(self, *arguments)
        except (WarrenError, QueueCrashed):  # the disk's, or told already
            raise
        except Exception as error:
            self._owner.queue_crashed(self, error)
            raise QueueCrashed(self.name) from error

    return cast(F, call)
