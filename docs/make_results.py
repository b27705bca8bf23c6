"""Write docs/results.md and its pictures from the runs recorded in docs/results.

python docs/make_results.py                      the page and the pictures, from docs/results/*.jsonl
python docs/make_results.py take NAME FILE...    first take runs in, as docs/results/NAME.jsonl
python docs/make_results.py take-tests NAME SUITE=FILE... --environment FILE --source COMMIT
                                                 first take JUnit files in, as docs/results/tests-NAME.json
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
from results_page.suites import PREFIX  # noqa: E402
from results_page.suites import read as read_suites  # noqa: E402
from results_page.suites import take as take_suites  # noqa: E402

from veloxquant.errors import VeloxQuantError  # noqa: E402

FOLDER = DOCS / "results"
PAGE = DOCS / "results.md"


def main(words: list[str] | None = None) -> int:
    """Do what the command line says; 1 where that cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="with take: name of the text that was read, where it is not the sample text")
    parser.add_argument("--environment", help="with take-tests: what environment() gave there, as JSON")
    parser.add_argument("--source", help="with take-tests: the commit that was tested")
    parser.add_argument(
        "--why", action="append", default=[], metavar="TEST=SENTENCE", help="with take-tests: a failure"
    )
    parser.add_argument("--note", action="append", default=[], metavar="SENTENCE", help="likewise: what else to say")
    parser.add_argument("take", nargs="?", choices=["take", "take-tests"])
    parser.add_argument("name", nargs="?")
    parser.add_argument("files", nargs="*", metavar="FILE")
    asked = parser.parse_args(words)
    if asked.take and not asked.files:
        parser.error(f"{asked.take} wants NAME and FILE")
    if asked.take == "take-tests" and not (asked.environment and asked.source):
        parser.error("take-tests wants --environment and --source")
    try:
        if asked.take == "take-tests":
            why = dict(word.partition("=")[::2] for word in asked.why)
            target = FOLDER / f"{PREFIX}{asked.name}.json"
            take_suites(asked.files, asked.environment, asked.source, target, why, asked.note)
        elif asked.take:
            take(asked.files, FOLDER / f"{asked.name}.jsonl", asked.text)
        found = read(FOLDER)
        names = drawn(found, FOLDER) if found else []
        PAGE.write_text(page(found, names, read_suites(FOLDER)), encoding="utf-8")
    except VeloxQuantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{PAGE.name}: {len(found)} runs, {len(names)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
