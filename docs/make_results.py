"""Write docs/results.md and its pictures from the runs recorded in docs/results.

python docs/make_results.py                      the page and the pictures, from docs/results/*.jsonl
python docs/make_results.py take NAME FILE...    first take runs in, as docs/results/NAME.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from results_page.intake import take  # noqa: E402
from results_page.page import page  # noqa: E402
from results_page.page import read  # noqa: E402
from results_page.pictures import drawn  # noqa: E402

from veloxquant.errors import VeloxQuantError  # noqa: E402

FOLDER = DOCS / "results"
PAGE = DOCS / "results.md"


def main(words: list[str] | None = None) -> int:
    """Do what the command line says; 1 where that cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="with take: name of the text that was read, where it is not the sample text")
    parser.add_argument("take", nargs="?", choices=["take"])
    parser.add_argument("name", nargs="?")
    parser.add_argument("files", nargs="*", metavar="FILE")
    asked = parser.parse_args(words)
    if asked.take and not asked.files:
        parser.error("take wants NAME and FILE")
    try:
        if asked.take:
            take(asked.files, FOLDER / f"{asked.name}.jsonl", asked.text)
        found = read(FOLDER)
        names = drawn(found, FOLDER) if found else []
        PAGE.write_text(page(found, names), encoding="utf-8")
    except VeloxQuantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{PAGE.name}: {len(found)} runs, {len(names)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
