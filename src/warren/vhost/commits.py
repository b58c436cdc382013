"""The vhost's commits: one after the other, as long as there is something to commit, in a thread of their own.

The loop appends to the journal and says who waits; the thread commits; the loop is told. What arrives while a commit is
under way forms the next one. So a confirm waits for at most two syncs, however many ask, and the loop for none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from warren.errors import DiskFullError, WarrenError
from warren.storage.vhost_store import VhostStore

log = logging.getLogger("warren.vhost")

_FULL_RETRY_SECONDS = 0.2
_SAFE_SECONDS = 60.0


class Waiter(Protocol):
    def committed(self, number: int) -> None:
        """Everything that was appended when `Commits.wait` was called with `number`, or before, is safe."""


class _Once:
    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future

    def committed(self, number: int) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Commits:
    def __init__(
        self,
        store: VhostStore,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[WarrenError], None],
        full: Callable[[bool], None] = lambda is_full: None,
    ) -> None:
        """`full` is told on the loop when the store takes no publishes for want of disk, and when it does again."""
        self._store = store
        self._loop = loop
        self._failed = failed
        self._waiting: list[tuple[Waiter, int]] = []
        self._event = threading.Event()
        self._awake = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        with store.lock:
            store.committer.full_changed = partial(self._tell, full)
            if store.committer.full:  # it was so when it was opened
                self._tell(full, True)
        if store.durability != "memory":
            self._thread = threading.Thread(target=self._run, name=f"commits {store.vhost}", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """There is something to commit."""
        if not self._awake and self._thread is not None:
            self._awake = True
            self._event.set()

    def wait(self, waiter: Waiter, number: int) -> None:
        """Have `waiter` told, on the loop, when what is in the journal now is safe. Of several numbers of one waiter only
        the last is told."""
        if self._thread is None:
            self._loop.call_soon(waiter.committed, number)
            return
        self._waiting.append((waiter, number))
        self.wake()

    async def safe(self) -> None:
        """Return when what is in the journal now is safe. Raises TimeoutError: the store has failed, or its disk is full."""
        waiter = _Once(self._loop.create_future())
        self.wait(waiter, 0)
        async with asyncio.timeout(_SAFE_SECONDS):
            await waiter.future

    def stop(self) -> None:
        """After a last commit. Called off the loop, or when the loop has nothing more to append."""
        self._stopping.set()
        self._event.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._event.wait()
            self._event.clear()
            self._awake = False
            # First who waits, then the LSN: what they wait for was appended before they were entered.
            waiting, self._waiting = self._waiting, []
            try:
                self._commit()
            except WarrenError as error:
                if not self._stopping.is_set():
                    self._tell(self._failed, error)
                return
            if waiting:
                self._tell(self._done, dict(waiting))
            if self._stopping.is_set() and not self._waiting:
                return

    def _commit(self) -> None:
        while True:
            try:
                self._store.committer.sync()
                break
            except DiskFullError:
                if self._stopping.wait(_FULL_RETRY_SECONDS):
                    raise
        if self._store.checkpoint_due():
            self._store.wake()

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("a commit ended after its loop")

    @staticmethod
    def _done(waiting: dict[Waiter, int]) -> None:
        for waiter, number in waiting.items():
            waiter.committed(number)
