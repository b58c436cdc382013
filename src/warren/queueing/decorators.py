"""Queue decorators: code that is told what happens to queues, without being part of them.

RabbitMQ's hooks (rabbit_queue_decorator), which its federation plugin and others live on:

    active_for               does it care for this queue? Asked when the queue starts and when its policy changes
    startup                  the queue is there; also after it was restarted, as a new one
    shutdown                 it is gone, is restarted, or the decorator does not care any more
    policy_changed           its arguments are others than before
    consumer_state_changed   the highest priority that a message would go to now is another one, or there is nobody to take
                             one; or the queue has become empty, or is not any more

Rules:

1. The hooks of a queue are called on its vhost's loop, one after the other, and must not wait. They are called when the
   queue has done its work, never in the middle: a hook may ask the queue, it may not change it.
2. `consumer_state_changed` is called once for a change, not once for a message: a queue that is emptied and filled within
   one batch has not changed.
3. A decorator that raises is logged and taken off that queue. The queue goes on.

Which ones there are says the key `queue_decorators`: names of those below, or `module:Class` of one's own.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from warren.errors import WarrenError
from warren.queueing.arguments import QueueArguments

log = logging.getLogger("warren.queueing")


class DecoratorError(WarrenError):
    """A decorator that is configured and cannot be had."""


class DecoratedQueue(Protocol):
    """What a decorator sees of a queue."""

    name: str
    arguments: QueueArguments

    def __len__(self) -> int: ...


class QueueDecorator:
    """The hooks; each does nothing, so that a decorator has only those that it needs. Made without arguments, one for a
    vhost."""

    def active_for(self, queue: DecoratedQueue) -> bool:
        return True

    def startup(self, queue: DecoratedQueue) -> None: ...

    def shutdown(self, queue: DecoratedQueue) -> None: ...

    def policy_changed(self, queue: DecoratedQueue, old: QueueArguments, new: QueueArguments) -> None: ...

    def consumer_state_changed(self, queue: DecoratedQueue, max_active_priority: int | None, is_empty: bool) -> None:
        """None: no consumer can take a message now."""

    def info(self, queue: DecoratedQueue) -> dict[str, Any]:
        """What it adds to the queue's own information."""
        return {}


class Decorations:
    """The decorators of one queue. What it tells them is in the rules above."""

    __slots__ = ("_active", "_known", "_queue", "_told")

    def __init__(self, queue: DecoratedQueue, known: tuple[QueueDecorator, ...]) -> None:
        self._queue = queue
        self._known = known
        self._active: tuple[QueueDecorator, ...] = ()
        self._told: tuple[int | None, bool] | None = None

    def start(self) -> None:
        """The queue is complete."""
        self._choose()

    def _choose(self) -> None:
        """Those that care now; who cares no more, or only now, is told."""
        before = self._active
        now = tuple(one for one in self._known if self._call(one, "active_for"))
        self._active = self._known if now == self._known else now  # ten thousand queues share one tuple
        for one in before:
            if one not in now:
                self._call(one, "shutdown")
        for one in now:
            if one not in before:
                self._call(one, "startup")

    def policy_changed(self, old: QueueArguments, new: QueueArguments) -> None:
        before = self._active
        self._choose()
        for one in self._active:
            if one in before:
                self._call(one, "policy_changed", old, new)

    def consumer_state(self, max_active_priority: int | None, is_empty: bool) -> None:
        """It may be as it was: then nobody is told."""
        state = (max_active_priority, is_empty)
        if state != self._told and self._active:
            self._told = state
            for one in self._active:
                self._call(one, "consumer_state_changed", *state)

    def shut_down(self) -> None:
        """The queue is gone."""
        self._known = ()
        self._choose()

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in self._active:
            found |= self._call(one, "info") or {}
        return found

    def _call(self, decorator: QueueDecorator, hook: str, *arguments: Any) -> Any:
        try:
            return getattr(decorator, hook)(self._queue, *arguments)
        except Exception:
            name = type(decorator).__name__
            log.exception("decorator %s failed in %s and is taken off queue %r", name, hook, self._queue.name)
            self._known = tuple(one for one in self._known if one is not decorator)
            self._active = tuple(one for one in self._active if one is not decorator)
            return None


# ---- those that come with Warren ----

_HALF_LIFE_SECONDS = 5.0


class _Use:
    __slots__ = ("average", "is_active", "since")

    def __init__(self, since: float) -> None:
        self.average = 1.0
        self.is_active = True
        self.since = since


class ConsumerCapacity(QueueDecorator):
    """RabbitMQ's `consumer_capacity`: in which part of the time, of late, a message would have found a consumer at once.
    Below 1, more consumers, a larger prefetch or faster ones would help.

    >>> now = 0.0
    >>> capacity = ConsumerCapacity(clock=lambda: now)
    >>> queue = type("Queue", (), {"name": "orders"})()
    >>> capacity.consumer_state_changed(queue, 0, True)       # a consumer, and nothing to do
    >>> now = 5.0
    >>> capacity.consumer_state_changed(queue, None, False)   # its prefetch is used up
    >>> now = 10.0
    >>> capacity.info(queue)
    {'consumer_capacity': 0.5}
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[DecoratedQueue, _Use] = {}  # of queues that have had a consumer

    def shutdown(self, queue: DecoratedQueue) -> None:
        self._uses.pop(queue, None)

    def consumer_state_changed(self, queue: DecoratedQueue, max_active_priority: int | None, is_empty: bool) -> None:
        is_active = max_active_priority is not None
        use = self._uses.get(queue)
        if use is None:
            if is_active:
                self._uses[queue] = _Use(self._clock())
        elif is_active != use.is_active:
            now = self._clock()
            use.average, use.since, use.is_active = self._average(use, now), now, is_active

    def info(self, queue: DecoratedQueue) -> dict[str, Any]:
        use = self._uses.get(queue)
        return {"consumer_capacity": 0.0 if use is None else round(self._average(use, self._clock()), 3)}

    @staticmethod
    def _average(use: _Use, now: float) -> float:
        """Of all the time until now; what was half a life ago counts half."""
        kept = float(0.5 ** ((now - use.since) / _HALF_LIFE_SECONDS))
        return use.average * kept + (1.0 - kept if use.is_active else 0.0)


BUILT_IN: dict[str, type[QueueDecorator]] = {"consumer_capacity": ConsumerCapacity}


def load_decorators(names: Sequence[str]) -> tuple[QueueDecorator, ...]:
    """One of each. Raises DecoratorError.

    >>> load_decorators(["consumer_capactiy"])
    Traceback (most recent call last):
    warren.queueing.decorators.DecoratorError: queue_decorators: there is no 'consumer_capactiy'; there is \
consumer_capacity, and your own are written module:Class
    """
    return tuple(_load(name)() for name in names)


def _load(name: str) -> type[QueueDecorator]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(sorted(BUILT_IN))
        raise DecoratorError(
            f"queue_decorators: there is no {name!r}; there is {known}, and your own are written module:Class"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DecoratorError(f"queue_decorators: {name!r} cannot be had: {error}") from None
    if not isinstance(found, type) or not issubclass(found, QueueDecorator):
        raise DecoratorError(f"queue_decorators: {name!r} is no class that inherits from {QueueDecorator.__qualname__}")
    return found
