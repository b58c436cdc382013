"""The data server: a process beside the broker that reads files for executors who cannot see them, and stages their rows.

It is `warren.pipeline.data_server`, started when it is first needed, and again when it has died. It lives as long as its
standard input: it goes with the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from typing import Any

from warren.node.users import Users

log = logging.getLogger("warren.node")

PORT_NAME = "data_server.port"  # in the data directory
_START_SECONDS = 60.0
_STOP_SECONDS = 5.0
_TELL_SECONDS = 10.0


class DataServer:
    """Starts it, and knows its port."""

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        certificate: tuple[str, str] | None,
        data_dir: str | os.PathLike[str],
        users: Users,
    ) -> None:
        """It is told the stamps of `users`: tickets that carry another one are not good any more."""
        self._users = users
        self._memory = os.path.join(data_dir, PORT_NAME)
        self._said: dict[str, Any] = {"host": host, "port": port, "key": key.hex(), "certificate": certificate}
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0
        self._starting = asyncio.Lock()
        self.why = ""  # it cannot be had

    async def port(self, node_url: str) -> int | None:
        """Where it listens; None: it cannot be started, and `why` says why."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start(node_url)
            return self._port or None

    async def _start(self, node_url: str) -> None:
        self._port = 0
        for port in dict.fromkeys((self._said["port"] or self._remembered(), self._said["port"])):
            stamps = {user.name: self._users.stamps(user.name) for user in self._users.list_users()}
            said = await self._run({**self._said, "node": node_url, "port": port, "stamps": stamps})
            if "port" in said:
                break
        self._port = int(said.get("port", 0))
        self.why = str(said.get("error", ""))
        if self.why:
            log.error("the data server cannot be started: %s", self.why)
            return
        with contextlib.suppress(OSError), open(self._memory, "w") as file:
            file.write(f"{self._port}\n")

    async def tell_stamp(self, user: str) -> None:
        """A password or a permission was changed, or a user deleted: return when the process refuses the tickets that stem
        from it."""
        async with self._starting:
            process = self._process
            if process is None or process.returncode is not None:
                return  # the next one starts with all stamps
            assert process.stdin is not None
            assert process.stdout is not None
            line = json.dumps({"user": user, "stamps": self._users.stamps(user)}).encode() + b"\n"
            try:
                process.stdin.write(line)
                async with asyncio.timeout(_TELL_SECONDS):
                    heard = await process.stdout.readline()
            except (OSError, TimeoutError):
                heard = b""
            if not heard:
                log.error("the data server does not hear that tickets have ended; it is started anew")
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def _remembered(self) -> int:
        """The port that it had: tasks that lost it when the node died look for it there."""
        try:
            with open(self._memory) as file:
                return int(file.read())
        except (OSError, ValueError):
            return 0

    @property
    def was_used(self) -> bool:
        return self._remembered() > 0

    async def _run(self, said: dict[str, Any]) -> dict[str, Any]:
        """Start the process; what it says of itself."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "warren.pipeline.data_server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(said).encode() + b"\n")
        try:
            async with asyncio.timeout(_START_SECONDS):
                line = await self._process.stdout.readline()
            answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended as it started; the log says why"}
        except (TimeoutError, ValueError) as error:
            return {"error": str(error) or "it did not start in time"}
        return answer

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
