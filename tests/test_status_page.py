"""The HTTP server of a node: health, status, and a page on which a name is only a name."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from warren.node.status_html import PAGE, SCRIPT, STYLE
from warren.node.status_page import ListenError, StatusServer

CHROMIUM = shutil.which("chromium")

HOSTILE = (
    "<img src=x onerror=\"document.title='pwned'\">",
    "</script><script>document.title='pwned'</script>",
    '"><svg onload=alert(1)>',
    "javascript:document.title='pwned'",
    "&lt;b&gt;",
)


def queue(name: str, **values: object) -> dict[str, object]:
    numbers = ("messages_ready", "messages_unacknowledged", "consumers", "publish_rate", "deliver_rate", "ack_rate")
    zeros = dict.fromkeys((*numbers, "q1", "q2", "delta", "q3", "q4", "ram_bytes"), 0)
    return {"name": name, "durable": True, **zeros, **values}


def sample(*names: str) -> dict[str, object]:
    return {
        "node": {"pid": 1, "uptime": 2.5, "memory_bytes": 3, "durability": "fsync", "alarms": list(names)},
        "vhosts": [
            {
                "name": name,
                "state": name,
                "pid": 1,
                "connections": 2,
                "channels": 3,
                "memory_bytes": 4,
                "queues": [queue(each, messages_ready=number, state=each) for number, each in enumerate(names)],
            }
            for name in names
        ],
    }


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


def ask(port: int, path: str, method: str = "GET") -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())
    finally:
        connection.close()


def serve(
    test: Callable[[StatusServer], Awaitable[None]],
    status: Callable[[], object] = sample,
    ready: Callable[[], bool] = lambda: True,
    **options: object,
) -> None:
    """Run a test beside a server, in one loop."""

    async def run() -> None:
        server = StatusServer("127.0.0.1", 0, status, ready, **options)
        await server.start()
        try:
            await test(server)
        finally:
            await server.stop()

    asyncio.run(run())


def answers(*paths: str, **options: object) -> list[Answer]:
    """What one server answers, to one question after the other."""
    given: list[Answer] = []

    async def test(server: StatusServer) -> None:
        for path in paths:
            given.append(await asyncio.to_thread(ask, server.port, path))

    serve(test, **options)
    return given


# ---- answers ----


def test_a_node_that_starts_lives_but_is_not_ready():
    moments = iter([False, True])
    live, before, after = answers("/health/live", "/health/ready", "/health/ready", ready=lambda: next(moments))
    assert (live.status, live.json) == (200, {"status": "live"})
    assert (before.status, before.json) == (503, {"status": "starting"})
    assert (after.status, after.json) == (200, {"status": "ready"})


def test_liveness_does_not_depend_on_the_status():
    def broken():
        raise RuntimeError("no")

    live, status = answers("/health/live", "/api/status", status=broken)
    assert (live.status, status.status) == (200, 503)


def test_the_status_is_what_the_callable_returned():
    [answer] = answers("/api/status", status=lambda: sample("a", "b"))
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == sample("a", "b")


def test_the_status_may_be_awaited():
    async def status():
        await asyncio.sleep(0)
        return sample("a")

    [answer] = answers("/api/status", status=status)
    assert answer.json == sample("a")


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_a_status_that_cannot_be_had_is_a_503_without_its_insides_and_the_next_may_be_good(value, caplog):
    values = iter([{"secret": value}, sample("a")])
    moments = iter(range(100))
    bad, good = answers("/api/status", "/api/status", status=lambda: next(values), clock=lambda: next(moments))
    assert bad.status == 503
    assert bad.json == {"error": "the status cannot be had; the log says why"}
    assert "the status cannot be had" in caplog.text
    assert good.json == sample("a")


def test_many_who_ask_at_once_cost_one_status():
    asked = []
    now = 0.0

    async def status():
        asked.append(now)
        await asyncio.sleep(0.01)
        return sample("a")

    async def test(server: StatusServer) -> None:
        nonlocal now
        given = await asyncio.gather(*(asyncio.to_thread(ask, server.port, "/api/status") for _ in range(8)))
        assert {answer.status for answer in given} == {200}
        assert asked == [0.0]
        now = 0.49
        await asyncio.to_thread(ask, server.port, "/api/status")
        assert asked == [0.0]
        now = 0.5
        await asyncio.to_thread(ask, server.port, "/api/status")
        assert asked == [0.0, 0.5]

    serve(test, status=status, clock=lambda: now)


def test_other_paths_are_not_found_and_nothing_can_be_posted():
    async def test(server: StatusServer) -> None:
        assert (await asyncio.to_thread(ask, server.port, "/etc/passwd")).status == 404
        assert (await asyncio.to_thread(ask, server.port, "/api/status", "POST")).status == 405
        assert (await asyncio.to_thread(ask, server.port, "/", "DELETE")).status == 405

    serve(test)


# ---- the server ----


def test_a_port_that_is_taken_is_told_and_ends_nothing():
    async def test(server: StatusServer) -> None:
        other = StatusServer("127.0.0.1", server.port, sample, lambda: True)
        with pytest.raises(ListenError, match=f"cannot listen for HTTP on 127.0.0.1:{server.port}: .*http_port"):
            await other.start()
        await other.stop()
        assert (await asyncio.to_thread(ask, server.port, "/health/live")).status == 200

    serve(test)


def test_a_host_that_is_no_address_is_told():
    async def test() -> None:
        with pytest.raises(ListenError, match=r"cannot listen for HTTP on 256\.0\.0\.1:0"):
            await StatusServer("256.0.0.1", 0, sample, lambda: True).start()

    asyncio.run(test())


def test_after_the_stop_the_port_is_free_also_with_a_client_that_stays_connected():
    async def test() -> None:
        server = StatusServer("127.0.0.1", 0, sample, lambda: True)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await server.stop()
        await server.stop()
        again = StatusServer("127.0.0.1", server.port, sample, lambda: True)
        await again.start()
        await again.stop()
        writer.close()

    asyncio.run(test())


def test_signals_stay_with_the_node():
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    during = {}

    async def test(server: StatusServer) -> None:
        during.update({each: signal.getsignal(each) for each in before if each != signal.SIGINT})

    serve(test)
    assert during == {signal.SIGTERM: before[signal.SIGTERM]}
    assert {each: signal.getsignal(each) for each in before} == before


# ---- the page ----


def test_the_page_loads_nothing_from_anywhere():
    [page] = answers("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    text = page.body.decode()
    assert text == PAGE
    assert re.findall(r"(?:src|href)=[\"']?([^\"'> ]{0,5})", text) == ["data:", "/api/"]
    assert "@import" not in text
    assert "url(" not in text


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else():
    for answer in answers("/", "/api/status", "/health/live"):
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        for kind, text in (("script-src", SCRIPT), ("style-src", STYLE)):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert policy[kind] == f"'sha256-{digest}'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
    assert f"<script>{SCRIPT}</script>" in PAGE
    assert f"<style>{STYLE}</style>" in PAGE


def test_the_script_has_no_way_to_turn_text_into_markup():
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in SCRIPT
    assert "style=" not in PAGE.partition("<body>")[2]  # the policy would refuse it


def rendered(status: dict[str, object], directory, *arguments: str) -> str:
    """The document after the page has drawn the status, as a browser has it."""
    documents = []

    async def test(server: StatusServer) -> None:
        command = [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={directory}", "--virtual-time-budget=2500", *arguments, "--dump-dom"),
            f"http://127.0.0.1:{server.port}/",
        ]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        documents.append(done.stdout)

    serve(test, status=lambda: status)
    return documents[0]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_in_a_browser_a_hostile_name_is_shown_and_not_run(tmp_path):
    document = rendered(sample(*HOSTILE), tmp_path)
    assert "<title>Warren</title>" in document
    assert document.count("<script") == 1
    assert "<img" not in document
    assert "<svg" not in document
    for name in HOSTILE:
        escaped = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert document.count(f">{escaped}<") >= len(HOSTILE), name


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_in_a_browser_queues_come_deepest_first_with_their_zones(tmp_path):
    status = sample("v")
    zones = {"q1": 10, "q2": 20, "delta": 40, "q3": 20, "q4": 10}
    status["vhosts"][0]["queues"] = [
        queue("small", messages_ready=1, q4=1),
        queue("deep", messages_ready=1234567, ram_bytes=2_500_000, publish_rate=1.25, **zones),
        queue("brief", durable=False),
    ]
    document = rendered(status, tmp_path)
    body = document.partition('id="queues"')[2]
    assert [body.index(name) for name in ("deep", "small", "brief")] == sorted(
        map(body.index, ("deep", "small", "brief"))
    )
    assert "1,234,567" in body
    assert "2.5 MB" in body
    assert "1.3" in body
    assert ">transient<" in body
    assert 'title="q4 10   q3 20   delta 40   q2 20   q1 10"' in body
    assert [int(width) for width in re.findall(r"width: (\d+)%", body)[:5]] == [10, 20, 40, 20, 10]
    assert "3 of 3 queues" in body


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_in_a_browser_thousands_of_queues_are_counted_and_some_drawn(tmp_path):
    status = sample("v")
    status["vhosts"][0]["queues"] = [queue(f"q{number}", messages_ready=number) for number in range(3000)]
    document = rendered(status, tmp_path)
    assert "500 of 3,000 queues" in document
    assert ">q2999<" in document
    assert ">q2499<" not in document
