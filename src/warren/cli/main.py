"""The `warren` command."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

import warren
from warren.cli import bench, config, leases, permissions, policies, serve, snapshots, spark, store, users, vhosts

app = typer.Typer(
    name="warren",
    help="Warren: durable queues, RabbitMQ-compatible.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(store.app, name="store", help="Look at, check, copy and restore data directories that no process owns.")

app.add_typer(config.app, name="config", help="What a node would run with, and where each value comes from.")
app.add_typer(leases.app, name="leases", help="What streams of Spark hold of a running broker's queues.")
app.add_typer(snapshots.app, name="snapshots", help="What readers hold of a running broker's store.")
app.add_typer(spark.app, name="spark", help="Jobs on Spark: verify, recover, compact, archive, replay, report, sql.")
app.add_typer(vhosts.app, name="vhosts", help="The vhosts of a running node: add, delete, stop, start, restart.")
app.add_typer(users.app, name="users", help="Who may log in to a running node.")
app.add_typer(permissions.app, name="permissions", help="What users may do in the vhosts of a running node.")
app.add_typer(policies.app, name="policies", help="Policies and operator policies of a running node.")
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"warren {warren.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Warren: durable queues, RabbitMQ-compatible."""
    # What the engine logs while a store is looked at, the commands show themselves; an error is one line.
    logging.getLogger("warren").addHandler(logging.NullHandler())


if __name__ == "__main__":
    app()
