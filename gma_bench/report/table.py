"""A table as data, and as Markdown, CSV, LaTeX and terminal text."""

from __future__ import annotations

import csv
import io
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from gma_bench.report.stats import mean_interval

if TYPE_CHECKING:
    from rich.console import Group

NOTHING = "—"
Better = Literal["max", "min"] | None
Kind = Literal["main", "variant", "baseline"]


@dataclass
class Column:
    """A column of figures.

    Attributes:
        key: its name in CSV, unit included (``tokens_per_s``).
        head: its name for readers.
        unit: shown in parentheses; empty for pure numbers.
        better: which end is best and set in bold, with what noise may part from it; None where
            neither is.
        digits: decimals shown.
        thousands: whether to group thousands.
    """

    key: str
    head: str
    unit: str = ""
    better: Better = None
    digits: int = 2
    thousands: bool = False
    reference: bool = False

    @property
    def title(self) -> str:
        """Head and unit."""
        return f"{self.head} ({self.unit})" if self.unit else self.head

    def number(self, value: float) -> str:
        """A value with this column's decimals."""
        shown = f"{value:{',' if self.thousands else ''}.{self.digits}f}"
        return shown.lstrip("-") if float(shown.replace(",", "")) == 0 else shown


@dataclass
class Cell:
    """A figure, what it is the mean of, and what became of the rest.

    Attributes:
        value: the mean; None shows ``text`` or a dash.
        std: sample standard deviation over seeds, where there are several.
        n: number of seeds behind the mean; 0 where counting them means nothing.
        text: shown in place of a value.
        suffix: shown after the value (an interval).
        digits: decimals, where they differ from the column's.
        notes: what a reader must know (a failed seed); each gets a mark.
        records: run ids behind the figure.
        sample: seed to value, where the figure is a mean over seeds.
    """

    value: float | None = None
    std: float | None = None
    n: int = 0
    text: str = ""
    suffix: str = ""
    digits: int | None = None
    notes: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    sample: dict[int, float] = field(default_factory=dict)
    best: bool = False

    def shown(self, column: Column, seeds: int) -> str:
        """``41.2 ± 0.5 (2)``, or the text in its place; ``seeds`` is the table's usual n."""
        if self.value is None:
            return self.text or NOTHING
        if self.digits is not None:
            column = replace(column, digits=self.digits)
        spread = "" if self.std is None else f" ± {column.number(self.std)}"
        count = f" ({self.n})" if self.n not in (0, seeds) else ""
        return f"{column.number(self.value)}{spread}{self.suffix}{count}"


@dataclass
class Row:
    """A line of the table: a mixer, one variant of its config, or a baseline."""

    label: str
    cells: list[Cell]
    variant: tuple[str, ...] = ()
    kind: Kind = "main"

    @property
    def name(self) -> str:
        """Label and what differs from the main line."""
        return f"{self.label} [{', '.join(self.variant)}]" if self.variant else self.label


@dataclass
class Table:
    """One setting's table.

    Attributes:
        id: its file name.
        title, caption: caption names scale and data.
        label_head: head of the first column.
        footnotes: sentences below it, besides the cells' own notes.
    """

    id: str
    title: str
    caption: str
    columns: list[Column]
    rows: list[Row]
    label_head: str = "mixer"
    footnotes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index, column in enumerate(self.columns):
            _mark_best(column, [row.cells[index] for row in self.rows if row.kind == "main"])

    @property
    def seeds(self) -> int:
        """The number of seeds behind most cells: the caption says it, other cells their own."""
        counts = Counter(cell.n for row in self.rows for cell in row.cells if cell.n)
        return max(counts, key=lambda n: (counts[n], n), default=0)

    @property
    def full_caption(self) -> str:
        """The caption with what the figures are means of."""
        several = f"Mean ± standard deviation over {self.seeds} seeds"
        plain = {0: "", 1: "One seed, so no standard deviation"}.get(self.seeds, several)
        odd = any(cell.n not in (0, self.seeds) for row in self.rows for cell in row.cells)
        exception = "; (n) where it is n seeds" if odd else ""
        text = f"{self.caption} {plain}{exception}." if plain else self.caption
        return f"{text} {self._bold()}".rstrip()

    def _bold(self) -> str:
        """What bold stands for, where anything is."""
        if not any(cell.best for row in self.rows for cell in row.cells):
            return ""
        if any(len(cell.sample) > 1 for row in self.rows for cell in row.cells if cell.best):
            return (
                "Bold: the best, and what its seeds do not tell from the best "
                "(the 95 % interval of paired differences holds 0)."
            )
        return "Bold: the best, by this one seed." if self.seeds == 1 else "Bold: the best."

    def shown(self, row: Row) -> list[str]:
        """The texts of a row's cells, marks left out."""
        return [
            cell.shown(column, self.seeds)
            for cell, column in zip(row.cells, self.columns, strict=True)
        ]

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Mark and sentence for every distinct note of a cell, in reading order."""
        texts = dict.fromkeys(n for row in self.rows for cell in row.cells for n in cell.notes)
        return [(mark(i), text) for i, text in enumerate(texts)]

    def marks(self, cell: Cell) -> str:
        """The marks of a cell, ``a,b``."""
        known = {text: letter for letter, text in self.notes}
        return ",".join(known[note] for note in cell.notes)


def mark(index: int) -> str:
    """a, b, …, z, aa, ab, …"""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return letters


def _mark_best(column: Column, cells: Sequence[Cell]) -> None:
    found = [(cell.value, cell) for cell in cells if cell.value is not None]
    if column.better is None or len(found) < 2:
        return
    value, best = (max if column.better == "max" else min)(found, key=lambda pair: pair[0])
    for own, cell in found:
        # What reads the same is the same: ties on the shown digits are all bold.
        same = column.number(own) == column.number(value)
        cell.best = same or not _told_apart(cell.sample, best.sample)


def _told_apart(one: dict[int, float], other: dict[int, float]) -> bool:
    """Whether seeds that both ran differ by more than chance; a single one is taken at its word."""
    differences = [one[seed] - other[seed] for seed in one.keys() & other.keys()]
    if len(differences) < 2:
        return True
    interval = mean_interval(differences)
    return interval.low is None or interval.high is None or not interval.low <= 0 <= interval.high


def markdown(table: Table) -> str:
    """GitHub-flavoured Markdown."""
    heads = [table.label_head, *(c.title for c in table.columns)]
    out = [f"**{escape_markdown(table.title)}.** {escape_markdown(table.full_caption)}", ""]
    out.append("| " + " | ".join(escape_markdown(h) for h in heads) + " |")
    out.append("|:--" + "|--:" * len(table.columns) + "|")
    for row in table.rows:
        cells = []
        for cell, text in zip(row.cells, table.shown(row), strict=True):
            shown = f"**{escape_markdown(text)}**" if cell.best else escape_markdown(text)
            cells.append(shown + (f"<sup>{table.marks(cell)}</sup>" if cell.notes else ""))
        out.append("| " + " | ".join([escape_markdown(row.name), *cells]) + " |")
    below = [f"<sup>{letter}</sup> {escape_markdown(text)}" for letter, text in table.notes]
    below += [escape_markdown(text) for text in table.footnotes]
    if below:
        out += ["", "  \n".join(below)]
    return "\n".join(out) + "\n"


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is written."""
    flat = " ".join(text.split())
    for character in "\\`*_[]<>|":
        flat = flat.replace(character, "\\" + character)
    return flat


def to_csv(table: Table) -> str:
    """A line a row, in full precision: value, standard deviation, seeds, records of each column."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    heads = [table.label_head, "variant", "kind"]
    for column in table.columns:
        heads += [column.key]
        if not column.reference:
            heads += [f"{column.key}_std", f"{column.key}_seeds", f"{column.key}_records"]
    writer.writerow([*heads, "notes"])
    for row in table.rows:
        line: list[object] = [row.label, " ".join(row.variant), row.kind]
        for cell, column in zip(row.cells, table.columns, strict=True):
            line.append(cell.text if cell.value is None else repr(cell.value))
            if not column.reference:
                line += ["" if cell.std is None else repr(cell.std), cell.n, " ".join(cell.records)]
        notes = dict.fromkeys(note for cell in row.cells for note in cell.notes)
        writer.writerow([*line, "; ".join(notes)])
    return buffer.getvalue()


TEX_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "±": r"$\pm$", "≤": r"$\leq$", "≥": r"$\geq$", "×": r"$\times$", "−": r"$-$", "≈": r"$\approx$",
    "—": "---", "–": "--", "…": r"\ldots{}", "²": r"\textsuperscript{2}", "→": r"$\rightarrow$",
    "·": r"$\cdot$", "µ": r"$\mu$", "γ": r"$\gamma$", "’": "'",
}  # fmt: skip


def tex_escape(text: str) -> str:
    """Text that pdfLaTeX prints as it is written; characters it has no glyph for become ``?``."""
    flat = " ".join(text.split())
    return "".join(
        TEX_SPECIAL.get(c, c if " " <= c <= "\x7e" or "\xa1" <= c <= "\xff" else "?") for c in flat
    )


def latex(table: Table) -> str:
    """A booktabs table for a two-column article; needs ``booktabs`` and ``graphicx``.

    Wide tables span both columns (``table*``); none is wider than its measure.
    """
    wide = len(table.columns) > 3
    environment, measure = ("table*", r"\textwidth") if wide else ("table", r"\columnwidth")
    heads = [table.label_head, *(c.title for c in table.columns)]
    body = []
    previous = None
    for row in table.rows:
        if previous is not None and (row.kind == "baseline") != (previous == "baseline"):
            body.append(r"\midrule")
        previous = row.kind
        cells = [tex_escape(row.name)]
        for cell, text in zip(row.cells, table.shown(row), strict=True):
            shown = rf"\textbf{{{tex_escape(text)}}}" if cell.best else tex_escape(text)
            marks = rf"\textsuperscript{{{table.marks(cell)}}}" if cell.notes else ""
            cells.append(shown + marks)
        body.append(" & ".join(cells) + r" \\")
    notes = [rf"\textsuperscript{{{letter}}} {tex_escape(text)}" for letter, text in table.notes]
    notes += [tex_escape(text) for text in table.footnotes]
    lines = [
        rf"\begin{{{environment}}}[t]",
        r"\centering\small",
        rf"\caption{{\textbf{{{tex_escape(table.title)}.}} {tex_escape(table.full_caption)}}}",
        rf"\label{{tab:{table.id}}}",
        r"\smallskip\setlength{\tabcolsep}{4pt}",
        # Scaled down only where it would stick out.
        rf"\resizebox{{\ifdim\width>{measure} {measure}\else\width\fi}}{{!}}{{%",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join([tex_escape(heads[0]), *(_stacked(h) for h in heads[1:])]) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}}",
    ]
    if notes:
        lines += [
            rf"\par\smallskip\begin{{minipage}}{{{measure}}}\footnotesize\raggedright",
            "\\par\n".join(notes),
            r"\end{minipage}",
        ]
    return "\n".join([*lines, rf"\end{{{environment}}}"]) + "\n"


def _stacked(head: str, width: int = 14) -> str:
    """A column's head in short lines, so that heads do not make the table wider than figures do."""
    lines = map(tex_escape, textwrap.wrap(head, width, break_long_words=False))
    return r"\begin{tabular}[b]{@{}r@{}}" + r" \\ ".join(lines) + r"\end{tabular}"


def terminal(table: Table) -> Group:
    """The table for a terminal; text from records is never read as markup."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    out = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    below = [f"{letter} {text}" for letter, text in table.notes] + table.footnotes
    # Outside the table, where they may be wider than it.
    caption = Text("\n".join([table.full_caption, *below]), style="dim")
    out.add_column(Text(table.label_head), no_wrap=False)
    for column in table.columns:
        out.add_column(Text(column.title), justify="right", style="dim" if column.reference else "")
    for row in table.rows:
        cells = [Text(row.name, style="" if row.kind == "main" else "dim")]
        for cell, shown in zip(row.cells, table.shown(row), strict=True):
            text = Text(shown, style="bold" if cell.best else "")
            if cell.notes:
                text.append(f" {table.marks(cell)}", style="italic")
            cells.append(text)
        out.add_row(*cells)
    return Group(Text(table.title, style="bold"), out, caption)
