"""A table of the lab on a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table as RichTable

from service.sim.exhibits.exhibit import Table
from service.sim.exhibits.markdown import cell_text


def rich_table(table: Table, title: str) -> RichTable:
    """Numbers to the right, texts to the left."""
    shown = RichTable(title=title, title_justify="left", box=box.ROUNDED, header_style="bold")
    for number, column in enumerate(table.columns):
        text = any(isinstance(row[number], str) for row in table.rows)
        shown.add_column(column, justify="left" if text else "right")
    for row in table.rows:
        shown.add_row(*(cell_text(cell) for cell in row))
    return shown
