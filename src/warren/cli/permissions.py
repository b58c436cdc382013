"""`warren permissions`: what users may do in the vhosts of a node that runs."""

from __future__ import annotations

from typing import Annotated

import typer

from warren.cli.node import AsJson, DataDir, OneVhost, Vhost, node, show

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
User = Annotated[str, typer.Argument(help="The user.")]
OneUser = Annotated[str | None, typer.Option(help="Only of this user.")]
Configure = Annotated[str, typer.Argument(help="A regular expression: what the user may declare and delete.")]
Write = Annotated[str, typer.Argument(help="... publish to, and bind.")]
Read = Annotated[str, typer.Argument(help="... consume from, and bind to.")]
Exchange = Annotated[str, typer.Argument(help="A topic exchange.")]


@app.command("list")
def list_permissions(
    vhost: OneVhost = None, user: OneUser = None, as_json: AsJson = False, data_dir: DataDir = None
) -> None:
    """Show all permissions."""
    with node(data_dir) as asked:
        found = asked.call("permissions/list", vhost=vhost, user=user)
    columns = ("user", "vhost", "configure", "write", "read")
    show(found, *columns, as_json=as_json, nothing="There are no permissions.")


@app.command("set")
def set_permissions(
    user: User, configure: Configure, write: Write, read: Read, vhost: Vhost = "/", data_dir: DataDir = None
) -> None:
    """Allow a user what these expressions are found in; also clients that are connected feel it at once."""
    with node(data_dir) as asked:
        asked.call("permissions/set", user=user, vhost=vhost, configure=configure, write=write, read=read)
    typer.echo(f"user {user!r} has these permissions in vhost {vhost!r}")


@app.command("clear")
def clear_permissions(user: User, vhost: Vhost = "/", data_dir: DataDir = None) -> None:
    """Allow a user nothing in a vhost."""
    with node(data_dir) as asked:
        asked.call("permissions/clear", user=user, vhost=vhost)
    typer.echo(f"user {user!r} may do nothing in vhost {vhost!r}")


@app.command("list-topic")
def list_topic_permissions(
    vhost: OneVhost = None, user: OneUser = None, as_json: AsJson = False, data_dir: DataDir = None
) -> None:
    """Show all topic permissions."""
    with node(data_dir) as asked:
        found = asked.call("topic_permissions/list", vhost=vhost, user=user)
    columns = ("user", "vhost", "exchange", "write", "read")
    show(found, *columns, as_json=as_json, nothing="There are no topic permissions.")


@app.command("set-topic")
def set_topic_permissions(
    user: User, exchange: Exchange, write: Write, read: Read, vhost: Vhost = "/", data_dir: DataDir = None
) -> None:
    """Narrow a topic exchange for a user to the routing keys that these expressions are found in."""
    with node(data_dir) as asked:
        asked.call("topic_permissions/set", user=user, vhost=vhost, exchange=exchange, write=write, read=read)
    typer.echo(f"user {user!r} is narrowed by exchange {exchange!r} in vhost {vhost!r}")


@app.command("clear-topic")
def clear_topic_permissions(
    user: User,
    exchange: Annotated[str | None, typer.Argument(help="A topic exchange; if not given, all.")] = None,
    vhost: Vhost = "/",
    data_dir: DataDir = None,
) -> None:
    """Narrow a user no more by one exchange, or by all of a vhost."""
    with node(data_dir) as asked:
        asked.call("topic_permissions/clear", user=user, vhost=vhost, exchange=exchange)
    typer.echo(f"user {user!r} is not narrowed by {exchange or 'any exchange'} in vhost {vhost!r}")
