"""Regular expressions of users: what people write for names is allowed, and what would keep a vhost busy is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from re import _parser
from typing import Any

import pytest

from warren import patterns
from warren.patterns import LONGEST_NAME, MOST_STEPS, _Steps, name_pattern

OPTIONAL = "a?" * 30 + "a" * 30
HOSTILE = [
    OPTIONAL,
    OPTIONAL.replace("?", "??"),
    "(?:a)?" * 30,
    "(aa|a)" * 30 + "b",
    "(?:a|ab|abc|)" * 12 + "!",
    ".*.*.*[bc]",
    ".*.*.*.*!",
    "(x)?(?(1).*.*.*!|.*.*.*!)",
    "(?=.*.*.*!)x",
    "(?<=a).*.*.*!",
    "(a+)+$",
    "(?:a?b)*c",
    "(eu|us)*!",
    "(?:){60000}",
    "((((a{99}){99}){99}){99})|(((((){99}){99}){99}){99})",
    r"(.*)(.*)\1!",
    "(?i:[^k]*\N{KELVIN SIGN}){9}",  # k and the sign are the same here: the sign ends no repetition
]
USUAL = [
    "",
    "^$",
    ".*",
    r"^(amq\.gen.*|foo)$",
    "orders|paid|007",
    "orders.*",
    ".*orders.*",
    "(eu|us)[.][a-z]+(-[0-9]{4})?.*",
    "(eu|us).*(paid|open|new|late)[.].*",
    "(?i)orders[.].*",
    "[^.]*[.][^.]*[.][^.]*[.][^.]*[.][^.]*",
    r"\w+-\w+-\d+[.]\d+",
    "(?:[a-z]+[.])*paid",
    "(?!amq[.]).*",
    "x" * 1000,
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_an_expression_with_too_many_ways_is_refused_with_its_text_and_a_remedy(pattern):
    with pytest.raises(ValueError, match="may take for ever; write it simpler") as refused:
        name_pattern(pattern)
    assert repr(pattern) in str(refused.value)


@pytest.mark.parametrize("pattern", USUAL)
def test_what_people_write_for_names_is_allowed(pattern):
    assert name_pattern(pattern).pattern == pattern


@pytest.mark.parametrize("pattern", ["(", "[", "*", "a{2,1}", "(?P<n>a)(?P<n>b)"])
def test_what_is_no_expression_is_told(pattern):
    with pytest.raises(ValueError, match="is not a regular expression"):
        name_pattern(pattern)


def steps_of(pattern: str) -> int:
    steps = _Steps()
    steps.walk(_parser.parse(pattern), [1] + [0] * LONGEST_NAME)
    return steps.count


def test_parts_that_may_be_missing_double_the_steps(monkeypatch):
    monkeypatch.setattr(patterns, "_COUNTING_STEPS", 0)
    counted = [steps_of("a?" * number) for number in (8, 10, 12, 14)]
    assert all(3 * before < after for before, after in itertools.pairwise(counted))
    assert counted[-1] > 2**15
    assert counted[-1] < MOST_STEPS


def test_a_repetition_that_the_next_character_ends_multiplies_nothing():
    assert steps_of("[^.]*[.]" * 8) - steps_of("[^.]*[.]" * 7) < 3000
    for separator in (".", "-", "_", "/", "0"):
        name_pattern(f"[^{separator}]*{re.escape(separator)}" * 20)
    for is_one_of_them in (
        "[^-]*[.]",
        "[.-]*[.]",
        "[+-9]*[.]",
        r"\W*[.]",
        r"\S*[.]",
        r"\w*_",
        r"\w*7",
        ".*[.]",
        "[^.]*k",
    ):
        with pytest.raises(ValueError, match="may take for ever"):
            name_pattern(is_one_of_them * 4)


class Backtracking:
    """The plainest matcher that goes back and tries again. Counts how often it arrives at a part."""

    def __init__(self, pattern: str, text: str) -> None:
        self.text = text
        self.count = 0
        self.matched = any(end == len(text) for end in self.sequence(list(_parser.parse(pattern)), 0))

    def sequence(self, parts: list[Any], place: int) -> Iterator[int]:
        if not parts:
            yield place
            return
        self.count += 1
        for after in self.part(str(parts[0][0]), parts[0][1], place):
            yield from self.sequence(parts[1:], after)

    def part(self, name: str, argument: Any, place: int) -> Iterator[int]:
        if name == "MAX_REPEAT":
            yield from self.repeat(*argument, place)
        elif name == "SUBPATTERN":
            yield from self.sequence(list(argument[3]), place)
        elif name == "BRANCH":
            for inner in argument[1]:
                yield from self.sequence(list(inner), place)
        elif place < len(self.text) and self.fits(name, argument, ord(self.text[place])):
            yield place + 1

    def repeat(self, least: int, most: Any, inner: Any, place: int) -> Iterator[int]:
        if int(most) > 0:
            for after in self.sequence(list(inner), place):
                if after > place:
                    yield from self.repeat(max(least - 1, 0), int(most) - 1, inner, after)
        if least == 0:
            yield place

    def fits(self, name: str, argument: Any, character: int) -> bool:
        if name == "IN":
            return any(character == value for _, value in argument)
        return name == "ANY" or (argument == character) != (name == "NOT_LITERAL")


@pytest.mark.parametrize("length", [1, 2, 3])
def test_no_matcher_needs_more_steps_than_were_counted(length, monkeypatch):
    monkeypatch.setattr(patterns, "_COUNTING_STEPS", 0)
    monkeypatch.setattr(patterns, "LONGEST_NAME", 12)
    parts = ("a", "a?", "a*", ".*", "[^.]*[.]", "(ab|a)", "(aa)*", "(a?b)?", "a{2,3}", "[ab]+")
    texts = ("a" * 12, "ab" * 6, "a.a.a.a.a.b", "." * 10)
    for chosen in itertools.product(parts, repeat=length):
        pattern = "".join(chosen) + "[!?]"
        counted = _Steps()
        counted.walk(_parser.parse(pattern), [1] + [0] * 12)
        for text in texts:
            needed = Backtracking(pattern, text)
            assert not needed.matched
            assert needed.count <= counted.count, (pattern, text)
