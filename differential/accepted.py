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


ACCEPTED: list[Accepted] = []


def explain(program: list[Step], ours: Seen, theirs: Seen) -> str | None:
    """The name of the rule that accepts this difference, or None."""
    for rule in ACCEPTED:
        if rule.explains(program, ours, theirs):
            return rule.name
    return None
