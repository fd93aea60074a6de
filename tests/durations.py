"""Record what each test costs in CPU seconds and process starts: ``--durations-file FILE``.

CPU seconds, not wall time: they hardly depend on what else the machine does. Processes that a test starts count with
it. ``tests/durations.tsv`` and, for MindSpore, ``durations-mindspore.tsv`` record the last release of the suite; a test
above :data:`COSTLY_SECONDS` there must carry the mark ``costly``, which names the fact that it alone states.
"""

import collections
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import FORKED_CPU_SECONDS, STARTED

ON_MINDSPORE = os.environ.get("MM_DIT_TEST_FRAMEWORK") == "mindspore"
RECORD = Path(__file__).with_name("durations-mindspore.tsv" if ON_MINDSPORE else "durations.tsv")
COSTLY_SECONDS = 5.0
LISTED_SECONDS = 0.5
"""Cheaper tests are added up by file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", metavar="FILE", help="write CPU seconds and process starts of each test there")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--durations-file")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(Path(path)), "durations-writer")


def cpu_seconds() -> float:
    """Return what this process, its children that have ended and its forked runs have used so far."""
    mine, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(FORKED_CPU_SECONDS) + mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Note CPU seconds and process starts beside the report of the test's teardown."""
    item.stash[_BEFORE] = (cpu_seconds(), STARTED.total)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[pytest.TestReport]:
    """Add the cost so far to the last report of a test, which xdist carries to the main process."""
    report = yield
    if call.when == "teardown":
        seconds, starts = item.stash[_BEFORE]
        report.user_properties.append(("cost", (cpu_seconds() - seconds, STARTED.total - starts)))
    return report


_BEFORE = pytest.StashKey[tuple[float, int]]()


class _Writer:
    """Writes the costs of all tests, the dearest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.costs: dict[str, tuple[float, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.costs.update((portable(report.nodeid), cost) for name, cost in report.user_properties if name == "cost")

    def pytest_sessionfinish(self) -> None:
        rows, starts, numbers = (collections.Counter[str]() for _ in range(3))
        for node, (seconds, started) in self.costs.items():
            row = node if seconds >= LISTED_SECONDS else f"{node.partition('::')[0]} (others)"
            rows[row] += seconds
            starts[row] += started
            numbers[row] += 1
        lines = [f"{seconds:.2f}\t{starts[row]}\t{numbers[row]}\t{row}" for row, seconds in rows.most_common()]
        total = f"{rows.total():.2f}\t{starts.total()}\t{numbers.total()}\tall"
        header = "cpu_seconds\tprocesses\ttests\ttest"
        self.path.write_text("\n".join([header, total, *lines, ""]))


def portable(node: str) -> str:
    return node.replace(f"{Path(__file__).parents[1]}/", "")


def read_costly() -> list[str]:
    """Return the tests of the record of this framework that took more than :data:`COSTLY_SECONDS`."""
    rows = [line.split("\t") for line in RECORD.read_text().splitlines()[2:]]
    return [test for seconds, _, number, test in rows if float(seconds) > COSTLY_SECONDS and number == "1"]
