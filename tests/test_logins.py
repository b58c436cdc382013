"""Who guesses passwords keeps out nobody who knows his."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import argon2
import pytest

import warren.node.users as users_module
from warren.node.admission import Admission
from warren.node.logins import Logins
from warren.node.users import Users
from warren.vhost.refused import Refused


class HeldHasher:
    """Hashes that do not end before they may."""

    def __init__(self) -> None:
        self._hasher = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
        self._may_end = threading.Semaphore(0)
        self.begun: list[bytes] = []

    def let_end(self, count: int) -> None:
        self._may_end.release(count)

    def hash(self, password: bytes) -> str:
        return self._hasher.hash(password)

    def verify(self, password_hash: str, password: bytes) -> bool:
        self.begun.append(password)
        assert self._may_end.acquire(timeout=60)
        return self._hasher.verify(password_hash, password)


@pytest.fixture
def hasher(monkeypatch) -> HeldHasher:
    hasher = HeldHasher()
    monkeypatch.setattr(users_module, "_HASHER", hasher)
    return hasher


def run(tmp_path: Any, work: Callable[[Users, Logins, Admission], Awaitable[None]], per_address: int = 100) -> None:
    async def all_of_it() -> None:
        with Users(tmp_path) as users:
            admission = Admission(1000, per_address)
            logins = Logins(users, admission, threads=1)
            await work(users, logins, admission)
            await logins.stop()
            assert len(admission) == 0

    asyncio.run(all_of_it())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.001)


def start(logins: Logins, count: int, address: str, name: str = "guest") -> list[asyncio.Task[bool]]:
    """So many guesses; each has a password that tells whose it is."""
    return [asyncio.ensure_future(logins.of_client(name, f"{address} {number}", address)) for number in range(count)]


def test_a_password_that_was_right_before_is_known_and_commands_are_done_while_guesses_wait(tmp_path, hasher):
    async def work(users: Users, logins: Logins, admission: Admission) -> None:
        hasher.let_end(1)
        assert await logins.of_client("guest", "guest", "127.0.0.1")
        guesses = start(logins, 200, "10.0.0.1")
        await until(lambda: len(hasher.begun) == 2)
        assert await logins.of_client("guest", "guest", "10.0.0.1")
        assert await logins.of_request("guest", "guest", "10.0.0.1")
        await asyncio.to_thread(users.add_user, "ann", "pw")
        assert len(hasher.begun) == 2  # all of that without waiting for the hash that is under way
        hasher.let_end(200)
        assert not any(await asyncio.gather(*guesses))

    run(tmp_path, work)


def test_addresses_take_turns(tmp_path, hasher):
    async def work(users: Users, logins: Logins, admission: Admission) -> None:
        many = start(logins, 20, "10.0.0.1")
        await until(lambda: len(hasher.begun) == 1)
        few = start(logins, 2, "10.0.0.2")
        await asyncio.sleep(0)
        hasher.let_end(22)
        assert not any(await asyncio.gather(*many, *few))
        order = [password.decode().partition(" ")[0] for password in hasher.begun]
        assert order[:6] == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.1"]

    run(tmp_path, work)


def test_a_right_login_that_waited_for_its_own_first_hash_costs_none(tmp_path, hasher):
    async def work(users: Users, logins: Logins, admission: Admission) -> None:
        clients = [asyncio.ensure_future(logins.of_client("guest", "guest", "10.0.0.1")) for _ in range(50)]
        hasher.let_end(1)
        assert all(await asyncio.gather(*clients))
        assert len(hasher.begun) == 1

    run(tmp_path, work)


def test_who_goes_away_while_he_waits_or_is_checked_leaves_the_turn_to_the_others(tmp_path, hasher):
    async def work(users: Users, logins: Logins, admission: Admission) -> None:
        guesses = start(logins, 4, "10.0.0.1")
        await until(lambda: len(hasher.begun) == 1)
        for guess in guesses[:3]:  # one in its thread, two that wait
            guess.cancel()
        await asyncio.wait(guesses[:3])
        hasher.let_end(2)
        assert not await guesses[3]
        assert hasher.begun == [b"10.0.0.1 0", b"10.0.0.1 3"]
        hasher.let_end(1)
        assert await logins.of_client("guest", "guest", "10.0.0.1")

    run(tmp_path, work)


def test_logins_over_http_that_wait_for_a_hash_are_counted_by_address(tmp_path, hasher):
    async def work(users: Users, logins: Logins, admission: Admission) -> None:
        guesses = [asyncio.ensure_future(logins.of_request("guest", f"{number}", "10.0.0.1")) for number in range(3)]
        await until(lambda: len(admission) == 3)
        with pytest.raises(Refused, match="too many of this address") as caught:
            await logins.of_request("guest", "one more", "10.0.0.1")
        assert caught.value.status == 503
        other = asyncio.ensure_future(logins.of_request("guest", "guest", "10.0.0.2"))
        hasher.let_end(4)
        assert await other
        assert not any(await asyncio.gather(*guesses))

    run(tmp_path, work, per_address=3)
