"""Regular expressions of users, which are matched where others wait: only those that cannot take for ever.

Python's matcher goes back and tries again; an expression that can match one text in many ways may need more time than there
is. So the ways are counted before the expression is used, for the worst name that there could be: one of 255 characters, each
of which is whatever the expression wants. `_Steps` walks through the expression with the number of ways in which the matcher
may arrive at each place of that name; their sum is the number of its steps, and may not be above `MOST_STEPS`.

1. What matches several lengths (`?`, `*`, `{2,9}`) arrives at several places; alternatives add their ways up. Both multiply
   what follows them, so that `a?a?a?` has eight ways, and three `.*` have millions.
2. A repetition which the next character ends, because it cannot be one of those repeated (`[^.]*[.]`, `[a-z]+-`), has one
   way: where it gives back a character, the matcher is not let through. People write names like that, so it is worth a rule.
3. Where a rule is unsure, it counts too much.
"""

from __future__ import annotations

import re
from itertools import accumulate
from re import _parser  # type: ignore[attr-defined]  # what a pattern is made of: there is no other way to see it
from typing import Any

MOST_CHARACTERS = 1000
LONGEST_NAME = 255
MOST_STEPS = 1_000_000  # some milliseconds
_COUNTING_STEPS = 300  # what it takes to count those of one part: `(((a{9}){9}){9}){9}` has few parts, which are many

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_CHARACTERS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")  # match one


def name_pattern(pattern: str) -> re.Pattern[str]:
    """Compile it, for `fullmatch` on a name. Raises ValueError, which says what is wrong with it.

    >>> name_pattern("(eu|us)[.][a-z]+.*").fullmatch("eu.paid") is not None
    True
    >>> name_pattern("(a+)+b")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: '(a+)+b' can match a name in so many ways that it may take for ever; write it simpler: with at most two ...
    """
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(pattern)} characters; it has at most {MOST_CHARACTERS}")
    try:
        made = re.compile(pattern)
        _Steps().walk(_parser.parse(pattern), [1] + [0] * LONGEST_NAME)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    except _TooManyError:
        raise ValueError(
            f"{pattern!r} can match a name in so many ways that it may take for ever; write it simpler: with at most two "
            "repetitions such as .*, or with such as end at the next character, as [^.]*[.] does; with few parts that may "
            "be missing, and no repetition around others or around alternatives"
        ) from None
    return made


class _TooManyError(Exception):
    """It may need more than MOST_STEPS."""


class _Steps:
    """Counts them. Ways are by place: how often the matcher may arrive there, before each of the characters and at the end.

    Ways that are taken for too early are on the safe side: there is more to match from there on."""

    def __init__(self) -> None:
        self.count = 0

    def walk(self, parsed: Any, ways: list[int]) -> list[int]:
        """The ways in which an expression is left."""
        parts = list(parsed)
        for number, (operation, argument) in enumerate(parts):
            self._add(sum(ways))
            follower = parts[number + 1] if number + 1 < len(parts) else None
            ways = self._part(str(operation), argument, follower, ways)
        self._add(sum(ways))
        return ways

    def _add(self, steps: int) -> None:
        self.count += steps + _COUNTING_STEPS
        if self.count > MOST_STEPS:
            raise _TooManyError

    def _part(self, name: str, argument: Any, follower: Any, ways: list[int]) -> list[int]:
        if name in _CHARACTERS:
            return _later(ways, 1)
        if name in _REPEATS:
            least, most, repeated = argument
            if len(repeated) == 1 and str(repeated[0][0]) in _CHARACTERS:
                return self._repeat_one(int(least), int(most), repeated[0], follower, ways)
            return self._repeat(int(least), int(most), repeated, ways)
        if name == "SUBPATTERN":
            return self.walk(argument[3], ways)
        if name == "ATOMIC_GROUP":
            return self.walk(argument, ways)
        if name == "BRANCH":
            return _sum([self.walk(inner, ways) for inner in argument[1]])
        if name == "GROUPREF_EXISTS":
            return _sum([ways if inner is None else self.walk(inner, ways) for inner in argument[1:]])
        if name in ("ASSERT", "ASSERT_NOT"):
            # It may look back, to any place; and what it looked at, it does not look at in another way.
            self.walk(argument[1], [sum(ways)] + [0] * LONGEST_NAME)
            return ways
        if name == "GROUPREF":
            return list(accumulate(ways))  # as long as the group was
        if name in ("AT", "FAILURE"):
            return ways
        raise _TooManyError  # of a later Python: nothing is known of it

    def _repeat_one(self, least: int, most: int, repeated: Any, follower: Any, ways: list[int]) -> list[int]:
        """Of one character, which the matcher does in one go: it looks at all that are there, then gives back."""
        self._add(sum(number * min(most, LONGEST_NAME - place) for place, number in enumerate(ways)))
        if follower is not None and str(follower[0]) == "LITERAL" and not _may_be(repeated, chr(follower[1])):
            self._add(sum(ways) * LONGEST_NAME)
            return _later(ways, least)  # rule 2
        totals = list(accumulate(_later(ways, least)))
        if most - least >= LONGEST_NAME:
            return totals
        return [total - before for total, before in zip(totals, _later(totals, most - least + 1), strict=True)]

    def _repeat(self, least: int, most: int, repeated: Any, ways: list[int]) -> list[int]:
        left = ways if least == 0 else [0] * len(ways)
        for number in range(1, most + 1):
            ways = self.walk(repeated, ways)
            if number >= least:
                left = _sum([left, ways])
            if not any(ways):  # the name is at its end
                break
        return left


def _later(ways: list[int], characters: int) -> list[int]:
    characters = min(characters, len(ways))
    return [0] * characters + ways[: len(ways) - characters]


def _sum(each: list[list[int]]) -> list[int]:
    return [sum(numbers) for numbers in zip(*each, strict=True)]


def _may_be(part: Any, character: str) -> bool:
    """Whether a part that matches one character may match this one. Of letters it is not known: their case may not matter."""
    if not character.isascii() or character.isalpha():
        return True
    name, argument = str(part[0]), part[1]
    if name == "IN":
        is_other = str(argument[0][0]) == "NEGATE"
        return is_other != any(_has(str(kind), value, character) for kind, value in argument[is_other:])
    return name == "ANY" or (name == "NOT_LITERAL") != (argument == ord(character))


def _has(kind: str, value: Any, character: str) -> bool:
    """Whether an item between brackets has an ASCII character."""
    if kind == "LITERAL":
        return bool(value == ord(character))
    if kind == "RANGE":
        return bool(value[0] <= ord(character) <= value[1])
    assert kind == "CATEGORY", kind
    category = str(value).removeprefix("CATEGORY_")
    known = {
        "DIGIT": character.isdigit(),
        "SPACE": character.isspace(),
        "WORD": character.isalnum() or character == "_",
    }
    return known[category.removeprefix("NOT_")] != category.startswith("NOT_")
