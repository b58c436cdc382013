"""The broker with the command-line tools of librabbitmq, the C client: amqp-publish, amqp-get, amqp-consume and the others.

They come with Debian's package amqp-tools (apt-get install -y amqp-tools); without it this file is skipped.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.broker_clients import SECONDS, connected, eventually, unique

TOOLS = ("amqp-publish", "amqp-consume", "amqp-get", "amqp-declare-queue", "amqp-delete-queue")
missing = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(missing),
    reason=f"{', '.join(missing)} not found: apt-get install -y amqp-tools (package of Debian and Ubuntu)",
)


@pytest.fixture
def tool(broker):
    """tool("get", "--queue", "q") runs amqp-get against the broker: its exit status, output and errors."""

    def run(name: str, *arguments: str, given: bytes = b"", vhost: str = "/") -> tuple[int, bytes, str]:
        done = subprocess.run(
            [f"amqp-{name}", f"--url={broker.vhost_url(vhost)}", *arguments],
            input=given,
            capture_output=True,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout, done.stderr.decode()

    return run


def test_a_queue_is_declared_filled_read_and_deleted(tool):
    name = unique()
    assert tool("declare-queue", "--queue", name) == (0, f"{name}\n".encode(), "")
    for body in ("one", "two", "three"):
        assert tool("publish", "--routing-key", name, "--body", body) == (0, b"", "")
    assert tool("get", "--queue", name) == (0, b"one", "")
    assert tool("delete-queue", "--queue", name) == (0, b"2\n", "")
    status, _, errors = tool("get", "--queue", name)
    assert status == 1
    assert f"404, message: NOT_FOUND - no queue '{name}' in vhost '/'" in errors


def test_get_from_an_empty_queue_says_so_by_its_exit_status(tool):
    name = unique()
    tool("declare-queue", "--queue", name)
    assert tool("get", "--queue", name) == (2, b"", "")
    tool("delete-queue", "--queue", name)


def test_a_body_from_standard_input_arrives_whole(tool):
    name = unique()
    tool("declare-queue", "--queue", name)
    body = bytes(range(256)) * 2000
    assert tool("publish", "--routing-key", name, given=body) == (0, b"", "")
    assert tool("get", "--queue", name) == (0, body, "")
    tool("delete-queue", "--queue", name)


def test_every_line_can_be_a_message_and_a_command_consumes_them(tool):
    name = unique()
    tool("declare-queue", "--queue", name)
    assert tool("publish", "--routing-key", name, "--line-buffered", given=b"a\nb\nc\n") == (0, b"", "")
    assert tool("consume", "--queue", name, "--count", "3", "cat") == (0, b"a\nb\nc\n", "")
    assert tool("get", "--queue", name)[0] == 2
    tool("delete-queue", "--queue", name)


def test_a_message_that_the_command_refused_comes_again(tool):
    name = unique()
    tool("declare-queue", "--queue", name)
    tool("publish", "--routing-key", name, "--body", "x")
    tool("consume", "--queue", name, "--count", "1", "false")
    # A consumer that failed leaves its message to the next one.
    assert eventually(lambda: (found := tool("get", "--queue", name))[0] == 0 and found)[1] == b"x"
    tool("delete-queue", "--queue", name)


def test_a_consumer_waits_on_an_exchange_with_a_queue_of_its_own(broker):
    """amqp-consume declares an exclusive queue with a name from the server, binds it, and gets what comes."""
    consumer = subprocess.Popen(
        ["amqp-consume", f"--url={broker.url}", "--exchange=amq.topic", "--routing-key=news.#", "--count=2", "cat"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        eventually(lambda: any(broker.queue_info(name)["consumers"] for name in broker.queue_names()))
        with connected(broker) as connection:
            channel = connection.channel()
            for key, body in (("news.a", b"1"), ("weather", b"2"), ("news.b.c", b"3")):
                channel.basic_publish("amq.topic", key, body)
        output, errors = consumer.communicate(timeout=SECONDS)
    finally:
        consumer.kill()
        consumer.wait()
    assert output == b"13"
    assert errors.startswith(b"Server provided queue name: amq.gen-")
    eventually(lambda: not any(name.startswith("amq.gen-") for name in broker.queue_names()))


def test_properties_and_persistence_reach_other_clients(tool, broker):
    name = unique()
    tool("declare-queue", "--queue", name, "--durable")
    tool("publish", "-r", name, "-p", "-C", "text/plain", "-E", "utf-8", "-H", "kind: test", "-b", "x")
    with connected(broker) as connection:
        channel = connection.channel()
        _, properties, body = channel.basic_get(name)
        assert (body, properties.delivery_mode, properties.content_type, properties.content_encoding) == (
            b"x",
            2,
            "text/plain",
            "utf-8",
        )
        assert properties.headers == {"kind": "test"}
        channel.queue_delete(name)


def test_an_unknown_vhost_is_told(tool):
    status, _, errors = tool("get", "--queue", "q", vhost="nowhere")
    assert status == 1
    assert "530" in errors or "nowhere" in errors
