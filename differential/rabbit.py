"""A RabbitMQ to compare with: Debian's rabbitmq-server, on ports and in directories of its own.

Rules:

1. Its package is unpacked under build/ and never installed, so Debian's service cannot start and there is none to stop.
   What is installed, when we are root, is Erlang.
2. Every process is a child of ours, in the foreground: epmd too, which Erlang would otherwise start as a daemon and leave
   behind. They are ended by their process ids.
3. Everything it writes, cookie and logs included, is in a temporary directory that goes with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "differential"
_ERLANG_PARTS = (
    *("base", "crypto", "eldap", "inets", "mnesia", "os-mon", "parsetools", "public-key", "runtime-tools", "ssl"),
    *("syntax-tools", "tools", "xmerl"),
)
_ERLANG = [f"erlang-{part}" for part in _ERLANG_PARTS]
_START_SECONDS = 120
_STOP_SECONDS = 30
_CONFIGURATION = """\
disk_free_limit.absolute = 1MB
heartbeat = 60
log.file.level = error
"""


class NoRabbitError(Exception):
    """There is no RabbitMQ to compare with, and why."""


def install() -> Path:
    """Erlang and the unpacked package; does nothing when both are there. Returns the directory of its scripts."""
    if shutil.which("erl") is None or shutil.which("epmd") is None:
        if os.geteuid() != 0:
            raise NoRabbitError(
                f"Erlang is missing. Run: sudo apt-get install --no-install-recommends {' '.join(_ERLANG)}"
            )
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _run(["apt-get", "update", "-qq"], environment)
        _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *_ERLANG], environment)
    if found := _scripts():
        return found
    _PACKAGE_DIRECTORY.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_PACKAGE_DIRECTORY) as download:
        _run(["apt-get", "download", "-qq", "rabbitmq-server"], dict(os.environ), download)
        for package in Path(download).glob("rabbitmq-server_*.deb"):
            _run(["dpkg-deb", "-x", str(package), str(_PACKAGE_DIRECTORY / "rabbitmq")], dict(os.environ))
    if not (found := _scripts()):
        raise NoRabbitError("the package rabbitmq-server has no scripts where they were expected")
    return found


def _scripts() -> Path | None:
    pattern = "rabbitmq/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin"
    return next(iter(sorted(_PACKAGE_DIRECTORY.glob(pattern))), None)


def _run(command: list[str], environment: dict[str, str], directory: str | None = None) -> None:
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoRabbitError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def version() -> str:
    """Of the one that is compared with: '3.10.8'."""
    return install().parent.name.rpartition("-")[2]


@dataclass(frozen=True)
class Rabbit:
    """One that runs."""

    port: int  # on 127.0.0.1, where guest may do everything
    scripts: Path
    environment: dict[str, str]

    def set_memory_alarm(self, is_set: bool) -> None:
        alarm = "{resource_limit, memory, node()}"
        call = f"set_alarm({{{alarm}, []}})" if is_set else f"clear_alarm({alarm})"
        node = self.environment["RABBITMQ_NODENAME"]
        _run([str(self.scripts / "rabbitmqctl"), "-n", node, "eval", f"rabbit_alarm:{call}."], self.environment)


@contextlib.contextmanager
def running_rabbit() -> Iterator[Rabbit]:
    """RabbitMQ for the `with` block."""
    scripts = install()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warren-rabbitmq-")))
        port, epmd_port, distribution_port = _free_ports(3)
        environment = _environment(directory, port, epmd_port, distribution_port)
        with open(directory / "output", "wb") as output:
            epmd = subprocess.Popen(["epmd", "-port", str(epmd_port), "-address", "127.0.0.1"], env=environment)
            stack.callback(_stop, epmd)
            # With this variable the script becomes the Erlang machine instead of watching over it: one process to end.
            server = subprocess.Popen(
                [str(scripts / "rabbitmq-server")],
                env={**environment, "RUNNING_UNDER_SYSTEMD": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            stack.callback(_stop, server)
            _wait_for(server, port, directory)
            yield Rabbit(port, scripts, environment)


def _environment(directory: Path, port: int, epmd_port: int, distribution_port: int) -> dict[str, str]:
    (directory / "rabbitmq.conf").write_text(_CONFIGURATION)
    (directory / "enabled_plugins").write_text("[].\n")
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(directory),
        "LANG": "C.UTF-8",
        "ERL_EPMD_PORT": str(epmd_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"differential{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "no-such-file"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "generated"),
        "RABBITMQ_FEATURE_FLAGS_FILE": str(directory / "feature_flags"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_for(server: subprocess.Popen[bytes], port: int, directory: Path) -> None:
    """Until it answers to a protocol header; listening alone is too early."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as client:
            client.settimeout(5)
            client.sendall(b"AMQP\0\0\x09\x01")
            if client.recv(1) == b"\x01":
                return
        time.sleep(0.2)
    said = (directory / "output").read_text(errors="replace")[-4000:]
    raise NoRabbitError(f"RabbitMQ did not start:\n{said}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
