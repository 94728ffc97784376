"""Put the tables that a run produced into the README, so that none of its figures is typed by hand.

    .venv/bin/python docs/update_readme.py results/mini

Text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is replaced by the file NAME of the
results folder (``tables/lra.md``, ``claims.md``).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- begin (?P<name>\S+) -->\n).*?(<!-- end (?P=name) -->)", re.DOTALL)


def main(results: Path) -> None:
    """Rewrite every block of the README that ``results`` has a file for."""

    def fill(block: re.Match[str]) -> str:
        source = results / block["name"]
        if not source.exists():
            sys.exit(f"{source} is missing; run: make reproduce")
        # Headings of a table file would break the README's own outline.
        text = re.sub(r"^#+ (.*)$", r"**\1**", source.read_text().strip(), flags=re.MULTILINE)
        return f"{block[1]}\n{text}\n\n{block[3]}"

    README.write_text(BLOCK.sub(fill, README.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
