"""Put what the dry run says into docs/scaling.md, so that none of its figures is typed by hand.

.venv/bin/python docs/update_scaling.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "scaling.md"
BLOCK = re.compile(r"(<!-- begin dry-run -->\n).*?(<!-- end dry-run -->)", re.DOTALL)
COMMAND = "gma-bench reproduce --dry-run scale=paper --only task=listops,text,wikitext103,interpretability"


def main() -> None:
    """Run the command of the page's block and replace what it printed."""
    words = [sys.executable, "-m", "gma_bench.cli", *COMMAND.split()[1:]]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"COLUMNS": "120"}
    )
    lines = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    text = f"\n```\n$ {COMMAND}\n{lines}\n```\n\n"
    filled = BLOCK.sub(lambda block: block[1] + text + block[2], PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
