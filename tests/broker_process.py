"""`warren serve` as an operator starts it, for tests that end it in every way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pika
import pika.exceptions

from warren.node.users import Users
from warren.pipeline.broker_client import BrokerClient, Credentials

logging.getLogger("pika").setLevel(logging.CRITICAL)  # connections are lost all the time here

READY = re.compile(r"ready: AMQP on [^:]+:(\d+), status page on http://[^:]+:(\d+)")
PATIENCE = 240.0


def free_port() -> int:
    """Below the ports that the kernel gives to clients: one of these, which keeps connecting to a broker that is down, may
    be given the broker's own port, and then the broker cannot come back."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Served:
    """A broker in its own processes."""

    def __init__(self, data_dir: Path, *flags: str, **environment: str) -> None:
        self.data_dir = data_dir
        self.log = data_dir.parent / f"{data_dir.name}.log"
        self._flags = flags
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.http_port = 0

    def start(self) -> None:
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "warren.cli.main", "serve", *self._arguments()],
                stdout=log,
                stderr=log,
                env={**os.environ, "NO_COLOR": "1", **self._environment},
            )
        deadline = time.monotonic() + PATIENCE
        while True:
            with self.log.open() as log:
                log.seek(offset)
                found = READY.search(log.read())
            if found:
                self.port, self.http_port = int(found[1]), int(found[2])
                return
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def _arguments(self) -> list[str]:
        ports = ["--amqp-port", str(self.port), "--http-port", "0"]
        return ["--data-dir", str(self.data_dir), *ports, *self._flags]

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/api/status", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def vhost_pid(self, vhost: str = "/") -> int:
        """Of a vhost that runs."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for found in self.status()["vhosts"]:
                alive = found["pid"] and os.path.exists(f"/proc/{found['pid']}")  # the answer may be half a second old
                if found["name"] == vhost and found["state"] == "running" and alive:
                    return int(found["pid"])
            time.sleep(0.02)
        raise AssertionError(f"vhost {vhost} does not come up: {self.log.read_text()}")

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def url(self) -> str:
        return self.vhost_url("/")

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def vhost_url(self, vhost: str, user: str = "guest", password: str = "guest") -> str:
        return f"amqp://{quote(user)}:{quote(password)}@127.0.0.1:{self.port}/{quote(vhost, safe='')}"

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        with BrokerClient(self.http_url, Credentials(user="guest", password="guest")) as client:
            return client.call(request, **arguments)

    def queue_info(self, queue: str, vhost: str = "/") -> dict[str, Any]:
        [info] = self.ask("queues/list", vhost=vhost, queues=[queue])["queues"]
        found: dict[str, Any] = info
        return found

    def queue_names(self, vhost: str = "/") -> list[str]:
        return [info["name"] for info in self.ask("queues/list", vhost=vhost)["queues"]]

    def peers(self, vhost: str = "/") -> dict[str, int]:
        return {one["peer"]: one["heartbeat"] for one in self.ask("connections/list", vhost=vhost)["connections"]}

    def connect(self, vhost: str = "/") -> pika.BlockingConnection:
        """A client that tries again, as clients do."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return pika.BlockingConnection(pika.URLParameters(self.vhost_url(vhost)))
            except (pika.exceptions.AMQPError, OSError):
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.02)

    def stop(self) -> int:
        """As an operator does; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def kill_node(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE)


@contextlib.contextmanager
def served(data_dir: Path, *flags: str, vhosts: tuple[str, ...] = (), **environment: str) -> Iterator[Served]:
    data_dir.mkdir(parents=True, exist_ok=True)
    if vhosts:
        with Users(data_dir) as users:
            for vhost in vhosts:
                users.add_vhost(vhost)
                users.set_permissions("guest", vhost, ".*", ".*", ".*")
    broker = Served(data_dir, *flags, **environment)
    broker.start()
    try:
        yield broker
    finally:
        if broker.process is not None and broker.process.poll() is None:
            broker.stop()
