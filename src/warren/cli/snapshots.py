"""`warren snapshots`: what readers hold of a running broker's store."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from warren.cli.broker import DEFAULT_URL, CaFile, Password, Url, User, asking, in_vhost
from warren.cli.tables import table_console

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.command("list")
def list_snapshots(
    vhost: Annotated[str | None, typer.Option(help="Only of this vhost.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = DEFAULT_URL,
    user: User = "guest",
    password: Password = "guest",
    ca_file: CaFile = None,
) -> None:
    """Show all snapshots that readers hold: of which queues, how many messages, how long they stay."""
    with asking(url, user, password, ca_file) as broker:
        snapshots = broker.call("snapshots/list", **in_vhost(vhost))["snapshots"]
    if as_json:
        typer.echo(json.dumps(snapshots, indent=1))
        return
    longest = max((len(one["id"]) for one in snapshots), default=0)  # never cut: `release` wants it whole
    table = Table(
        "vhost", Column("id", no_wrap=True, min_width=longest), "user", "queues", "messages", "taken", "stays"
    )
    now = time.time()
    for one in snapshots:
        names = sorted(one["queues"])
        cells = (
            one["vhost"],
            one["id"],
            one["user"],
            ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            f"{one['messages']:,}",
            f"{now - one['taken_at']:.0f} s ago",
            f"{one['until'] - now:.0f} s more",
        )
        table.add_row(*map(escape, cells))
    table_console().print(table if snapshots else "There are no snapshots.")


@app.command()
def release(
    id: Annotated[str | None, typer.Argument(help="As `warren snapshots list` shows it.")] = None,
    group: Annotated[str | None, typer.Option(help="All that were read with this snapshotGroup.")] = None,
    vhost: Annotated[str, typer.Option(help="The vhost.")] = "/",
    url: Url = DEFAULT_URL,
    user: User = "guest",
    password: Password = "guest",
    ca_file: CaFile = None,
) -> None:
    """End a snapshot now. Who still reads it fails."""
    if (id is None) == (group is None):
        raise typer.BadParameter("give the id of a snapshot, or --group")
    with asking(url, user, password, ca_file) as broker:
        released = broker.call("snapshots/release", vhost=vhost, id=id, group=group)["released"]
    typer.echo(f"snapshot {id} is released" if id is not None else f"{released} snapshots of {group} are released")
