"""Who may be logging in at one time."""

from __future__ import annotations

import asyncio

import pytest

from warren.node.admission import Admission


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_address_that_has_its_share_is_turned_away_and_others_are_not(clock):
    gate = Admission(100, 2, clock)
    mine = [gate.enter("10.0.0.1") for _ in range(3)]
    assert [entry is not None for entry in mine] == [True, True, False]
    assert gate.enter("10.0.0.2") is not None
    gate.leave(mine[0])
    assert gate.enter("10.0.0.1") is not None


def test_an_ipv6_network_counts_as_one_address(clock):
    gate = Admission(100, 1, clock)
    assert gate.enter("2001:db8::1") is not None
    assert gate.enter("2001:db8::2:2:2:2") is None
    assert gate.enter("2001:db8:0:1::1") is not None


def test_when_all_places_are_taken_the_oldest_idle_one_of_the_busiest_address_gives_way(clock):
    async def run() -> None:
        gate = Admission(4, 3, clock)
        entries = [gate.enter(address) for address in ("10.0.0.2", "10.0.0.1", "10.0.0.1", "10.0.0.1")]
        for entry in entries:
            entry.task = asyncio.ensure_future(asyncio.sleep(3600))
        clock.now = 2
        assert gate.enter("10.0.0.3") is not None
        assert [entry.is_evicted for entry in entries] == [False, True, False, False]
        await asyncio.gather(entries[1].task, return_exceptions=True)
        assert entries[1].task.cancelled()
        gate.leave(entries[1])  # as its task does at its end: it had left already
        assert len(gate) == 4
        for entry in entries:
            entry.task.cancel()

    asyncio.run(run())


def test_nobody_gives_way_in_its_first_second_or_while_its_password_is_checked(clock):
    gate = Admission(2, 2, clock)
    fresh, checked = gate.enter("10.0.0.1"), gate.enter("10.0.0.1")
    checked.working(True)
    assert gate.enter("10.0.0.2") is None
    clock.now = 2
    assert gate.enter("10.0.0.2") is not None
    assert fresh.is_evicted
    assert gate.enter("10.0.0.3") is None
    assert not checked.is_evicted


def test_everything_is_forgotten_when_everybody_has_left(clock):
    gate = Admission(10, 10, clock)
    for entry in [gate.enter(f"10.0.0.{number}") for number in range(10)]:
        gate.leave(entry)
    assert len(gate) == 0
    assert not gate._entries


def test_the_log_says_who_is_turned_away_and_by_which_key_but_not_every_time(clock, caplog):
    gate = Admission(10, 1, clock)
    for _ in range(50):
        gate.enter("10.0.0.1")
    assert len(caplog.records) == 1
    assert "10.0.0.1 has 1 under way (max_handshakes_per_address)" in caplog.text
    clock.now = 11
    gate.enter("10.0.0.1")
    assert "(49 since the last such line)" in caplog.records[1].getMessage()
