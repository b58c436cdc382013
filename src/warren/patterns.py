"""Regular expressions of users, which are matched where others wait: only those that cannot take for ever.

Python's matcher goes back and tries again; an expression that can match one text in many ways may need more time than there
is. So what is allowed is what people write for names of queues: text, classes, dots, groups of alternatives, and a few
repetitions, none of them around another repetition or around alternatives.
"""

from __future__ import annotations

import re
from re import _parser  # type: ignore[attr-defined]  # what a pattern is made of: there is no other way to see it
from typing import Any

MOST_CHARACTERS = 1000
MOST_REPETITIONS = 4
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def name_pattern(pattern: str) -> re.Pattern[str]:
    """Compile it. Raises ValueError, which says what is wrong with it.

    >>> name_pattern("(eu|us)[.][a-z]+.*").fullmatch("eu.paid") is not None
    True
    >>> name_pattern("(a+)+b")
    Traceback (most recent call last):
    ValueError: '(a+)+b' repeats a group that has repetitions or alternatives in it, which may take for ever; write it simpler
    """
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(pattern)} characters; it has at most {MOST_CHARACTERS}")
    try:
        made = re.compile(pattern)
        repetitions = _count(_parser.parse(pattern), within=False, pattern=pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    if repetitions > MOST_REPETITIONS:
        raise ValueError(f"{pattern!r} has {repetitions} repetitions; it has at most {MOST_REPETITIONS}")
    return made


def _count(parsed: Any, within: bool, pattern: str) -> int:
    """How many repetitions there are."""
    total = 0
    for operation, argument in parsed:
        name = str(operation)
        repeats = name in _REPEATS and argument[1] > 1
        if within and (repeats or name in ("BRANCH", "GROUPREF", "GROUPREF_EXISTS")):
            raise ValueError(
                f"{pattern!r} repeats a group that has repetitions or alternatives in it, which may take for ever; write "
                "it simpler"
            )
        total += repeats
        for inner in _inner(name, argument):
            total += _count(inner, within or repeats, pattern)
    return total


def _inner(name: str, argument: Any) -> list[Any]:
    """The expressions in an operation."""
    if name in _REPEATS:
        return [argument[2]]
    if name == "SUBPATTERN":
        return [argument[3]]
    if name == "BRANCH":
        return list(argument[1])
    if name in ("ASSERT", "ASSERT_NOT"):
        return [argument[1]]
    if name == "ATOMIC_GROUP":
        return [argument]
    return []
