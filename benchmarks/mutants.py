"""How many faults the fast tests find: one expression broken at a time, by mutmut.

    make mutants                          half an hour on one core; what is mutated and tested stands in pyproject.toml
    make mutants MUTANTS=--missed-only    after tests were added: try those again that were not found

Each mutant is tested in a process forked off one that has imported everything, by the tests that reach its function.
A run goes on where an interrupted one stopped; rm -r mutants begins anew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

from common import Report
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

FOUND = ("killed", "timeout", "segfault")
"""What a mutant may come to; a test that would never end has found it too."""
MISSED = ("survived", "no tests", "suspicious")


def main() -> None:
    """Run mutmut in the current folder, the root of the project, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missed-only", action="store_true", help="try only the mutants that were not found before")
    again = missed() if parser.parse_args().missed_only else []
    report = Report("mutants", "Mutants: faults that the fast tests find")
    mutmut = Path(sysconfig.get_path("scripts")) / "mutmut"
    subprocess.run([mutmut, "run", "--max-children", "1", *again], check=True)
    statuses = {path: statuses_of(path) for path in mutated_files()}
    report.table(["file", *FOUND, *MISSED, "found"], [row(str(path), found) for path, found in statuses.items()])
    everything = [status for found in statuses.values() for status in found.values()]
    report.table(["all files", *FOUND, *MISSED, "found"], [row("", dict(enumerate(everything)))])
    report.say("## Not found\n")
    for path in statuses:
        for name in missed(path):
            report.say(f"- {path}, {change(name, path)}")
    report.save()


def mutated_files() -> list[Path]:
    """Return the source files that have mutants."""
    metas = (path.relative_to("mutants").with_suffix("") for path in Path("mutants").rglob("*.py.meta"))
    return [path for path in sorted(metas) if statuses_of(path)]


def missed(*paths: Path) -> list[str]:
    """Return the mutants of ``paths``, by default of all files, that no test found."""
    statuses = (statuses_of(path).items() for path in paths or mutated_files())
    return [name for of_file in statuses for name, status in of_file if status in MISSED]


def statuses_of(path: Path) -> dict[str, str]:
    """Return what became of each mutant of a file."""
    data = SourceFileMutationData(path=path)
    data.load()
    return {name: status_by_exit_code[code] for name, code in data.exit_code_by_key.items()}


def row(name: str, statuses: dict) -> list[object]:
    """Return a line of the table."""
    count = Counter(statuses.values())
    unknown = set(count) - set(FOUND) - set(MISSED)
    if unknown:
        sys.exit(f"{name}: {', '.join(unknown)}: run it again")
    share = sum(count[status] for status in FOUND) / count.total()
    return [name, *(count[status] for status in (*FOUND, *MISSED)), f"{share:.1%}"]


def change(name: str, path: Path) -> str:
    """Return the function of a mutant and its changed lines."""
    lines = [line for line in get_diff_for_mutant(name, path=path).splitlines() if line[:1] in "+-"]
    changed = " ".join(f"{line[0]} `{line[1:].strip()}`" for line in lines if not line.startswith(("+++", "---")))
    return f"{name.rpartition('.')[2].partition('__mutmut_')[0].lstrip('x').strip('ǁ_').replace('ǁ', '.')}: {changed}"


if __name__ == "__main__":
    main()
