"""`warren leases`: what streams of Spark hold of a running broker's queues."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from warren.cli.broker import DEFAULT_URL, CaFile, Password, Url, User, asking, in_vhost
from warren.cli.tables import table_console

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
Name = Annotated[str, typer.Argument(help="The lease: the option `lease` of the stream.")]
Vhost = Annotated[str, typer.Option(help="The vhost.")]


@app.command("list")
def list_leases(
    vhost: Annotated[str | None, typer.Option(help="Only of this vhost.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = DEFAULT_URL,
    user: User = "guest",
    password: Password = "guest",
    ca_file: CaFile = None,
) -> None:
    """Show all leases: who holds them, what they have checked out, when their holder was last heard of."""
    with asking(url, user, password, ca_file) as broker:
        leases = broker.call("leases/list", **in_vhost(vhost))["leases"]
    if as_json:
        typer.echo(json.dumps(leases, indent=1))
        return
    table = Table(
        "vhost", Column("lease", overflow="fold"), "state", "queues", "messages", "checkouts", "heard of", "owner"
    )
    for lease in leases:
        heard = lease["heard_seconds_ago"]
        cells = (
            lease["vhost"],
            lease["lease"],
            lease["state"],
            lease["pattern"] or ", ".join(lease["queues"] or ()),
            f"{lease['messages']:,}",
            ", ".join(map(str, lease["checkouts"])) or "-",
            "-" if heard is None else f"{heard} s ago",
            str(lease["owner"]),
        )
        table.add_row(*map(escape, cells), style="bold" if lease["state"] == "active" else None)
    table_console().print(table if leases else "There are no leases.")


@app.command()
def requeue(
    lease: Name,
    vhost: Vhost = "/",
    url: Url = DEFAULT_URL,
    user: User = "guest",
    password: Password = "guest",
    ca_file: CaFile = None,
) -> None:
    """Put what a lease has checked out back into its queues. Its stream must begin with a new checkpoint then."""
    with asking(url, user, password, ca_file) as broker:
        done = broker.call("leases/requeue", vhost=vhost, lease=lease)
    typer.echo(f"{done['requeued']:,} messages of lease {lease!r} are ready again")


@app.command()
def release(
    lease: Name,
    vhost: Vhost = "/",
    also_requeue: Annotated[bool, typer.Option("--requeue", help="Requeue what is checked out first.")] = False,
    url: Url = DEFAULT_URL,
    user: User = "guest",
    password: Password = "guest",
    ca_file: CaFile = None,
) -> None:
    """Forget a lease. One that has messages checked out is refused, unless they are requeued."""
    with asking(url, user, password, ca_file) as broker:
        done = broker.call("leases/release", vhost=vhost, lease=lease, requeue=also_requeue)
    typer.echo(f"lease {lease!r} is released; {done['requeued']:,} messages are ready again")
