"""Put what the contract asks, and what it finds in public layers, into docs/.

    .venv/bin/python docs/update_audit.py           # both pages; minutes
    .venv/bin/python docs/update_audit.py lines     # the table of lines in adding_a_mixer.md alone

Every layer is checked on a CPU in a process of its own, by the command that the page names.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from gma_bench.mixer.lines import LINES

DOCS = Path(__file__).resolve().parent
GUIDE, PAGE = DOCS / "adding_a_mixer.md", DOCS / "audit.md"
BLOCK = re.compile(r"(<!-- begin (?P<name>\S+) -->\n).*?(<!-- end (?P=name) -->)", re.DOTALL)
LAYERS = {
    "torch.nn.MultiheadAttention": "torch",
    "torch.nn.TransformerEncoderLayer": "torch",
    "torch.nn.GRU": "torch",
    "torch.nn.LSTM": "torch",
    "x_transformers.Attention": "x-transformers",
    "docs/layers/linformer.yaml": "linformer",
    "performer_pytorch.SelfAttention": "performer-pytorch",
    "nystrom_attention.NystromAttention": "nystrom-attention",
    "docs/layers/transformers_mamba.yaml": "transformers",
    "docs/layers/transformers_mamba2.yaml": "transformers",
    "docs/layers/transformers_rwkv.yaml": "transformers",
    "docs/layers/mambapy.yaml": "mambapy",
}
"""What ``layer=`` is given, and the distribution that it comes from."""
FORMS = ("bidirectional", "causal")


def lines_table() -> str:
    """What the contract asks, a row a line."""
    rows = [f"| {e.name} | {' '.join((e.check.__doc__ or '').split())} |" for e in LINES]
    return "\n".join(("| line | what is tried |", "|---|---|", *rows))


def fill(page: Path, blocks: dict[str, str]) -> None:
    """Replace what stands in a page's blocks."""

    def filled(block: re.Match[str]) -> str:
        text = blocks.get(block["name"])
        return block[0] if text is None else f"{block[1]}\n{text}\n\n{block[3]}"

    page.write_text(BLOCK.sub(filled, page.read_text(encoding="utf-8")), encoding="utf-8")


def checked(layer: str) -> list[dict[str, Any]]:
    """Results of ``gma-bench check layer=… --json``."""
    command = [sys.executable, "-m", "gma_bench.cli", "check", f"layer={layer}", "--json"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=DOCS.parent, env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode not in (0, 1):
        sys.exit(f"{shlex.join(command)}: exit {done.returncode}")
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def section(layer: str, package: str, results: list[dict[str, Any]]) -> str:
    """A layer's part of the page: its counts, how it was called, and every failure."""
    out = [f"### {results[0]['mixer']}", "", f"{package} {metadata.version(package)}"]
    out += ["", f"```sh\ngma-bench check layer={layer}\n```"]
    if layer.endswith(".yaml"):
        out += ["", f"```yaml\n{(DOCS.parent / layer).read_text(encoding='utf-8').strip()}\n```"]
    for form in FORMS:
        own = [r for r in results if r["form"] == form]
        builds, counts = own[0], Counter(r["status"] for r in own)
        if builds["status"] == "not applicable":
            out += ["", f"**{form}**: not applicable. {builds['detail']}"]
            continue
        said = ", ".join(
            f"{counts[status]} {status}" for status in ("pass", "fail", "not applicable")
        )
        out += ["", f"**{form}**: {said}; {builds['detail']}.", ""]
        out += [f"- {r['line']}: `{r['detail']}`" for r in own if r["status"] == "fail"]
    return "\n".join(out)


def main(what: str) -> None:
    """Rewrite the blocks of both pages, or of the guide alone."""
    fill(GUIDE, {"lines": lines_table()})
    if what == "lines":
        return
    sections, rows = [], ["| layer | package | bidirectional | causal |", "|---|---|---|---|"]
    for layer, package in LAYERS.items():
        results = checked(layer)
        sections.append(section(layer, package, results))
        cells = []
        for form in FORMS:
            own = Counter(r["status"] for r in results if r["form"] == form)
            has = own["pass"] or own["fail"]
            cells.append(f"{own['pass']} pass, {own['fail']} fail" if has else "no such form")
        name = f"{package} {metadata.version(package)}"
        rows.append(f"| {results[0]['mixer']} | {name} | {' | '.join(cells)} |")
    with_what = (
        f"Python {platform.python_version()}, torch {metadata.version('torch')}, on a CPU; "
        f"{len(LINES)} lines in each form, and whether it builds."
    )
    fill(PAGE, {"audit": "\n\n".join((with_what, "\n".join(rows), *sections))})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "all")
