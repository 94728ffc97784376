"""The LaTeX tables go into a two-column article as they are."""

from __future__ import annotations

import io
import re
import shutil
import subprocess

import pytest
from rich.console import Console

from gma_bench.report import report

ARTICLE = r"""\documentclass[twocolumn]{article}
\usepackage[utf8]{inputenc}
\usepackage{booktabs,graphicx}
\begin{document}
%s
\end{document}
"""


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex (texlive-latex-base)")
def test_tables_compile_in_a_two_column_article(
    tmp_path, make_grid, make_profiling, make_failed, synthetic, write_records
):
    odd = r"a_b&c%d$e#f{g}~^\h <i> “quoted” ± é 日本"
    records = make_grid() + make_profiling() + [make_failed("text", "gma", 7, odd)]
    records.append(synthetic("mqar", "gma", data={"name": odd, "source": "x", "fingerprint": "1"}))
    folder = write_records(tmp_path / "results", records)
    report(folder, "mini", against=folder, console=Console(file=io.StringIO()))
    tables = sorted((folder / "mini" / "tables").glob("*.tex"))
    assert len(tables) >= 8
    (tmp_path / "article.tex").write_text(
        ARTICLE % "\n".join(rf"\input{{{path.as_posix()}}}\clearpage" for path in tables)
    )
    run = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "article.tex"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    # In points; captions and notes may stretch a little, tables stick out nowhere.
    overfull = [float(w) for w in re.findall(r"Overfull \\hbox \(([\d.]+)pt", run.stdout)]
    assert max(overfull, default=0) < 5, run.stdout[-3000:]
