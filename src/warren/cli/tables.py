"""Where tables are printed: as wide as the terminal, and wide enough where there is none."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_PLAIN_WIDTH = 160  # of a table that goes to a file or a pipe
_CELL_CHARACTERS = 80
_FIELD_CHARACTERS = 1000  # of a value in a record, which has lines to itself


def table_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=max(_PLAIN_WIDTH, console.width))


def print_rows(console: Console, names: Sequence[str], rows: Sequence[Sequence[str | None]]) -> None:
    """Rows with any number of columns: as a table where that fits, else one record under the other.

    None is a null. A table of thirty columns has one letter in a line of each, which nobody can read; and of a message most
    properties are not set, so columns in which all records have null are named once, at the end.
    """
    table = Table(*map(escape, names))
    for row in rows:
        table.add_row(*(escape(_shortened(value or "", _CELL_CHARACTERS)) for value in row))
    if not rows or Measurement.get(console, console.options.update(width=1 << 16), table).maximum <= console.width:
        console.print(table)
        return
    empty = {at for at in range(len(names)) if all(row[at] is None for row in rows)}
    shown = [(at, name) for at, name in enumerate(names) if at not in empty]
    margin = max((cell_len(name) for _, name in shown), default=0)
    for number, row in enumerate(rows, 1):
        title = f"-[ record {number:,} ]"
        console.print(title.ljust(min(console.width, margin + 20), "-"), style="bold", markup=False, highlight=False)
        for at, name in shown:
            console.print(
                _field(name, margin, _shortened(row[at] or "", _FIELD_CHARACTERS), console.width), soft_wrap=True
            )
    if empty:
        console.print(Text(f"null in all of them: {', '.join(names[at] for at in sorted(empty))}"))


def _shortened(text: str, most: int) -> str:
    """In characters that leave the terminal as it is."""
    shown = "".join(character if character.isprintable() else "·" for character in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _field(name: str, margin: int, value: str, width: int) -> Text:
    """A line of a record; a long value goes on below its beginning."""
    room = max(20, width - margin - 3)
    pieces = chop_cells(value, room) or [""]
    begin = name + " " * (margin - cell_len(name))
    return Text("\n").join(Text(f"{begin if not at else ' ' * margin} | {piece}") for at, piece in enumerate(pieces))
