"""Clients may be as many as they like: those that are too many are told, and the others notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pika.exceptions
import psutil
import pytest

from tests.broker_clients import eventually
from tests.broker_process import Served, served
from tests.test_broker_limits import is_served, opened, until_refused
from warren.vhost.client_limit import ClientLimit
from warren.vhost.control import ControlSocket

pytestmark = [
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize(
    ("allowed", "most"), [(64, 32), (1024, 512), (4096, 3072), (20_000, 15_000), (resource.RLIM_INFINITY, None)]
)
def test_the_upper_descriptors_are_kept_for_files(monkeypatch, allowed, most):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (allowed, allowed))
    limit = ClientLimit(0)
    if most is None:
        assert limit.refusal(10**6, 10**6) is None
        return
    assert limit.refusal(most, most - 1) is None
    assert f"{most} of {allowed} open files" in limit.refusal(most, most)


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process has no number left for a descriptor."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + 1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(first_free)


def test_a_descriptor_that_is_lost_on_its_way_ends_nothing_and_is_not_mixed_up_with_the_next(tmp_path):
    async def run() -> None:
        got: list[tuple[str, int | None]] = []
        ended: list[str] = []
        ours, theirs = socket.socketpair()
        node = ControlSocket(ours, lambda message, descriptor: None, lambda: ended.append("node"))
        process = ControlSocket(
            theirs, lambda message, descriptor: got.append((message["peer"], descriptor)), lambda: ended.append("vhost")
        )
        lost = os.open(tmp_path, os.O_RDONLY)
        with no_more_files():
            node.send("hand_over", lost, peer="lost")
            taken = os.open(os.devnull, os.O_RDONLY)  # the number that the sender has closed
            while not got and not ended:
                await asyncio.sleep(0)
        os.close(taken)
        node.send("hand_over", os.open(tmp_path, os.O_RDONLY), peer="next")
        while len(got) < 2 and not ended:
            await asyncio.sleep(0)
        assert ended == []
        (first, nothing), (second, directory) = got
        assert (first, nothing, second) == ("lost", None, "next")
        assert os.path.samestat(os.stat(directory), os.stat(tmp_path))
        os.close(directory)
        node.close()
        process.close()

    asyncio.run(run())


def refused(broker: Served) -> str:
    """What a client hears that is one too many."""
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError, match="NOT_ALLOWED") as caught:
        pika.BlockingConnection(pika.URLParameters(broker.url))
    return str(caught.value)


@pytest.mark.parametrize("flags", [(), ("--inline",)])
def test_who_is_over_connection_max_is_told_and_a_place_that_is_free_is_given_again(tmp_path, flags):
    with served(tmp_path / "data", *flags, WARREN_CONNECTION_MAX="3") as broker:
        clients = [opened(broker.port) for _ in range(3)]
        assert "(530) 'NOT_ALLOWED - connection refused: connection limit (3) is reached (connection_max)'" in refused(
            broker
        )
        clients.pop().close()
        eventually(lambda: len(broker.peers()) == 2)
        is_served(broker)
        for client in clients:
            client.close()


def test_clients_that_take_all_descriptors_of_a_vhost_keep_only_others_out(tmp_path):
    with served(tmp_path / "data") as broker:
        pid = broker.vhost_pid()
        process = psutil.Process(pid)
        hard = process.rlimit(psutil.RLIMIT_NOFILE)[1]
        process.rlimit(psutil.RLIMIT_NOFILE, (64, hard))
        first = broker.connect()
        clients = until_refused(lambda: opened(broker.port))
        for _ in range(10):
            assert "of 64 open files are in use" in refused(broker)
        channel = first.channel()
        channel.queue_declare("q", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "q", b"kept", pika.BasicProperties(delivery_mode=2))
        assert channel.basic_get("q", auto_ack=True)[2] == b"kept"
        for client in clients:
            client.close()
        eventually(lambda: len(broker.peers()) == 1)
        is_served(broker)
        assert broker.vhost_pid() == pid
        first.close()
