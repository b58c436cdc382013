"""The arguments of a queue: what `queue.declare` may carry in its table, checked once and given names and types.

Rules:

1. An argument that Warren does not know is refused, with the one that was probably meant. RabbitMQ lets it pass; a
   queue with `x-max-lenght` has no limit there, and nobody learns of it before the disk is full.
2. Arguments of RabbitMQ that say how it keeps a queue, and not what the queue does, are checked and have no effect.
3. Arguments without `x-` belong to the client, except where one is plainly an `x-` argument without its `x-`.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, NoReturn

from warren.errors import QueueArgumentError

Overflow = Literal["drop-head", "reject-publish", "reject-publish-dlx"]
BackingQueueKind = Literal["variable", "volatile", "sqlite"]

MAX_DURATION_MS = 315_360_000_000  # 10 years of 365 days, RabbitMQ's limit
MAX_PRIORITY_LEVEL = 255
_MAX_COUNT = 2**63 - 1  # AMQP's widest integer
_MAX_SHORT_STRING_BYTES = 255


class ArgumentDifference(NamedTuple):
    """One argument in which two queues differ; None stands for not given."""

    argument: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        ours = f"{self.argument} unset" if self.ours is None else f"{self.argument}={self.ours!r}"
        return f"{ours}, not {'unset' if self.theirs is None else repr(self.theirs)}"


@dataclass(frozen=True, slots=True)
class QueueArguments:
    """What the arguments of a queue ask for. None: no such limit or behaviour.

    >>> arguments = QueueArguments.parse({"x-max-length": 1000, "x-overflow": "reject-publish"})
    >>> arguments.max_length, arguments.overflow, arguments.message_ttl_ms
    (1000, 'reject-publish', None)
    >>> QueueArguments.parse({"x-max-lenght": 1000})
    Traceback (most recent call last):
    warren.errors.QueueArgumentError: unknown queue argument x-max-lenght=1000; did you mean x-max-length?
    """

    max_priority: int | None = None  # x-max-priority, to 255; 0 asks for none
    message_ttl_ms: int | None = None  # x-message-ttl; 0 expires what no consumer takes at once
    expires_ms: int | None = None  # x-expires: the queue goes after that long without use
    max_length: int | None = None  # x-max-length, in ready messages
    max_length_bytes: int | None = None  # x-max-length-bytes, of ready bodies
    overflow: Overflow = "drop-head"  # x-overflow: what happens at the limits
    dead_letter_exchange: str | None = None  # x-dead-letter-exchange; "" is the default exchange
    dead_letter_routing_key: str | None = None  # x-dead-letter-routing-key, in place of the message's own
    delivery_limit: int | None = None  # x-delivery-limit, of returns to the queue
    single_active_consumer: bool = False  # x-single-active-consumer
    backing_queue: BackingQueueKind = "variable"  # x-backing-queue: how the queue is kept

    @classmethod
    def parse(cls, arguments: Mapping[str, object] | None) -> QueueArguments:
        """Check a table of arguments. Raises QueueArgumentError with the argument, its value and what is allowed."""
        values: dict[str, object] = {}
        if arguments is not None and not isinstance(arguments, Mapping):
            raise QueueArgumentError(
                f"arguments are {arguments!r:.80}, a {type(arguments).__name__}; they are a dict of names and values"
            )
        for name, value in (arguments or {}).items():
            check = _CHECKS.get(name)
            if check is None:
                _check_unknown(name, value)
                continue
            check(name, value)
            field = _FIELD_OF.get(name)
            if field is not None:
                values[field] = value
        if "dead_letter_routing_key" in values and "dead_letter_exchange" not in values:
            raise QueueArgumentError(
                f"x-dead-letter-routing-key={values['dead_letter_routing_key']!r} has no effect without "
                f"x-dead-letter-exchange; give both, or none"
            )
        return _shared(cls(**values))  # type: ignore[arg-type]  # the checks above are what mypy cannot see

    def differences(self, other: QueueArguments) -> list[ArgumentDifference]:
        """Every argument in which `other` asks for something else."""
        return [
            ArgumentDifference(argument, ours, theirs)
            for argument, field in _FIELD_OF.items()
            if (ours := getattr(self, field)) != (theirs := getattr(other, field))
        ]

    def same_as(self, other: QueueArguments) -> str | None:
        """None when a queue with our arguments is what `other` asks for, else what it is and is not: the end of a
        sentence that begins with "queue 'orders' is declared with".

        >>> QueueArguments(max_length=10).same_as(QueueArguments(max_length=20))
        'x-max-length=10, not 20'
        >>> QueueArguments().same_as(QueueArguments.parse({"x-expires": 5000}))
        'x-expires unset, not 5000'
        >>> QueueArguments().same_as(QueueArguments.parse({"x-overflow": "drop-head"})) is None
        True
        """
        return "; ".join(map(str, self.differences(other))) or None


def known_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """Those that mean something here. Over the network RabbitMQ's rule holds: what nobody knows is no error."""
    return {name: value for name, value in arguments.items() if name in _CHECKS}


@functools.lru_cache(maxsize=1024)
def _shared(arguments: QueueArguments) -> QueueArguments:
    """The same object for the same arguments: thousands of queues are declared with the same few."""
    return arguments


# ---- checks, one for each kind of value ----

_Check = Callable[[str, object], None]


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise QueueArgumentError(f"queue argument {name}={value!r} is not possible; {name} is {allowed}")


def _integer(low: int, high: int, unit: str = "") -> _Check:
    span = f"of {low} or more" if high == _MAX_COUNT else f"from {low} to {high}"

    def check(name: str, value: object) -> None:
        # bool is an int to Python, and none to AMQP.
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            _refuse(name, value, f"an integer {span}{unit}")

    return check


def _one_of(*allowed: str | int) -> _Check:
    def check(name: str, value: object) -> None:
        if isinstance(value, bool | float) or value not in allowed:
            _refuse(name, value, " or ".join(map(repr, allowed)))

    return check


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")


def _short_string(name: str, value: object) -> None:
    if not isinstance(value, str):
        _refuse(name, value, "text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        _refuse(name, value, "text, and this has characters that UTF-8 cannot carry")
    if size > _MAX_SHORT_STRING_BYTES:
        _refuse(name, value, f"text of at most {_MAX_SHORT_STRING_BYTES} bytes, and this has {size}")


def _queue_type(name: str, value: object) -> None:
    if value == "stream":
        _refuse(
            name,
            value,
            "'classic' or 'quorum'. In place of a stream take a durable queue: Spark reads it without consuming",
        )
    _one_of("classic", "quorum")(name, value)


_COUNT = _integer(0, _MAX_COUNT)

_CHECKS: dict[str, _Check] = {
    "x-max-priority": _integer(0, MAX_PRIORITY_LEVEL),
    "x-message-ttl": _integer(0, MAX_DURATION_MS, " milliseconds"),
    "x-expires": _integer(1, MAX_DURATION_MS, " milliseconds"),
    "x-max-length": _COUNT,
    "x-max-length-bytes": _COUNT,
    "x-overflow": _one_of("drop-head", "reject-publish", "reject-publish-dlx"),
    "x-dead-letter-exchange": _short_string,
    "x-dead-letter-routing-key": _short_string,
    "x-delivery-limit": _COUNT,
    "x-single-active-consumer": _boolean,
    "x-backing-queue": _one_of("variable", "volatile", "sqlite"),
    # From here on: no effect. A quorum queue of one node promises what every durable queue does here.
    "x-queue-type": _queue_type,
    "x-queue-version": _one_of(1, 2),
    "x-queue-mode": _one_of("default", "lazy"),
    "x-queue-master-locator": _short_string,
    "x-queue-leader-locator": _short_string,
}


def _field_names() -> dict[str, str]:
    """By argument: x-message-ttl is message_ttl_ms, x-max-length is max_length."""
    by_argument = {
        "x-" + field.name.removesuffix("_ms").replace("_", "-"): field.name for field in fields(QueueArguments)
    }
    assert by_argument.keys() <= _CHECKS.keys()
    return by_argument


_FIELD_OF = _field_names()


def _check_unknown(name: object, value: object) -> None:
    if not isinstance(name, str):
        raise QueueArgumentError(f"queue argument {name!r} has a {type(name).__name__} for a name; it is text")
    if not name.startswith("x-"):
        with_prefix = "x-" + name.lower().replace("_", "-").removeprefix("x-")
        if with_prefix not in _CHECKS:
            return
        near = [with_prefix]
    else:
        near = difflib.get_close_matches(name, _CHECKS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_CHECKS)}"
    raise QueueArgumentError(f"unknown queue argument {name}={value!r}; {hint}")
