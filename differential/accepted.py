"""Where Warren and the RabbitMQ it is compared with may differ, each with its reason.

A difference that is not here is a fault of one of the two, and most likely ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from differential.programs import Step

# Headers that only one of the two sets: left out before messages are compared.
IGNORED_HEADERS = {
    "x-last-death-reason": "RabbitMQ sets it since 3.13, Debian's is 3.10",
    "x-last-death-queue": "RabbitMQ sets it since 3.13, Debian's is 3.10",
    "x-last-death-exchange": "RabbitMQ sets it since 3.13, Debian's is 3.10",
}

Seen = dict[str, Any]  # what a step led to, by place: see compare.Observation


class Accepted(NamedTuple):
    name: str
    reason: str
    # Does this rule explain the difference? It gets the program up to and with the step, and both observations.
    explains: Callable[[list[Step], Seen, Seen], bool]


def _answers(seen: Seen) -> list[tuple[Any, ...]]:
    return [answer for place, answers in seen.items() if place.endswith(": answers") for answer in answers]


def _closes(seen: Seen) -> list[int]:
    """Reply codes of what a broker closed."""
    return [answer[1]["reply_code"] for answer in _answers(seen) if answer[0] in ("channel.close", "connection.close")]


def _flow(program: list[Step], ours: Seen, theirs: Seen) -> bool:
    step = program[-1]
    return step.method == "channel.flow" and not step.arguments.get("active") and _closes(theirs) == [540]


def _delivery_mode(program: list[Step], ours: Seen, theirs: Seen) -> bool:
    properties = program[-1].properties or {}
    return properties.get("delivery_mode", 1) not in (1, 2) and _closes(theirs) == [406] and not _closes(ours)


def _cancel_ok(program: list[Step], ours: Seen, theirs: Seen) -> bool:
    return program[-1].method == "basic.cancel-ok" and _closes(theirs) == [503] and not _closes(ours)


def _queue_mode(program: list[Step], ours: Seen, theirs: Seen) -> bool:
    step = program[-1]
    used = any("x-queue-mode" in step.arguments.get("arguments", {}) for step in program)
    return used and step.method == "queue.declare" and _closes(theirs) == [406]


def _global_prefetch(program: list[Step], ours: Seen, theirs: Seen) -> bool:
    limited = any(step.method == "basic.qos" and step.arguments.get("global_") for step in program)
    consumers = sum(step.method == "basic.consume" for step in program)
    return limited and consumers > 1 and _answers(ours) == _answers(theirs)


def _unknown_method(program: list[Step], ours: Seen, theirs: Seen) -> bool:
    lost = any(answer[0] == "lost" for answer in _answers(theirs))
    return program[-1].method in ("raw", "frame") and lost and bool(_closes(ours))


def _overtaken(program: list[Step], ours: Seen, theirs: Seen) -> bool:
    dead = any("x-dead-letter-exchange" in step.arguments.get("arguments", {}) for step in program)
    several = any(
        step.method == "basic.publish"
        and (step.arguments.get("exchange") or "CC" in ((step.properties or {}).get("headers") or {}))
        for step in program
    )
    counts = [{place: what for place, what in seen.items() if place.startswith("queue ")} for seen in (ours, theirs)]
    return dead and several and counts[0] == counts[1] and _closes(ours) == _closes(theirs)


def _close_ok(program: list[Step], ours: Seen, theirs: Seen) -> bool:
    return program[-1].method == "channel.close-ok" and _closes(ours) == [503] and _closes(theirs) == [504]


def _order_of_deaths(program: list[Step], ours: Seen, theirs: Seen) -> bool:
    return _deaths_sorted(ours) == _deaths_sorted(theirs)


def _deaths_sorted(value: Any) -> Any:
    """With all deaths of a message but the latest in one order for both."""
    if isinstance(value, dict):
        plain = {name: _deaths_sorted(inner) for name, inner in value.items()}
        deaths = plain.get("x-death")
        if isinstance(deaths, list) and len(deaths) > 2:
            plain["x-death"] = [deaths[0], *sorted(deaths[1:], key=_shown_death)]
        return plain
    if isinstance(value, (list, tuple)):
        return [_deaths_sorted(inner) for inner in value]
    return value


def _shown_death(death: Any) -> str:
    return repr(sorted(death.items())) if isinstance(death, dict) else repr(death)


ACCEPTED: list[Accepted] = [
    Accepted(
        "channel.close-ok that nobody asked for",
        "RabbitMQ forgets the channel and refuses the method at once, in two processes: 503 or, for the next method, 504",
        _close_ok,
    ),
    Accepted(
        "the order of older deaths",
        "the latest is first in both; RabbitMQ 3.10 turns the order of the others around with every death, since 3.13 they "
        "are latest first, as in Warren",
        _order_of_deaths,
    ),
    Accepted(
        "a dead letter and another copy of its message",
        "when both go to one queue, which of them is first is promised nowhere: RabbitMQ's queues are processes",
        _overtaken,
    ),
    Accepted(
        "a method that there is not is answered",
        "RabbitMQ fails to decode it and ends the connection without a word, Warren says 503",
        _unknown_method,
    ),
    Accepted(
        "who goes first under a prefetch of the channel",
        "when it has room again RabbitMQ begins with a queue by chance, Warren with the oldest consumer",
        _global_prefetch,
    ),
    Accepted(
        "x-queue-mode is not compared",
        "it says how RabbitMQ before 3.12 keeps a queue; later ones and Warren ignore it",
        _queue_mode,
    ),
    Accepted(
        "channel.flow stops deliveries",
        "AMQP has it, RabbitMQ answers 540; who asks a broker to wait is better off when it does",
        _flow,
    ),
    Accepted(
        "an unknown delivery mode is transient",
        "RabbitMQ 3.10 refuses it with 406, since 3.13 everything but 2 is transient, as in Warren",
        _delivery_mode,
    ),
    Accepted(
        "basic.cancel-ok is taken",
        "RabbitMQ closes the connection of a client that answers its basic.cancel; AMQP wants that answer",
        _cancel_ok,
    ),
]


def explain(program: list[Step], ours: Seen, theirs: Seen) -> str | None:
    """The name of the rule that accepts this difference, or None."""
    for rule in ACCEPTED:
        if rule.explains(program, ours, theirs):
            return rule.name
    return None
