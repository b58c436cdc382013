"""A node that runs, changed from outside: vhosts, users, permissions and policies, by the commands that operators use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import pytest
from typer.testing import CliRunner

import warren.node.control
from tests.broker_clients import eventually
from tests.broker_process import Served, served
from tests.test_broker_processes import PERSISTENT, Consumer, Publisher
from tests.test_pipeline_api import Client
from warren.amqp.methods import encode
from warren.cli.main import app
from warren.kernel.frame_writer import method_frame
from warren.node.broker import Broker
from warren.node.config import Config
from warren.node.control import SOCKET_NAME, ControlClient
from warren.node.handshake import Opened
from warren.node.users import Users
from warren.storage.layout import hashed
from warren.testing import running_broker
from warren.vhost.refused import Refused

pytestmark = [
    pytest.mark.usefixtures("pika_litter"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
Warren = Callable[..., str]


def commands(data_dir: Path) -> Warren:
    def run(*arguments: str, code: int = 0, stdin: str | None = None) -> str:
        where = ("--data-dir", str(data_dir))
        done = CliRunner().invoke(app, [*arguments, *where], input=stdin, env={"COLUMNS": "200"})
        assert done.exit_code == code, done.output
        return done.output

    return run


@pytest.fixture(scope="module", params=["processes", "inline"])
def broker(request, tmp_path_factory) -> Iterator[Served]:
    flags = ("--inline",) if request.param == "inline" else ()
    with served(tmp_path_factory.mktemp("node") / "data", *flags) as running:
        yield running


@pytest.fixture
def warren_(broker) -> Warren:
    return commands(broker.data_dir)


@pytest.fixture
def orders(broker, warren_) -> Iterator[str]:
    """A vhost that guest may use."""
    warren_("vhosts", "add", "orders")
    warren_("permissions", "set", "guest", ".*", ".*", ".*", "--vhost", "orders")
    yield "orders"
    if "orders" in states(warren_):
        warren_("vhosts", "delete", "orders")


def states(warren_: Warren) -> dict[str, str]:
    return {vhost["name"]: vhost["state"] for vhost in json.loads(warren_("vhosts", "list", "--json"))}


def connect(broker: Served, vhost: str = "/", user: str = "guest", password: str = "guest") -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(broker.vhost_url(vhost, user, password)))


def farewell(connection: pika.BlockingConnection, warren_: Warren, *command: str) -> tuple[int, str]:
    """What the broker closes a connection with when this is done. The client reads meanwhile, as clients do."""
    operator = threading.Thread(target=warren_, args=command)
    operator.start()
    try:
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as caught:
            eventually(lambda: connection.process_data_events(0.05))
    finally:
        operator.join(60)
    assert not operator.is_alive()
    return caught.value.reply_code, caught.value.reply_text


def publish(channel: Any, body: bytes, queue: str = "q") -> None:
    channel.confirm_delivery()
    channel.basic_publish("", queue, body, PERSISTENT)


def ready(broker: Served) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"{broker.http_url}/health/ready", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


# -- vhosts ------------------------------------------------------------------------------------------------------------


def test_a_vhost_is_added_stopped_started_restarted_and_deleted_and_others_notice_nothing(broker, warren_, orders):
    other = connect(broker).channel()
    other.queue_declare("bystander", exclusive=True)
    client = connect(broker, orders)
    channel = client.channel()
    channel.queue_declare("q", durable=True)
    publish(channel, b"kept")

    assert farewell(client, warren_, "vhosts", "stop", orders) == (
        320,
        "CONNECTION_FORCED - vhost 'orders' is down (stopped)",
    )
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError, match=r"vhost 'orders' is down \(stopped\)"):
        connect(broker, orders)
    assert states(warren_) == {"/": "running", "orders": "stopped"}
    assert "vhost 'orders' is stopped; start it first" in warren_("policies", "list", "-p", orders, code=1)
    warren_("vhosts", "stop", orders)

    warren_("vhosts", "start", orders)
    warren_("vhosts", "start", orders)
    client = connect(broker, orders)
    method, _, body = client.channel().basic_get("q")
    assert (body, method.redelivered) == (b"kept", False), "it was stopped cleanly"

    assert farewell(client, warren_, "vhosts", "restart", orders) == (
        320,
        "CONNECTION_FORCED - vhost 'orders' is down (restarting)",
    )
    client = connect(broker, orders)
    assert client.channel().basic_get("q")[2] == b"kept"

    assert farewell(client, warren_, "vhosts", "delete", orders) == (
        320,
        "CONNECTION_FORCED - vhost 'orders' is deleted",
    )
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError, match="vhost 'orders' not found"):
        connect(broker, orders)
    assert os.listdir(broker.data_dir / "vhosts") == [hashed("/")]
    assert not (broker.data_dir / "trash").exists()

    warren_("vhosts", "add", orders)
    assert not json.loads(warren_("permissions", "list", "-p", orders, "--json"))
    warren_("permissions", "set", "guest", ".*", ".*", ".*", "-p", orders)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="no queue 'q'"):
        connect(broker, orders).channel().queue_declare("q", passive=True)

    publish(other, b"still here", "bystander")
    assert other.basic_get("bystander", auto_ack=True)[2] == b"still here"


def test_vhosts_come_and_go_also_where_several_share_a_process(tmp_path):
    with served(tmp_path / "data", WARREN_VHOST_PROCESSES="1") as broker:
        warren_ = commands(broker.data_dir)
        other = connect(broker).channel()
        other.queue_declare("bystander", exclusive=True)
        warren_("vhosts", "add", "orders")
        warren_("permissions", "set", "guest", ".*", ".*", ".*", "-p", "orders")
        assert broker.vhost_pid("orders") == broker.vhost_pid("/")
        client = connect(broker, "orders")
        client.channel().queue_declare("q", durable=True)
        told = farewell(client, warren_, "vhosts", "restart", "orders")
        assert told == (320, "CONNECTION_FORCED - vhost 'orders' is down (restarting)")
        client = connect(broker, "orders")
        client.channel().queue_declare("q", durable=True, passive=True)
        assert farewell(client, warren_, "vhosts", "delete", "orders")[1].endswith("vhost 'orders' is deleted")
        assert os.listdir(broker.data_dir / "vhosts") == [hashed("/")]
        publish(other, b"still here", "bystander")
        # The last one takes the process with it; the next one gets another.
        warren_("vhosts", "stop", "/")
        warren_("vhosts", "add", "orders")
        warren_("vhosts", "start", "/")
        assert states(warren_) == {"/": "running", "orders": "running"}
        assert broker.vhost_pid("orders") == broker.vhost_pid("/")
        os.kill(broker.vhost_pid("/"), signal.SIGKILL)
        eventually(lambda: states(warren_) == {"/": "running", "orders": "running"} and ready(broker)[0] == 200)


def test_what_cannot_be_is_one_line_and_changes_nothing(warren_):
    for arguments, why in {
        ("vhosts", "add", "/"): "there is a vhost '/'; use it, or delete it first",
        ("vhosts", "add", ""): "'' cannot be the name of a vhost",
        ("vhosts", "delete", "nope"): "there is no vhost 'nope'; `warren vhosts list` shows those there are",
        ("vhosts", "restart", "nope"): "there is no vhost 'nope'; `warren vhosts list` shows those there are",
        ("users", "delete", "nobody"): "there is no user 'nobody'",
        ("users", "tags", "guest", "two words"): "'two words' cannot be a tag",
        ("permissions", "set", "guest", "(", "", ""): "the configure permission '(' is not a regular expression",
        ("permissions", "clear", "guest", "-p", "nope"): "there is no vhost 'nope'",
        ("policies", "set", "p", "", "{"): "is not JSON",
        ("policies", "set", "p", "", '{"max-lenght": 1}'): "unknown key max-lenght=1; did you mean max-length?",
        ("policies", "clear", "p"): "there is no policy 'p' in vhost '/'",
        ("policies", "clear", "p", "--operator"): "there is no operator policy 'p' in vhost '/'",
    }.items():
        assert why in warren_(*arguments, code=1), arguments
    assert states(warren_) == {"/": "running"}


def test_a_delete_under_load_leaves_no_process_no_socket_and_no_directory(broker, warren_, orders):
    assert broker.process is not None
    node = broker.process.pid
    before = sorted(sockets(node))
    publishers = [Publisher(broker, orders, f"publisher {number}") for number in range(3)]
    for publisher in publishers:
        publisher.start()
        publisher.until(20)
    pid = broker.vhost_pid(orders)
    for publisher in publishers:
        publisher.stopping.set()  # whenever the next one is confirmed, or lost
    warren_("vhosts", "delete", orders)
    for publisher in publishers:
        publisher.join(60)
    assert hashed(orders) not in os.listdir(broker.data_dir / "vhosts")
    assert not (broker.data_dir / "trash").exists()
    if pid not in (node, broker.vhost_pid("/")):
        assert not os.path.exists(f"/proc/{pid}")
    eventually(lambda: len(sockets(node)) <= len(before))
    eventually(lambda: shown(broker) == {"/": "running"})  # that answer may be half a second old


def sockets(pid: int) -> list[str]:
    found = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return [name for name in found if name.startswith("socket:")]


def test_a_restart_under_load_loses_nothing_and_others_notice_nothing(broker, warren_, orders, scale, record_property):
    restarts = scale.scale(20)
    publisher, bystander = Publisher(broker, orders, "publisher"), Publisher(broker, "/", "bystander")
    consumer, idler = Consumer(broker, orders), Consumer(broker, "/")
    clients = (publisher, bystander, consumer, idler)
    for one in clients:
        one.start()
    for _ in range(restarts):
        publisher.until(10)
        bystander.until(10)
        warren_("vhosts", "restart", orders)
    publisher.until(10)
    for one in clients:
        one.stopping.set()
    for one in clients:
        one.join(60)
    assert bystander.losses == idler.losses == 0
    for reader, writer in ((consumer, publisher), (idler, bystander)):
        reader.take_the_rest()
        reader.check(writer)
    assert ready(broker) == (200, {"status": "ready"})
    record_property("restarts", restarts)
    record_property("confirmed", len(publisher.confirmed))


def test_a_vhost_that_is_down_is_shown_keeps_the_node_from_being_ready_and_can_be_started(tmp_path):
    with served(tmp_path / "data", vhosts=("orders",), WARREN_VHOST_MAX_RESTARTS="0") as broker:
        warren_ = commands(broker.data_dir)
        os.kill(broker.vhost_pid("orders"), signal.SIGKILL)
        eventually(lambda: states(warren_)["orders"] == "down")
        assert ready(broker) == (503, {"status": "vhosts are down", "vhosts": {"orders": "down"}})
        eventually(lambda: shown(broker) == {"/": "running", "orders": "down"})
        warren_("vhosts", "start", "orders")
        assert ready(broker) == (200, {"status": "ready"})
        connect(broker, "orders").close()
        os.kill(broker.vhost_pid("orders"), signal.SIGKILL)
        eventually(lambda: states(warren_)["orders"] == "down")
        warren_("vhosts", "restart", "orders")
        connect(broker, "orders").close()
        # Stopped is what the operator wants: that must not take the clients of other vhosts away.
        warren_("vhosts", "stop", "orders")
        eventually(lambda: shown(broker) == {"/": "running", "orders": "stopped"})
        assert ready(broker) == (200, {"status": "ready"})
        assert broker.stop() == 0
        broker.start()
        assert states(warren_) == {"/": "running", "orders": "running"}, "a node starts all its vhosts"


def shown(broker: Served) -> dict[str, str]:
    return {vhost["name"]: vhost["state"] for vhost in broker.status()["vhosts"]}


def test_a_deletion_that_a_crash_cut_short_is_finished_by_the_next_start(tmp_path):
    with running_broker(str(tmp_path)) as broker:
        with ControlClient(tmp_path) as client:
            client.call("vhosts/add", name="orders")
        store = Path(broker.broker.vhosts["orders"].store.root)
    with Users(tmp_path) as users:
        users.delete_vhost("orders")
    trash = tmp_path / "trash" / "of another one"
    trash.mkdir(parents=True)
    assert store.exists()
    with running_broker(str(tmp_path)):
        assert not store.exists()
        assert not trash.parent.exists()
        with ControlClient(tmp_path) as client:
            client.call("vhosts/add", name="orders")


# -- users and permissions ---------------------------------------------------------------------------------------------


def test_users_come_change_and_go_and_their_passwords_are_in_no_log(broker, warren_):
    warren_("users", "add", "ann", "--tag", "monitoring", stdin="first secret\n")
    warren_("permissions", "set", "ann", ".*", ".*", ".*")
    assert {"name": "ann", "tags": ["monitoring"]} in json.loads(warren_("users", "list", "--json"))
    warren_("users", "tags", "ann", "management", "policymaker")
    assert "management, policymaker" in warren_("users", "list")
    connection = connect(broker, "/", "ann", "first secret")
    warren_("users", "passwd", "ann", stdin="second secret\n")
    with pytest.raises(pika.exceptions.ProbableAuthenticationError):
        connect(broker, "/", "ann", "first secret")
    connection.channel().close()  # it stays
    connect(broker, "/", "ann", "second secret").close()
    assert "there is no password" in warren_("users", "passwd", "ann", stdin="", code=1)
    assert "is empty" in warren_("users", "passwd", "ann", "", code=1)
    assert farewell(connection, warren_, "users", "delete", "ann") == (320, "CONNECTION_FORCED - user 'ann' is deleted")
    with pytest.raises(pika.exceptions.ProbableAuthenticationError):
        connect(broker, "/", "ann", "second secret")
    assert "secret" not in broker.log.read_text()


def test_a_right_that_was_taken_away_is_gone_when_the_command_returns(broker, warren_):
    warren_("users", "add", "ann", "secret")
    warren_("permissions", "set", "ann", "^ann-", ".*", ".*")
    connection = connect(broker, "/", "ann", "secret")
    channel = connection.channel()
    channel.queue_declare("ann-q", exclusive=True)
    for _ in range(3):  # it has been asked for, and so is remembered
        publish(channel, b"allowed", "ann-q")
        assert channel.basic_get("ann-q", auto_ack=True)[2] == b"allowed"
        warren_("permissions", "set", "ann", "^ann-", ".*", "")
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="access to queue 'ann-q' in vhost '/' refused"):
            channel.basic_get("ann-q")
        warren_("permissions", "set", "ann", "^ann-", ".*", ".*")
        channel = connection.channel()
    warren_("permissions", "set-topic", "ann", "amq.topic", "^a[.]", ".*")
    assert "amq.topic" in warren_("permissions", "list-topic")
    publish_topic(channel, "a.b")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match=r"access to topic 'b\.a'"):
        publish_topic(channel, "b.a")
    warren_("permissions", "clear-topic", "ann")
    publish_topic(connection.channel(), "b.a")
    warren_("permissions", "clear", "ann")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="refused for user 'ann'"):
        connection.channel().basic_get("ann-q")
    assert "ann" not in warren_("permissions", "list")
    warren_("users", "delete", "ann")


def test_who_is_handed_over_while_his_user_is_deleted_is_sent_away(tmp_path):
    """Between the node and the vhost there is a moment in which neither has the connection."""
    with running_broker(str(tmp_path)) as running:
        broker = running.broker
        broker.users.add_user("ann", "secret")
        broker.users.set_permissions("ann", "/", ".*", ".*", ".*")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)

        async def race() -> int:
            handing = asyncio.ensure_future(
                broker.running.hand_over(ours, Opened("ann", "/", 10, 131072, 0, {}, "somebody"))
            )
            broker.users.delete_user("ann")
            answer = await broker.running.operate("/", "connections/close", {"user": "ann", "why": "deleted"})
            await handing
            return int(answer["result"])

        assert running.call(race) == 0, "it was not there yet"
        with theirs:
            theirs.settimeout(20)
            said = b""
            while b"has lost access" not in said:
                received = theirs.recv(4096)
                assert received, said
                said += received
            assert b"user 'ann' has lost access to vhost '/'" in said
            theirs.sendall(method_frame(0, encode("connection.close-ok")))
            while theirs.recv(4096):
                pass


def publish_topic(channel: Any, key: str) -> None:
    channel.confirm_delivery()
    channel.basic_publish("amq.topic", key, b"")


def test_a_token_and_a_ticket_end_with_the_password_they_stem_from(broker, warren_):
    warren_("users", "add", "ann", "secret")
    warren_("permissions", "set", "ann", ".*", ".*", ".*")
    connect(broker).channel().queue_declare("tapped", durable=True)
    for number, change in enumerate((("passwd", "ann", "other"), ("delete", "ann"))):
        ask = Client(broker.http_url, "ann", ("secret", "other")[number])
        by_token = Client(broker.http_url, token=ask("token")["token"])
        taken = by_token("snapshots/take", vhost="/", queues=["tapped"], ttl=60)
        data_server = Client(taken["data_url"], token=taken["ticket"])
        assert plan(data_server) == 200
        assert heartbeat(broker, taken["ticket"]) == 200
        warren_("users", *change)
        status, answer = by_token.ask("snapshots/list")
        assert (status, answer["error"]) == (401, "unauthorized")
        assert "has another password, or is deleted" in answer["reason"]
        assert heartbeat(broker, taken["ticket"]) == 401
        assert plan(data_server) == 401
    guest = Client(broker.http_url)
    for held in guest("snapshots/list", vhost="/")["snapshots"]:
        guest.ask("snapshots/release", vhost="/", id=held["id"])


def test_a_ticket_ends_with_the_permission_to_read_in_its_vhost(broker, warren_):
    warren_("users", "add", "ann", "secret")
    connect(broker).channel().queue_declare("tapped", durable=True)
    ask = Client(broker.http_url, "ann", "secret")
    for taken_away in (("clear", "ann"), ("set", "ann", ".*", ".*", "^other$")):
        warren_("permissions", "set", "ann", "", "", "^tapped$")
        taken = ask("snapshots/take", vhost="/", queues=["tapped"], ttl=60)
        data_server = Client(taken["data_url"], token=taken["ticket"])
        warren_("permissions", "set", "ann", ".*", ".*", "^tapped$")  # may still read it
        assert (plan(data_server), heartbeat(broker, taken["ticket"])) == (200, 200)
        warren_("permissions", *taken_away)
        assert (plan(data_server), heartbeat(broker, taken["ticket"])) == (401, 401)
    warren_("users", "delete", "ann")
    guest = Client(broker.http_url)
    for held in guest("snapshots/list", vhost="/")["snapshots"]:
        guest.ask("snapshots/release", vhost="/", id=held["id"])


def plan(data_server: Client) -> int:
    call = urllib.request.Request(
        f"{data_server.url}/snapshots/plan",
        json.dumps({"options": {"queue": "tapped"}}).encode(),
        {"Authorization": data_server.authorization, "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(call, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def heartbeat(broker: Served, ticket: str) -> int:
    """As an executor asks: with its ticket alone."""
    url, body = f"{broker.http_url}/api/pipeline/snapshots/heartbeat", json.dumps({"ticket": ticket}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


# -- policies ----------------------------------------------------------------------------------------------------------


def test_policies_and_operator_policies_are_set_listed_and_cleared_and_queues_follow_at_once(broker, warren_):
    channel = connect(broker).channel()
    channel.queue_declare("short-q", exclusive=True)
    for number in range(5):
        publish(channel, b"%d" % number, "short-q")

    def length() -> int:
        return int(channel.queue_declare("short-q", passive=True).method.message_count)

    warren_("policies", "set", "short", "^short", '{"max-length": 3}', "--apply-to", "queues", "--priority", "7")
    assert length() == 3
    warren_("policies", "set", "limit", "^short", '{"max-length": 2}', "--operator")
    assert length() == 2
    [policy] = json.loads(warren_("policies", "list", "--json"))
    assert policy == {
        "vhost": "/",
        "name": "short",
        "pattern": "^short",
        "apply_to": "queues",
        "definition": {"max-length": 3},
        "priority": 7,
    }
    [policy] = json.loads(warren_("policies", "list", "--operator", "--json", "-p", "/"))
    assert policy["name"] == "limit"
    warren_("policies", "clear", "limit", "--operator")
    publish(channel, b"third", "short-q")
    assert length() == 3
    warren_("policies", "clear", "short")
    publish(channel, b"fourth", "short-q")
    assert length() == 4
    assert warren_("policies", "list") == "There are no policies.\n"


# -- the socket --------------------------------------------------------------------------------------------------------


def test_the_socket_is_its_owners_alone_and_goes_with_the_node(tmp_path):
    data_dir = tmp_path / ("deep" * 30) / "data"  # longer than the name of a socket can be
    data_dir.mkdir(parents=True)
    path = data_dir / SOCKET_NAME
    path.touch()  # as a node leaves it that was killed
    with running_broker(str(data_dir)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert states(commands(data_dir)) == {"/": "running"}
    assert not path.exists()
    assert f"warren serve --data-dir {data_dir}" in commands(data_dir)("vhosts", "list", code=1)


def test_nonsense_on_the_socket_harms_only_its_sender(broker):
    with ControlClient(broker.data_dir) as client:
        for name, arguments, why in (
            ("nope", {}, "there is no request 'nope'"),
            ("vhosts/add", {}, "missing a required argument: 'name'"),
            ("vhosts/add", {"name": "x", "colour": "red"}, "unexpected keyword argument 'colour'"),
            ("vhosts/add", {"name": 7}, "7 cannot be the name of a vhost"),
            ("users/add", {"user": "x", "password": 7}, "the password of user 'x' is empty"),
            ("users/tags", {"user": "guest", "tags": 7}, "an argument has a type that it cannot have"),
        ):
            with pytest.raises(Refused, match=re.escape(why)):
                client.call(name, **arguments)
    for data in (b"\xff\xff\xff\xff", b"\0\0\0\x01{", b"\0\0\0\x02[]", b'\0\0\0\x0c{"what": "x"}'[:15]):
        with ControlClient(broker.data_dir) as client:
            client._sock.sendall(data)
            client._sock.settimeout(20)
            client._sock.shutdown(1)
            assert client._sock.recv(1) == b""
    with ControlClient(broker.data_dir) as client:
        assert client.call("vhosts/list") == [{"name": "/", "state": "running"}]
        assert client.call("status")["vhosts"][0]["name"] == "/"


def test_two_who_change_the_same_vhost_take_turns(broker, warren_, orders):
    failures: list[BaseException] = []

    def restart() -> None:
        try:
            with ControlClient(broker.data_dir) as client:
                client.call("vhosts/restart", name=orders)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=restart) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert states(warren_)[orders] == "running"


def test_the_table_says_what_there_is():
    text = warren.node.control.__doc__ or ""
    said = set()
    for line in re.findall(r"^    ([a-z_]+(?:/[a-z]+)?(?:, [a-z]+)*)  ", text, re.M):
        first, *others = line.split(", ")
        said |= {first, *(f"{first.partition('/')[0]}/{other}" for other in others)}
    assert said == Broker(Config.load({"data_dir": "unused"}, environ={})).operations.table.keys()
