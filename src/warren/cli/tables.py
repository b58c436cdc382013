"""Where tables are printed: as wide as the terminal, and wide enough where there is none."""

from __future__ import annotations

from rich.console import Console

_PLAIN_WIDTH = 160  # of a table that goes to a file or a pipe


def table_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=max(_PLAIN_WIDTH, console.width))
