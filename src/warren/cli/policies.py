"""`warren policies`: settings for many queues and exchanges at once, by a pattern of their names."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from warren.cli.node import AsJson, DataDir, OneVhost, Vhost, node, show

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
Name = Annotated[str, typer.Argument(help="The policy.")]
Operator = Annotated[bool, typer.Option("--operator", help="An operator policy: of limits the lower one counts.")]


@app.command("list")
def list_policies(
    vhost: OneVhost = None, operator: Operator = False, as_json: AsJson = False, data_dir: DataDir = None
) -> None:
    """Show the policies of a vhost, or of all that run."""
    with node(data_dir) as asked:
        found = asked.call("policies/list", vhost=vhost, operator=operator)
    columns = ("vhost", "name", "pattern", "apply_to", "definition", "priority")
    show(found, *columns, as_json=as_json, nothing="There are no policies.")


@app.command("set")
def set_policy(
    name: Name,
    pattern: Annotated[str, typer.Argument(help="A regular expression, found in names of queues or exchanges.")],
    definition: Annotated[str, typer.Argument(help='JSON, such as {"max-length": 1000}.')],
    priority: Annotated[int, typer.Option(help="Of several that fit the highest counts.")] = 0,
    apply_to: Annotated[str, typer.Option(help="queues, classic_queues, exchanges or all.")] = "all",
    vhost: Vhost = "/",
    operator: Operator = False,
    data_dir: DataDir = None,
) -> None:
    """Make or replace a policy; queues and exchanges follow it at once."""
    try:
        said = json.loads(definition)
    except ValueError as error:
        typer.echo(f"warren: the definition {definition!r} is not JSON: {error}", err=True)
        raise typer.Exit(1) from None
    with node(data_dir) as asked:
        asked.call(
            "policies/set",
            vhost=vhost,
            operator=operator,
            name=name,
            pattern=pattern,
            definition=said,
            apply_to=apply_to,
            priority=priority,
        )
    typer.echo(f"policy {name!r} holds in vhost {vhost!r}")


@app.command("clear")
def clear_policy(name: Name, vhost: Vhost = "/", operator: Operator = False, data_dir: DataDir = None) -> None:
    """Take a policy away; queues and exchanges follow at once."""
    with node(data_dir) as asked:
        asked.call("policies/clear", vhost=vhost, operator=operator, name=name)
    typer.echo(f"policy {name!r} is cleared in vhost {vhost!r}")
