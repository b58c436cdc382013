"""How commands reach a node that runs: by its control socket, in its data directory."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from warren.cli.tables import table_console
from warren.errors import WarrenError
from warren.node.config import Config, ConfigError
from warren.node.control import ControlClient

DataDir = Annotated[
    Path | None,
    typer.Option(help="The node's data directory; if not given, the configured one (WARREN_DATA_DIR, WARREN_CONFIG)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Vhost = Annotated[str, typer.Option("--vhost", "-p", help="The vhost.")]
OneVhost = Annotated[str | None, typer.Option("--vhost", "-p", help="Only of this vhost.")]


@contextlib.contextmanager
def node(data_dir: Path | None) -> Iterator[ControlClient]:
    """A node to ask; an error becomes one line and exit code 1."""
    try:
        with ControlClient(data_dir if data_dir is not None else Config.load().data_dir) as client:
            yield client
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"warren: {problem}", err=True)
        raise typer.Exit(1) from None
    except WarrenError as error:
        typer.echo(f"warren: {error}", err=True)
        raise typer.Exit(1) from None


def show(rows: Iterable[Mapping[str, Any]], *columns: str, as_json: bool, nothing: str) -> None:
    """A table of these columns, or JSON."""
    found = [{column: row[column] for column in columns} for row in rows]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    if not found:
        typer.echo(nothing)
        return
    table = Table(*(Column(column, overflow="fold") for column in columns))  # names are needed whole
    for row in found:
        table.add_row(*(escape(_shown(value)) for value in row.values()))
    table_console().print(table)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def password_of(user: str, given: str | None) -> str:
    """As it was given; else asked for at a terminal, else the first line of the standard input."""
    if given is not None:
        return given
    if sys.stdin.isatty():
        asked: str = typer.prompt(f"Password of {user}", hide_input=True, confirmation_prompt=True)
        return asked
    line = sys.stdin.readline().rstrip("\r\n")
    if not line:
        typer.echo(
            f"warren: there is no password for user {user!r}: write it to the standard input, one line", err=True
        )
        raise typer.Exit(1)
    return line
