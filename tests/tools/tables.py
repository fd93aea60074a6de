"""Tables of tests that are read as text, a row a line."""

import pytest


def table(names, text):
    """Parametrise a test by the lines of a text, whose columns " | " divides; an empty column is an empty text."""
    rows = [[column.strip() for column in f" {line} ".split(" | ")] for line in text.strip().splitlines()]
    return pytest.mark.parametrize(names.split(), rows)


def refusals(text):
    """Parametrise a test by lines "FLAGS | what the refusal names", by default the last flag as "--flag = value"."""
    rows = [line.partition(" | ")[::2] for line in text.strip().splitlines()]
    rows = [(flags.strip(), named.strip() or " = ".join(flags.split()[-2:])) for flags, named in rows]
    return pytest.mark.parametrize(("flags", "named"), rows)
