"""`warren config`: what a node would run with, and where each value comes from."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from warren.cli.tables import table_console
from warren.node.config import DEFAULT, Config, ConfigError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _config() -> None:
    """What a node would run with, and where each value comes from."""


@app.command()
def show(
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="A TOML file; if not given, the one WARREN_CONFIG names."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every key, its value and its origin: the defaults, the file, the environment. Secrets are masked."""
    try:
        loaded = Config.load(file=config)
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"warren: {problem}", err=True)
        raise typer.Exit(1) from None
    entries = loaded.entries()
    if as_json:
        typer.echo(json.dumps([entry._asdict() for entry in entries], indent=1))
        return
    table = Table("key", "value", "origin", "meaning")
    for entry in entries:
        # What somebody has set stands out from what nobody has touched.
        style = "dim" if entry.origin == DEFAULT else "bold"
        cells = (entry.key, _shown(entry.value), entry.origin, entry.description)
        table.add_row(*map(escape, cells), style=style)
    table_console().print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
