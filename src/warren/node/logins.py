"""Passwords that are checked: who guesses them must not keep out those who know theirs.

Rules:

1. A password that was right before is known again without a hash (`Users.remembers`), at once: it waits for nobody.
2. Hashes have threads of their own, half as many as there are cores. Nothing else waits behind them, commands of operators
   neither.
3. Networks take turns (`admission.network_of`): however many hashes one of them has waiting, the next one of another
   network waits for one of each.
4. Who has not logged in is counted (`admission.py`): a client of AMQP since it was accepted, one of HTTP while its hash
   waits.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor

from warren.node.admission import Admission, network_of
from warren.node.users import Users
from warren.vhost.refused import Refused

_THREADS = max(1, (os.cpu_count() or 1) // 2)


class Logins:
    """Of one node, on its loop."""

    def __init__(self, users: Users, admission: Admission, threads: int = _THREADS) -> None:
        self._users = users
        self._admission = admission
        self._executor = ThreadPoolExecutor(threads, "hashes")
        self._free = threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by network, the next one first

    async def of_client(self, user: str, password: str, address: str) -> bool:
        """Is the password right? Requires: the client has an entry (rule 4)."""
        if self._users.remembers(user, password):
            return True
        await self._turn(network_of(address))
        hashing = asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: self._users.authenticate(user, password) is not None
        )
        hashing.add_done_callback(lambda _: self._pass_on())
        return await asyncio.shield(hashing)  # who goes away meanwhile does not free the thread

    async def of_request(self, user: str, password: str, address: str) -> bool:
        """The same for a request of HTTP, which has no entry yet. Raises Refused where too many wait."""
        if self._users.remembers(user, password):
            return True
        entry = self._admission.enter(address)
        if entry is None:
            raise Refused(503, "unavailable", "too many logins are under way, or too many of this address; try again")
        entry.working(True)
        try:
            return await self.of_client(user, password, address)
        finally:
            self._admission.leave(entry)

    async def _turn(self, network: str) -> None:
        """Wait for a thread."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(network, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came just when nobody waited any more
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """A thread is free: it is the turn of the network that waits longest for one, which then goes to the end."""
        while self._waiting:
            network, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[network] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def stop(self) -> None:
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
