"""`warren users`: who may log in to a node that runs."""

from __future__ import annotations

from typing import Annotated

import typer

from warren.cli.node import AsJson, DataDir, node, password_of, show

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
Name = Annotated[str, typer.Argument(help="The user.")]
Tags = Annotated[list[str] | None, typer.Argument(help="Words such as administrator or monitoring.")]
Password = Annotated[
    str | None,
    typer.Argument(
        help="Better left away: others can see it in the list of processes. It is then asked for, or read from the "
        "standard input.",
        show_default=False,
    ),
]


@app.command("list")
def list_users(as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """Show all users and their tags."""
    with node(data_dir) as asked:
        show(asked.call("users/list"), "name", "tags", as_json=as_json, nothing="There are no users.")


@app.command()
def add(
    name: Name,
    password: Password = None,
    tag: Annotated[list[str] | None, typer.Option(help="A tag; may be given several times.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Make a user. He may do nothing before he has permissions: `warren permissions set`."""
    secret = password_of(name, password)
    with node(data_dir) as asked:
        asked.call("users/add", user=name, password=secret, tags=tag or [])
    typer.echo(f"user {name!r} is added")


@app.command()
def delete(name: Name, data_dir: DataDir = None) -> None:
    """Delete a user and all his permissions; his connections are closed, his tokens and tickets end."""
    with node(data_dir) as asked:
        asked.call("users/delete", user=name)
    typer.echo(f"user {name!r} is deleted")


@app.command()
def passwd(name: Name, password: Password = None, data_dir: DataDir = None) -> None:
    """Give a user another password. Connections stay; tokens and tickets of the old one end."""
    secret = password_of(name, password)
    with node(data_dir) as asked:
        asked.call("users/password", user=name, password=secret)
    typer.echo(f"user {name!r} has another password")


@app.command()
def tags(
    name: Name,
    tags: Tags = None,
    none: Annotated[bool, typer.Option("--none", help="Take all tags away.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Give a user these tags in place of those he has; without any, show his; `--none` takes them all away."""
    if none and tags:
        raise typer.BadParameter(f"--none takes all tags away; leave out {' '.join(tags)}, or --none")
    with node(data_dir) as asked:
        if tags or none:
            asked.call("users/tags", user=name, tags=tags or [])
        found = {user["name"]: user["tags"] for user in asked.call("users/list")}
    if name not in found:
        typer.echo(f"warren: there is no user {name!r}", err=True)
        raise typer.Exit(1)
    typer.echo(f"user {name!r} has the tags: {', '.join(found[name]) or 'none'}")
