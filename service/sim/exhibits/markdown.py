"""An exhibit as Markdown: what was published, the table, the pictures, and how to read them."""

from __future__ import annotations

from collections.abc import Iterator

from service.sim.exhibits.exhibit import Cell, Exhibit, Kind, Table

KIND_TEXT = {
    Kind.COMPUTED: "Computed from the cost model",
    Kind.SIMULATED: "Simulated",
    Kind.MEASURED: "Measured",
}


def exhibit_markdown(exhibit: Exhibit, picture_dir: str) -> str:
    """`picture_dir`: where the plots lie, as the page must name it."""
    parts = [
        f"### {exhibit.title}",
        f"*{KIND_TEXT[exhibit.kind]}.* Published: {exhibit.published}",
        table_markdown(exhibit.table),
        *(f"![{plot.title}]({picture_dir}/{plot.name}.png)" for plot in exhibit.plots),
        exhibit.reading,
    ]
    return "\n\n".join(parts) + "\n"


def table_markdown(table: Table) -> str:
    """Numbers to the right, texts to the left."""
    numeric = [all(not isinstance(row[n], str) for row in table.rows) for n in range(len(table.columns))]
    lines = ["| " + " | ".join(table.columns) + " |"]
    lines.append("| " + " | ".join("---:" if right else "---" for right in numeric) + " |")
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in table.rows]
    return "\n".join(lines)


def _cells(row: tuple[Cell, ...]) -> Iterator[str]:
    for cell in row:
        yield cell_text(cell)


def cell_text(cell: Cell) -> str:
    """Three significant digits for numbers that are not whole; thousands apart; nothing for None."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or cell == round(cell):
        return f"{cell:,.0f}"
    if abs(cell) >= 100.0:
        return f"{cell:,.0f}"
    return f"{cell:.3g}"
