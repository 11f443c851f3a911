"""`docs/results.md` and its pictures, out of the committed figures of all benchmarks.

    python benchmarks/plots.py            # write them
    python benchmarks/plots.py --check    # say what would change; exit status 1 if anything would

Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from results_page import page

DOCS = Path(__file__).parent.parent / "docs"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    text, pictures = page(Path(__file__).parent / "results")
    wanted = {"results.md": text, **pictures}
    there = {path.name for path in DOCS.glob("results-*.svg")}
    changed = [
        name
        for name, content in wanted.items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text() != content
    ]
    left_over = sorted(there - wanted.keys())
    if not is_check:
        for name in changed:
            (DOCS / name).write_text(wanted[name])
        for name in left_over:
            (DOCS / name).unlink()
    verb = "differs" if is_check else "written"
    for name in changed:
        print(f"docs/{name}: {verb}")
    for name in left_over:
        print(f"docs/{name}: of no figures there are")
    return int(is_check and bool(changed or left_over))


if __name__ == "__main__":
    sys.exit(main())
