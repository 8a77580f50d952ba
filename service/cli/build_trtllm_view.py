"""The plan of a TensorRT-LLM build as tables.

Fits 80 columns: what is long (calls, reasons, lists of fields) stands in columns that fold, and the grid is
a matrix of T-classes. A plan for the PyTorch backend has captured sizes where one for engines has profiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from build_scripts.trtllm.plan import TrtLlmPlan
    from build_scripts.trtllm.torch_plan import LlmCall

_COLOURS = ("green", "cyan", "blue", "magenta", "yellow", "red")


def render(plan: TrtLlmPlan) -> RenderableType:
    parts: tuple[RenderableType, ...]
    if plan.llm is not None:
        parts = (_captures(plan), _memory(plan), _calls(plan), _llm(plan.llm))
    else:
        parts = (
            *(_profiles(plan), _grid(plan), _memory(plan), _graphs(plan)),
            *(_calls(plan), _arguments(plan), _commands(plan)),
        )
    notes = (_note(f"Note: {note}.") for note in plan.notes)
    spaced: list[RenderableType] = []
    for part in (_head(plan), _steps(plan), *parts, *notes):
        spaced += [part, ""]
    return Group(*spaced[:-1])


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.ROUNDED, header_style="bold", title=title, title_justify="left")
    for column in columns:
        numeric = column in right
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def _head(plan: TrtLlmPlan) -> RenderableType:
    spec, target = plan.spec, plan.target
    rows = (
        ("bundle", spec.target),
        (
            "model",
            f"{spec.model} ({spec.architecture}), {spec.shape.parameters / 1e9:.2f}G parameters, {spec.dtype}"
            + ("" if spec.quantisation == "none" else f", {spec.quantisation}"),
        ),
        ("from", str(spec.checkpoint) if spec.checkpoint else f"{spec.repo} at {spec.revision}"),
        (
            "for",
            f"{target.gpu} (compute capability {target.compute_capability}), "
            f"TensorRT-LLM {target.tensorrt_llm}"
            + (f", TensorRT {target.tensorrt}" if target.tensorrt else ", its PyTorch backend"),
        ),
        (
            "bounds",
            f"passes of {plan.classes[-1]:,} tokens and {spec.requests_max} requests, "
            f"{spec.context_tokens_max:,} tokens a request, KV blocks of {spec.block_tokens}",
        ),
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Group(Text("Plan of a build; nothing is done, nothing was measured", style="bold"), table)


def _steps(plan: TrtLlmPlan) -> RenderableType:
    table = _table("Steps", "step", "what it does", "about", "writes", right=("about", "writes"))
    for step in plan.steps:
        size = "-" if not step.size_bytes else f"{step.size_bytes / 1e9:.1f} GB"
        does = Text(step.does)
        if step.after:
            does.append(f"\nafter {', '.join(step.after)}", style="dim")
        table.add_row(step.name, does, _minutes(step.time.seconds), size)
    table.columns[0].no_wrap = True
    size = "Sizes are of the weights in them, at the least."
    total = f"About {plan.time_s / 60:.0f} min in all, for orientation: no time here was measured."
    return Group(table, _note(f"{size} {total}"), _note(_time_bases(plan)))


def _time_bases(plan: TrtLlmPlan) -> str:
    """What each time rests on, said once for steps of the same."""
    by_basis: dict[str, list[str]] = {}
    for step in plan.steps:
        by_basis.setdefault(step.time.basis, []).append(step.name)
    return "Times: " + "; ".join(f"{', '.join(names)} ({basis})" for basis, names in by_basis.items()) + "."


def _profiles(plan: TrtLlmPlan) -> RenderableType:
    numbers = ("profile", "least T", "tuned at", "most T")
    table = _table("Profiles", "engine", *numbers, "takes passes of", right=numbers)
    for engine in plan.engines:
        one = len(engine.ranges) == 1
        for index, (low, best, high) in enumerate(engine.ranges):
            first = low if index == 0 else low + 1
            style = "" if one else _COLOURS[index]
            row = (engine.name.value, str(index), f"{low:,}", f"{best:,}", f"{high:,}")
            table.add_row(*row, Text(f"{first:,} to {high:,} tokens", style=style))
    return Group(
        table,
        _note(
            "A profile is a range of T, the tokens of a pass, tuned at its upper end; all profiles of an "
            "engine share one set of weights. Nothing is padded, and requests count apart from tokens: 1 to "
            f"{plan.spec.requests_max} in every profile."
        ),
    )


def _captures(plan: TrtLlmPlan) -> RenderableType:
    graphs = plan.graphs
    table = _table("Captured sizes", "size", "takes passes of", "at most padded", right=("size",))
    for low, size in zip((0, *plan.classes), plan.classes, strict=False):
        table.add_row(f"{size:,}", f"{low + 1:,} to {size:,} tokens", f"{size / (low + 1):.2f} x")
    least, most = graphs.captured_s
    whose = "interpolated" if graphs.estimated else "published"
    lines = (
        "A size is a piecewise graph of T, the tokens of a pass; attention stays outside of it. All share "
        "one set of weights.",
        "Memory of the graphs and time to capture them at every start: not measured here. Were each what "
        f"LAPS says of a whole prefill graph ({whose}: {graphs.graph_bytes_each / 1e6:.0f} MB, 8 to 12 s), "
        f"these {graphs.profiles} would take {graphs.captured_bytes / 1e9:.1f} GB and {least:.0f} to "
        f"{most:.0f} s. The {graphs.cells} cells of its grid take {graphs.graph_bytes / 1e9:.1f} GB and "
        f"{graphs.capture_s[0] / 60:.0f} to {graphs.capture_s[1] / 60:.0f} min.",
    )
    return Group(table, *map(_note, lines))


def _llm(call: LlmCall) -> RenderableType:
    words = (
        f"Given where the release has it: {', '.join(call.optional)}. max_tokens is the KV pool above; the "
        "build sets it from the real size of the weights."
    )
    return Group(
        Text("How tensorrt_llm.LLM is started, by verify, calibrate and the service", style="italic"),
        Text(call.text(), overflow="fold"),
        _note(words),
    )


def _grid(plan: TrtLlmPlan) -> RenderableType:
    spec = plan.spec
    columns = [f"B={batch}" for batch in spec.batches]
    table = _table("Grid: T = L x B, and the T-class that runs it", "L", *columns, right=("L", *columns))
    table.padding = (0, 1, 0, 0)
    rejected = []
    for length in spec.lengths:
        row: list[RenderableType] = [str(length)]
        for batch in spec.batches:
            cell = plan.cell(length, batch)
            if cell.class_index is None:
                rejected.append(cell)
                row.append(Text(f"{cell.tokens} -", style="dim"))
            else:
                row.append(Text(f"{cell.tokens} #{cell.class_index}", style=_COLOURS[cell.class_index]))
        table.add_row(*row)
    classes = ", ".join(f"#{index} up to {edge:,}" for index, edge in enumerate(plan.classes))
    tokens = {cell.tokens for cell in plan.cells}
    used = {cell.class_index for cell in plan.cells} - {None}
    lines = [f"{len(plan.cells)} cells, {len(tokens)} values of T, {len(used)} T-classes: {classes}."]
    lines += [f"Rejected: {cell.why}." for cell in rejected[:4]]
    if len(rejected) > 4:
        lines.append(f"Rejected likewise: {len(rejected) - 4} more.")
    return Group(table, *map(_note, lines))


def _memory(plan: TrtLlmPlan) -> RenderableType:
    memory, spec = plan.memory, plan.spec
    table = _table(f"Memory on the {spec.gpu}", "part", "size", "basis", right=("size",))
    for figure in memory.figures:
        table.add_row(figure.name, f"{figure.size_bytes / 1e9:.1f} GB", figure.basis)
    table.columns[0].no_wrap = True
    lines = []
    for figure in memory.figures:
        if figure.at_most_bytes is not None:
            worst = memory.kv_tokens_worst
            left = "no room for one request" if worst is None else f"{worst:,} tokens of KV"
            lines.append(
                f"Without the GEMM plugin the {figure.name} may grow to {figure.at_most_bytes / 1e9:.0f} GB, "
                f"were each profile to keep a layout of its own; that would leave {left}. Not measured: the "
                "build does."
            )
    return Group(table, *map(_note, lines))


def _graphs(plan: TrtLlmPlan) -> RenderableType:
    graphs = plan.graphs
    low, high = (seconds / 60 for seconds in graphs.capture_s)
    table = _table(
        f"The {graphs.cells} cells in three ways", "", "captured graphs", "one engine a cell", "profiles"
    )
    weights = f"{graphs.weights_bytes / 1e9:.1f} GB"
    each = f"{graphs.cells} x {graphs.graph_bytes_each / 1e6:.0f} MB = {graphs.graph_bytes / 1e9:.1f} GB"
    source = "LAPS, interpolated (estimated)" if graphs.estimated else "LAPS, published"
    copies = f"{graphs.cells} copies, {graphs.engine_per_cell_bytes / 1e9:,.0f} GB"
    rows = (
        ("weights", f"{weights}, once", copies, f"{weights}, once"),
        ("beside them", each, "-", "not measured here"),
        ("at every start", f"{low:.0f} to {high:.0f} min of capture", "load all", "load one"),
        ("pads", "up to the cell", "up to the cell", "never"),
        ("saves launches", "yes", "no", "no"),
        ("source", source, "arithmetic", "TensorRT-LLM's rules"),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _calls(plan: TrtLlmPlan) -> RenderableType:
    rows: dict[tuple[str, ...], list[str]] = {}
    for step in plan.steps:
        if step.calls:
            rows.setdefault(step.calls, []).append(step.name + ("" if step.inside else " (here)"))
    table = _table("Calls", "step", "call")
    for calls, names in rows.items():
        table.add_row("\n".join(names), "\n".join(map(_broken, calls)))
    table.columns[0].no_wrap = True
    words = "They run in the environment of --python, those marked (here) apart. Words in braces are paths."
    return Group(table, _note(words))


def _broken(call: str) -> str:
    """A long call with its arguments on lines of their own."""
    head, bracket, rest = call.partition("(")
    return call if len(call) < 56 else f"{head}{bracket}\n  {rest}"


def _arguments(plan: TrtLlmPlan) -> RenderableType:
    """What all builds have in common, then where they differ."""
    builds = {step: arguments for engine in plan.engines for step, arguments in engine.arguments.items()}
    parts: list[RenderableType] = [Text("Arguments of every build", style="italic")]
    differing: list[tuple[str, list[Any]]] = []
    for kind, title in (("plugin_config", "PluginConfig"), ("build_config", "BuildConfig")):
        configs = [arguments[kind] for arguments in builds.values()]
        same = []
        for name, first in configs[0].items():
            values = [config[name] for config in configs]
            if all(value == first for value in values):
                same.append(f"{name}={first!r}")
            else:
                differing.append((name, values))
        parts.append(Text(f"{title}({', '.join(same)})", overflow="fold"))
    if differing:
        table = _table("and by build", "field", *(step.removeprefix("build-") for step in builds))
        for name, values in differing:
            table.add_row(name, *map(repr, values))
        parts.append(table)
    return Group(*parts)


def _commands(plan: TrtLlmPlan) -> RenderableType:
    """One command in full; of the others what is different in them."""
    commands = {step: words for engine in plan.engines for step, words in engine.commands.items()}
    (first, words), *others = commands.items()
    flags = _flags(words)
    parts: list[RenderableType] = [
        Text(f"Nearest command, of {first}; the pipeline calls the API", style="italic"),
        Text(_lines([words[0], *(f"{flag} {value}" for flag, value in flags.items())])),
    ]
    for step, other in others:
        changed = [f"{flag} {value}" for flag, value in _flags(other).items() if flags.get(flag) != value]
        parts.append(Text(f"{step}: the same with {' '.join(changed)}"))
    parts.append(_note("What has no flag takes its default there; opt_batch_size is then 8."))
    return Group(*parts)


def _flags(words: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(words[1::2], words[2::2], strict=True))


def _lines(parts: list[str], width: int = 76) -> str:
    """Parts in lines that a shell takes as one, none of them broken."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + 1 + len(part) > width:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return " \\\n".join(lines)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _note(text: str) -> Text:
    return Text(text, style="dim")
