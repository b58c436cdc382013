"""How commands reach a running broker: its address and who asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from warren.errors import WarrenError
from warren.pipeline.broker_client import BrokerClient, Credentials

Url = Annotated[str, typer.Option(help="The broker's HTTP address.", envvar="WARREN_URL")]
User = Annotated[str, typer.Option(help="Who asks.", envvar="WARREN_USER")]
Password = Annotated[str, typer.Option(help="His password.", envvar="WARREN_PASSWORD", show_default=False)]
CaFile = Annotated[str | None, typer.Option(help="Certificates to trust, for https.", envvar="WARREN_CA_FILE")]
DEFAULT_URL = "http://127.0.0.1:15672"
_PATIENCE_SECONDS = 3.0


@contextlib.contextmanager
def asking(url: str, user: str, password: str, ca_file: str | None = None) -> Iterator[BrokerClient]:
    """A client; an error becomes one line and exit code 1."""
    credentials = Credentials(user=user, password=password)
    try:
        with BrokerClient(url, credentials, retry_seconds=_PATIENCE_SECONDS, ca_file=ca_file) as client:
            yield client
    except WarrenError as error:
        typer.echo(f"warren: {error}", err=True)
        raise typer.Exit(1) from None


def in_vhost(vhost: str | None) -> dict[str, Any]:
    """The argument for a list of one vhost, or of all."""
    return {} if vhost is None else {"vhost": vhost}
