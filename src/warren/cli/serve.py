"""`warren serve`: the broker."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from warren.errors import WarrenError
from warren.node.broker import Broker
from warren.node.config import Config, ConfigError
from warren.node.http import HttpServer
from warren.node.logs import configure
from warren.vhost.zygote import start_zygote

log = logging.getLogger("warren.node")


def serve(
    data_dir: Annotated[Path | None, typer.Option(help="The directory of everything that is kept.")] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.")] = None,
    amqp_port: Annotated[int | None, typer.Option(help="The port for AMQP; 0: any that is free.")] = None,
    http_port: Annotated[int | None, typer.Option(help="The port of the status page; 0: any that is free.")] = None,
    inline: Annotated[bool | None, typer.Option("--inline", help="All vhosts in this process.")] = None,
    durability: Annotated[str | None, typer.Option(help="What a confirm promises: fsync, os or memory.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with the same keys and more.")] = None,
) -> None:
    """Run the broker until it is told to stop (SIGTERM, Ctrl-C): it finishes its commits and exits with 0."""
    flags = {
        key: value
        for key, value in {
            "data_dir": data_dir,
            "host": host,
            "amqp_port": amqp_port,
            "http_port": http_port,
            "inline": inline,
            "durability": durability,
        }.items()
        if value is not None
    }
    try:
        loaded = Config.load(flags, file=config)
    except ConfigError as error:
        typer.echo(f"warren: {error}", err=True)
        raise typer.Exit(1) from None
    configure(loaded.log_format, loaded.log_level)
    _allow_many_files()
    zygote = None if loaded.inline else start_zygote()
    try:
        uvloop.run(_run(loaded, zygote))
    except (WarrenError, OSError) as error:
        log.error("%s", error)
        raise typer.Exit(1) from None


def _allow_many_files() -> None:
    """Each client is a descriptor; what a shell allows is meant for programs that have none."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run(config: Config, zygote: tuple[socket.socket, int] | None) -> None:
    broker = Broker(config, zygote)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    status = HttpServer(broker)
    await status.start()
    try:
        await broker.start()
        status.announce()
        _announce(config, broker, status)
        await _first(stopping, broker.given_up)
        log.info("stopping")
    finally:
        await broker.stop()
        await status.stop()
    log.info("stopped")
    if broker.given_up.is_set():
        raise WarrenError("a vhost failed too often, and vhost_restart_strategy is stop_node")


async def _first(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


def _announce(config: Config, broker: Broker, status: Any) -> None:
    log.info(
        "ready: AMQP on %s:%s, status page on %s://%s:%s, data in %s, durability %s",
        config.host,
        broker.amqp_port,
        "https" if config.tls.http else "http",
        config.host,
        status.port,
        config.data_dir,
        config.durability,
    )
    if broker.tls_port:
        log.info("AMQP over TLS on %s:%s", config.host, broker.tls_port)
