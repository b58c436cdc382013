"""The report counts what is in the queues, and its page is one file without script and without network."""

# ruff: noqa: F811  (the fixture is imported)

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import warren
from tests.spark_session import spark  # noqa: F401
from warren.pipeline.jobs.origin import Origin
from warren.pipeline.jobs.report import (
    AGES,
    SIZES,
    Deaths,
    FileShare,
    HotKey,
    QueueDepth,
    Rate,
    ReportData,
    rate_step,
    report_data,
)
from warren.pipeline.jobs.report_page import page, span
from warren.pipeline.jobs.report_plots import INK, LINE, plots, shown

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")

HOSTILE = (
    "<script>alert(1)</script>",
    "'\"><img src=http://x.example/>",
    "$\\frac{1}{0}$",
    "a\x00\x1b[31m\nb",
    "x" * 255,
    "日本",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queues with small and large messages, one that is empty, dead letters, and garbage in the message store."""
    path = tmp_path_factory.mktemp("report") / "data"
    with warren.open(path) as store:
        orders = store.queue("orders")
        orders.publish_many([b"x" * 100] * 50)
        orders.publish_many([b"x" * 5000] * 6)
        for number in range(4):
            died = [
                {"reason": "rejected", "queue": "orders", "count": number, "exchange": "", "routing-keys": ["orders"]}
            ]
            store.queue("dead").publish(b"dead", headers={"x-death": died})
        died = [
            {"reason": "expired", "queue": "orders", "count": 1},
            {"reason": "maxlen", "queue": "other", "count": 1},
        ]
        store.queue("dead").publish(b"dead", headers={"x-death": died})
        store.queue("dead").publish(b"strange", headers={"x-death": "no list", "other": 1})
        store.queue("empty")
        for name in HOSTILE[:2]:
            store.queue(name).publish(b"hostile")
    with warren.open(path) as store:
        large = [message for message in store.queue("orders").get_many(100) if len(message.body) == 5000]
        store.queue("orders").ack_many(large[:4])
    return path


def test_the_numbers_are_those_of_the_store(spark, data):
    now = time.time() + 30
    report = report_data(spark, Origin(path=str(data)), now)
    depths = {queue.queue: queue for queue in report.queues}
    assert {name: queue.ready + queue.unacked for name, queue in depths.items()} == {
        "orders": 52,
        "dead": 6,
        "empty": 0,
        HOSTILE[0]: 1,
        HOSTILE[1]: 1,
    }
    assert report.messages == 60
    assert [queue.queue for queue in report.queues][:2] == ["orders", "dead"]
    assert (depths["orders"].largest, depths["orders"].bytes) == (5000, 50 * 100 + 2 * 5000)
    assert depths["orders"].oldest_seconds is not None
    assert 30 <= depths["orders"].oldest_seconds < 3600
    assert depths["empty"].oldest_seconds is None
    ages, sizes = dict(report.ages), dict(report.sizes)
    assert sum(ages.values()) == sum(sizes.values()) == 60
    assert ages["under 1 s"] == ages["1 to 10 s"] == 0
    assert (sizes["64 to 255 B"], sizes["4 to 16 KiB"]) == (50, 2)
    assert sum(rate.messages for rate in report.rates) == 60
    assert report.keys[0] == HotKey("", "orders", 52, 15000)
    assert [(death.reason, death.queue, death.messages, death.deaths) for death in report.deaths] == [
        ("rejected", "orders", 4, 6),
        ("expired", "orders", 1, 1),
        ("maxlen", "other", 1, 1),
    ]
    assert sum(file.garbage_bytes for file in report.files) > 4 * 5000
    assert 0.5 < report.garbage_fraction < 0.8
    text = page(report, plots(report))
    assert "script" not in {tag for tag, _ in Tags(text).tags}


class Tags(HTMLParser):
    """Every tag of a page, and whether they are nested as they should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def made_up() -> ReportData:
    names = (*HOSTILE, *(f"queue {number}" for number in range(60)))
    return ReportData(
        HOSTILE[0],
        HOSTILE[1],
        1.8e9,
        queues=[QueueDepth(name, 1000 - at, at, at * 1000, at * 100.0, 10.5, 99, 1) for at, name in enumerate(names)],
        ages=[(name, 5) for _, name in AGES],
        sizes=[(name, 7) for _, name in SIZES],
        rates=[Rate(1_800_000_000 + 60 * number, number) for number in range(60)],
        rate_seconds=60,
        files=[FileShare(f"{number}.0.rdq", 1000, 300, 700) for number in range(5)],
        keys=[HotKey(name, name, 10, 100) for name in HOSTILE],
        deaths=[Deaths(name, name, 3, 4) for name in HOSTILE],
    )


def test_the_page_is_one_file_without_script_and_without_anything_from_elsewhere(made_up):
    text = page(made_up, plots(made_up))
    found = Tags(text)
    tags = {tag for tag, _ in found.tags}
    assert not tags & {"script", "img", "iframe", "link", "object", "base", "form"}
    for tag, attributes in found.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith("#"), (tag, value)
    assert "default-src 'none'" in text
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text


def test_every_section_has_a_plot_and_a_table(made_up):
    found = [tag for tag, _ in Tags(page(made_up, plots(made_up))).tags]
    assert found.count("section") == found.count("table") == found.count("svg") == 7


def test_names_are_shown_as_they_are_and_harm_nothing(made_up):
    text = page(made_up, plots(made_up))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "$\\frac{1}{0}$" in text
    assert "\x00" not in text
    assert "\x1b" not in text
    assert "日本" in text
    assert "and 16 more" in text, "of 66 queues 50 are listed"


def test_the_plots_take_their_ink_from_the_page_so_that_they_are_seen_on_light_and_dark(made_up):
    drawn = plots(made_up)
    assert set(drawn) == {"depth", "age", "size", "rate", "garbage", "keys", "deaths"}
    for svg in drawn.values():
        assert svg.startswith("<svg")
        assert "var(--ink)" in svg
        assert INK not in svg
        assert LINE not in svg
        assert "<metadata" not in svg
    text = page(made_up, drawn)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_the_same_data_make_the_same_page(made_up):
    assert page(made_up, plots(made_up)) == page(made_up, plots(made_up))


def test_a_vhost_without_messages_has_a_page_that_says_so():
    empty = ReportData("data", "/", 1.8e9, queues=[QueueDepth("empty", 0, 0, 0, None, None, None, 0)])
    assert plots(empty) == {}
    text = page(empty, {})
    assert text.count("There is nothing to show.") == 6
    assert "oldest message" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 s"), (90, "1.5 min"), (7200, "2 h"), (200_000, "2.31 days"), (None, "")]
)
def test_a_length_of_time_is_in_the_unit_that_fits(seconds, text):
    assert span(seconds) == text


@pytest.mark.parametrize(("seconds", "step"), [(0, 1), (60, 1), (3600, 60), (86400, 1800), (1e10, 30 * 86400)])
def test_the_steps_of_the_rate_are_a_few_dozen(seconds, step):
    assert rate_step(seconds) == step


def test_a_long_name_is_cut():
    assert shown("x" * 100) == "x" * 23 + "…"
    assert shown("short") == "short"
