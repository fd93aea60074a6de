"""Measure how many faults the fast tests find: mutmut breaks one expression at a time.

    make mutants                         every mutant: half an hour on one core
    make mutants MUTANTS='--sample 40'   at most 40 of each file, drawn from a seed

pyproject.toml sets what is mutated, and which tests may find it. Each mutant is tested by the tests that reach its
function, in a process forked from one that has imported everything. A run tries the mutants that were not found before:
it continues where another stopped, or shows what newer tests find. To start over, rm -r mutants.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

from common import Report
from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name

FOUND = ("killed", "timeout", "segfault")
"""What a mutant may come to; a test that would never end has found it too."""
MISSED = ("survived", "no tests", "suspicious")


def main() -> None:
    """Run mutmut in the current folder, the root of the project, and write the result file."""
    sample = parse().sample
    report = Report("mutants", "Mutants: faults that the fast tests find")
    mutants = {path: names_of(path) for path in sorted(Path("mindspeed_mm_dit").rglob("*.py"))}
    found = {name for path in mutants for name, status in statuses_of(path).items() if status in FOUND}
    to_try = [name for names in mutants.values() for name in chosen(names, sample) if name not in found]
    while to_try:
        mutmut = Path(sysconfig.get_path("scripts")) / "mutmut"
        subprocess.run([mutmut, "run", "--max-children", "1", *to_try], check=True)
        # Where settings have changed mutmut has forgotten what was found before.
        forgotten = {name for path in mutants for name, status in statuses_of(path).items() if status == "not checked"}
        to_try = [
            name for names in mutants.values() for name in chosen(names, sample) if name in forgotten.difference(to_try)
        ]
    statuses = {path: statuses_of(path) for path, names in mutants.items() if names}
    rows = [row(str(path), list(of_file.values())) for path, of_file in statuses.items()]
    total = row("all", [status for of_file in statuses.values() for status in of_file.values()])
    report.table(["file", "mutants", "tried", *FOUND, *MISSED, "found of tried"], [*rows, total])
    report.echo("## Not found\n")
    for path, of_file in statuses.items():
        for name in (name for name, status in of_file.items() if status in MISSED):
            report.echo(f"- {path}, {change(name, path)}")
    report.save()


def names_of(path: Path) -> list[str]:
    """Return the names of the mutants of a source file, in order; none where it is not to be mutated."""
    if not config().should_mutate(path):
        return []
    mutated = mutate_file_contents(str(path), path.read_text(encoding="utf-8"), None, set())
    return sorted(get_mutant_name(path, name) for name in mutated.mutant_names)


def chosen(names: list[str], sample: int | None) -> list[str]:
    """Return ``names``, or ``sample`` of them, always the same."""
    return names if sample is None or sample >= len(names) else random.Random(0).sample(names, sample)


def statuses_of(path: Path) -> dict[str, str]:
    """Return what became of each mutant of a file."""
    data = SourceFileMutationData(path=path)
    data.load()
    return {name: status_by_exit_code[code] for name, code in data.exit_code_by_key.items()}


def row(name: str, statuses: list[str]) -> list[object]:
    """Return a line of the table."""
    count = Counter(statuses)
    tried = sum(count[status] for status in (*FOUND, *MISSED))
    found = sum(count[status] for status in FOUND)
    share = f"{found / tried:.1%}" if tried else "-"
    return [name, len(statuses), tried, *(count[status] for status in (*FOUND, *MISSED)), share]


def change(name: str, path: Path) -> str:
    """Return the function of a mutant and its changed lines."""
    lines = [line for line in get_diff_for_mutant(name, path=path).splitlines() if line[:1] in "+-"]
    changed = " ".join(f"{line[0]} `{line[1:].strip()}`" for line in lines if not line.startswith(("+++", "---")))
    function = name.rpartition(".")[2].partition("__mutmut_")[0].removeprefix("x_").removeprefix("xǁ")
    return f"{function.replace('ǁ', '.')}: {changed}"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="try at most N mutants of each file; default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
