"""`warren vhosts`: the vhosts of a node that runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from warren.cli.node import AsJson, DataDir, node, show

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
Name = Annotated[str, typer.Argument(help="The vhost.")]


def at_terminal() -> bool:
    return sys.stdin.isatty()


@app.command("list")
def list_vhosts(as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """Show all vhosts and whether they run."""
    with node(data_dir) as asked:
        show(asked.call("vhosts/list"), "name", "state", as_json=as_json, nothing="There are no vhosts.")


@app.command()
def add(name: Name, data_dir: DataDir = None) -> None:
    """Make a vhost and start it. Nobody may connect to it before he has permissions: `warren permissions set`."""
    with node(data_dir) as asked:
        asked.call("vhosts/add", name=name)
    typer.echo(f"vhost {name!r} is added and runs")


@app.command()
def delete(
    name: Name,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask. Where there is no terminal, nobody is asked.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Delete a vhost with all its queues and messages, and all permissions in it. Its clients are sent away."""
    if not yes and at_terminal():
        typer.confirm(f"Delete vhost {name!r} with all its queues and messages?", abort=True)
    with node(data_dir) as asked:
        asked.call("vhosts/delete", name=name)
    typer.echo(f"vhost {name!r} is deleted")


@app.command()
def stop(name: Name, data_dir: DataDir = None) -> None:
    """Stop a vhost: its clients are sent away, nobody gets in. It comes back by `start`, or with the node."""
    with node(data_dir) as asked:
        asked.call("vhosts/stop", name=name)
    typer.echo(f"vhost {name!r} is stopped")


@app.command()
def start(name: Name, data_dir: DataDir = None) -> None:
    """Start a vhost that was stopped, or that failed too often."""
    with node(data_dir) as asked:
        asked.call("vhosts/start", name=name)
    typer.echo(f"vhost {name!r} runs")


@app.command()
def restart(name: Name, data_dir: DataDir = None) -> None:
    """Stop a vhost and start it again; its clients have to connect anew, those of others notice nothing."""
    with node(data_dir) as asked:
        asked.call("vhosts/restart", name=name)
    typer.echo(f"vhost {name!r} runs again")
