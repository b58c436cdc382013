"""Clients of HTTP that send nothing, or drip, are ended, and cannot fill the place of others; slow readers get all of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from warren.http_server import HttpConnection
from warren.node.status_page import StatusServer

SECONDS = 20  # that a test waits for what must come
BRIEF = 0.05
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 32 << 20  # more than all buffers between two processes take


async def large(request: Request) -> Response:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(LARGE >> 20):
            yield bytes(1 << 20)

    return StreamingResponse(chunks())


async def count(request: Request) -> Response:
    return JSONResponse(len(await request.body()))


async def scheme(request: Request) -> Response:
    return JSONResponse(request.url.scheme)


ROUTES = [Route("/large", large), Route("/scheme", scheme), Route("/count", count, methods=["POST"])]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_limits(**named: float) -> None:
        for name, value in named.items():
            monkeypatch.setattr(HttpConnection, name, value)

    return set_limits


class Clients:
    """Connections to one server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, sent: bytes = b"", **named: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **named)
        self._writers.append(writer)
        writer.write(sent)
        return reader, writer

    async def ask(self, sent: bytes = LIVE, **named: Any) -> bytes:
        """The first line of an answer; the connection stays."""
        reader, _ = await self.connect(sent, **named)
        return await reader.readline()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server ends the connection."""
    with contextlib.suppress(ConnectionResetError):
        return await reader.read()
    return b""


def serve(
    test: Callable[[Clients], Awaitable[None]],
    *,
    certificate: tuple[str, str] | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    async def run() -> None:
        server = StatusServer(
            "127.0.0.1",
            0,
            lambda: {"node": {}, "vhosts": []},
            lambda: True,
            routes=ROUTES,
            certificate=certificate,
        )
        await server.start()
        clients = Clients(server.port)
        try:
            async with asyncio.timeout(SECONDS):
                await test(clients)
        finally:
            clients.close()
            await server.stop()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("sent", [b"", b"GET /health/live HTTP/1.1\r\nHost: x\r\n", b"G"])
def test_a_client_that_does_not_complete_the_head_of_a_request_is_ended(limits, sent):
    limits(head_seconds=BRIEF)

    async def test(clients: Clients) -> None:
        reader, _ = await clients.connect(sent)
        assert await ended(reader) == b""
        assert await clients.ask() == b"HTTP/1.1 200 OK\r\n"

    serve(test)


@pytest.mark.parametrize("before", [b"", LIVE], ids=["the first request", "the next one"])
def test_bytes_that_drip_do_not_prolong_the_time_for_a_head(limits, before):
    limits(head_seconds=BRIEF)

    async def test(clients: Clients) -> None:
        reader, writer = await clients.connect(before)
        if before:
            assert await reader.readuntil(b'{"status":"live"}')
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        drips = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(BRIEF / 10)
                drips += 1
                assert drips < 1000

    serve(test)


def test_a_body_that_does_not_go_on_is_ended(limits):
    limits(body_seconds=BRIEF)

    async def test(clients: Clients) -> None:
        reader, _ = await clients.connect(b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nten bytes.")
        assert await ended(reader) == b""

    serve(test)


def test_a_body_that_goes_on_may_take_longer_than_any_deadline(limits):
    limits(head_seconds=BRIEF, body_seconds=40 * BRIEF)

    async def test(clients: Clients) -> None:
        reader, writer = await clients.connect(b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n")
        for _ in range(50):
            silent, _ = await clients.connect()
            await ended(silent)  # so the time for a head went by, each time
            writer.write(b"x")
        assert (await reader.readuntil(b"\r\n\r\n50")).startswith(b"HTTP/1.1 200 OK")

    serve(test)


def test_a_slow_reader_gets_all_of_a_large_answer(limits):
    limits(head_seconds=BRIEF, body_seconds=BRIEF)

    async def test(clients: Clients) -> None:
        reader, _ = await clients.connect(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", limit=1 << 16)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        got = 0
        for _ in range(5):
            silent, _ = await clients.connect()
            await ended(silent)  # so the deadlines went by
            got += len(await reader.read(1000))
        assert got + len(await reader.read()) >= LARGE

    serve(test)


def test_an_answer_that_is_made_but_not_yet_read_is_not_cut_off(limits):
    """The last of it waits in the server's buffer, where the request is over."""
    limits(head_seconds=BRIEF)

    async def whole(request: Request) -> Response:
        return Response(bytes(LARGE))

    async def test(clients: Clients) -> None:
        reader, _ = await clients.connect(b"GET /whole HTTP/1.1\r\nHost: x\r\n\r\n", limit=1 << 16)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        for _ in range(3):
            silent, _ = await clients.connect()
            await ended(silent)
        await reader.readuntil(b"\r\n\r\n")
        assert len(await reader.readexactly(LARGE)) == LARGE

    ROUTES.append(Route("/whole", whole))
    try:
        serve(test)
    finally:
        ROUTES.pop()


def test_a_newcomer_takes_the_place_of_who_has_kept_us_waiting_for_longest(limits):
    limits(most=3)

    async def test(clients: Clients) -> None:
        working, work = await clients.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", limit=1 << 16)
        assert await working.readline() == b"HTTP/1.1 200 OK\r\n"
        first, _ = await clients.connect()
        asked, again = await clients.connect(LIVE)
        await asked.readuntil(b'{"status":"live"}')
        assert await clients.ask() == b"HTTP/1.1 200 OK\r\n"
        assert await ended(first) == b"", "the idle one, though others are older or idle, too"
        again.write(LIVE)
        assert await asked.readline() == b"HTTP/1.1 200 OK\r\n"
        assert not work.is_closing()

    serve(test)


def test_a_newcomer_is_turned_away_where_all_are_at_work(limits):
    limits(most=2)

    async def test(clients: Clients) -> None:
        for _ in range(2):
            reader, _ = await clients.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", limit=1 << 16)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        newcomer, _ = await clients.connect()
        assert await ended(newcomer) == b""

    serve(test)


def test_hundreds_who_say_nothing_do_not_keep_a_client_out(limits):
    limits(most=50)

    async def test(clients: Clients) -> None:
        for _ in range(500):
            await clients.connect()
        assert await clients.ask() == b"HTTP/1.1 200 OK\r\n"

    serve(test)


def test_the_data_server_has_these_limits_too(limits, monkeypatch):
    from warren.pipeline import data_server

    limits(head_seconds=BRIEF)
    said: queue.Queue[str] = queue.Queue()

    class Output:
        def write(self, text: str) -> None:
            if text.strip():
                said.put(text)

        def flush(self) -> None:
            pass

    reading, writing = os.pipe()
    start = {"host": "127.0.0.1", "port": 0, "key": "00" * 32, "certificate": None, "stamps": {}, "node": "http://x"}
    with os.fdopen(reading) as commands, monkeypatch.context() as patch:
        with os.fdopen(writing, "w", buffering=1) as tell:
            patch.setattr(sys, "stdin", commands)
            patch.setattr(sys, "stdout", Output())
            thread = threading.Thread(target=data_server.main)
            thread.start()
            tell.write(json.dumps(start) + "\n")
            port = json.loads(said.get(timeout=SECONDS))["port"]
            with socket.create_connection(("127.0.0.1", port), SECONDS) as silent:
                assert silent.recv(1) == b""
        thread.join(SECONDS)
    assert not thread.is_alive()


# ---- TLS ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl for certificates: apt-get install openssl")
    directory = tmp_path_factory.mktemp("certificate")
    subject = ["-subj", "/CN=localhost", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", "key.pem", "-out", "cert.pem", *subject]
    subprocess.run(made, check=True, capture_output=True, cwd=directory)
    return str(directory / "cert.pem"), str(directory / "key.pem")


def secure() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_requests_over_tls_are_answered_however_they_come(certificate, new_loop):
    async def test(clients: Clients) -> None:
        assert await clients.ask(ssl=secure()) == b"HTTP/1.1 200 OK\r\n"
        reader, writer = await clients.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", ssl=secure())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert len(await reader.readexactly(LARGE)) == LARGE
        for _ in range(2):  # one after the other on one connection
            writer.write(b"GET /scheme HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b'"https"')).count(b"HTTP/1.1 200 OK\r\n") == 1

    serve(test, certificate=certificate, new_loop=new_loop)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["none", "some", "http"]
)
def test_a_client_that_does_not_complete_its_tls_handshake_is_ended(limits, certificate, sent, new_loop):
    limits(head_seconds=0.5)

    async def test(clients: Clients) -> None:
        reader, _ = await clients.connect(sent)
        assert b"HTTP" not in await ended(reader)
        assert await clients.ask(ssl=secure()) == b"HTTP/1.1 200 OK\r\n"

    serve(test, certificate=certificate, new_loop=new_loop)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_of_too_many_tls_handshakes_the_oldest_makes_room(limits, certificate, new_loop):
    limits(most=3, head_seconds=1000)

    async def test(clients: Clients) -> None:
        readers = [(await clients.connect())[0] for _ in range(5)]
        for reader in readers[:2]:
            assert await ended(reader) == b""
        assert await clients.ask(ssl=secure()) == b"HTTP/1.1 200 OK\r\n"
        assert await ended(readers[2]) == b""
        assert not any(reader.at_eof() for reader in readers[3:])

    serve(test, certificate=certificate, new_loop=new_loop)
