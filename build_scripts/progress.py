"""How a build tells what it is doing: a small protocol, silent or shown with rich."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Progress(Protocol):
    """Hears of each step in order: `begin`, any number of `update`, then `end`; or `skip` alone."""

    def begin(self, step: str, detail: str) -> None: ...

    def update(self, share: float, detail: str = "") -> None:
        """`share`: how much of the present step is through, 0 to 1."""

    def end(self, detail: str) -> None: ...

    def skip(self, step: str) -> None:
        """The outputs of an earlier build are used."""


class Silent:
    """Shows nothing."""

    def begin(self, step: str, detail: str) -> None: ...

    def update(self, share: float, detail: str = "") -> None: ...

    def end(self, detail: str) -> None: ...

    def skip(self, step: str) -> None: ...


class RichProgress:
    """One line a step on a terminal, with a bar while it runs. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        from rich import progress
        from rich.table import Column

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}", table_column=Column(width=9, no_wrap=True)),
            progress.BarColumn(16, table_column=Column(width=16)),
            progress.TimeElapsedColumn(table_column=Column(width=7, no_wrap=True)),
            progress.TextColumn("{task.fields[detail]}", table_column=Column(overflow="fold")),
            console=console,
        )
        self._task: progress.TaskID | None = None

    def __enter__(self) -> RichProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, step: str, detail: str) -> None:
        self._task = self._bars.add_task(step, total=1.0, detail=detail)

    def update(self, share: float, detail: str = "") -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=share)
            if detail:
                self._bars.update(self._task, detail=detail)

    def end(self, detail: str) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=1.0, detail=detail)

    def skip(self, step: str) -> None:
        self._bars.update(self._bars.add_task(step, total=1.0, detail="as before"), completed=1.0)
