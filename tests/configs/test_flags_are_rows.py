"""A flag is one row: adding a row is all it takes for a flag to be known wherever flags are listed."""

import json
import subprocess
import sys

from mindspeed_mm_dit.configs.run import rows
from mindspeed_mm_dit.training.flags import parse, to_command_line

ADDED = '''
import json
from pathlib import Path
import importlib.util, sys

OWN = '    host: str = flag('
ROWS = """
    sparkle: int = flag("stars beside the loss", 1, type=unsigned_int, compared="fact", is_output=True)
    sparkle_colour: str | None = flag("of the stars", choices=("red", "blue"), needs=("sparkle",))
"""
found = importlib.util.find_spec("mindspeed_mm_dit.configs.run")
source = Path(found.origin).read_text()
assert source.count(OWN) == 1
run = sys.modules[found.name] = importlib.util.module_from_spec(found)
exec(compile(source.replace(OWN, ROWS + OWN), found.origin, "exec"), vars(run))

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.training.resume import changes
from mindspeed_mm_dit.training.flags import full_parser, parse, without_outputs
from mindspeed_mm_dit.tools.verify.past_run import flags_of

RUN = "--mm-model m.json --mm-data d.json --train-iters 4 --lr 1e-4 --global-batch-size 8".split()

def refusal(*words):
    try:
        checked(parse([*RUN, *words]), 1)
    except ConfigError as error:
        return str(error).partition(".")[0]

given = [*RUN, "--sparkle", "3", "--sparkle-colour", "red"]
replayed = without_outputs(flags_of({"arguments": given, "folder": "."}, [], Path("."), "--checkpoint"))
print(json.dumps({
    "help": "stars beside the loss (default: 1)" in full_parser().format_help(),
    "parsed": parse(given).sparkle,
    "of a wrong type": refusal("--sparkle", "-3"),
    "without what it needs": refusal("--sparkle", "0", "--sparkle-colour", "red"),
    "changed": changes({"sparkle": 1}, {"sparkle": 2}),
    "replayed": replayed.sparkle,
}))
'''


def test_added_row_is_seen_wherever_flags_are_listed() -> None:
    """In a process of its own, which adds its rows before anything else looks at them."""
    done = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "help": True,
        "parsed": 3,
        "of a wrong type": "--sparkle must be a whole number of at least 0, below 2**63, not '-3'",
        "without what it needs": "--sparkle-colour has no effect without --sparkle",
        "changed": [["--sparkle", "1", "2"]],
        "replayed": 1,
    }


def test_flags_have_one_row_name_known_flags_and_spell_a_run() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) and {name for row in rows() for name in row.needs} <= set(names)
    asked = "--mm-model m --mm-data d --lr 1e-3 --train-iters 9 --global-batch-size 8 --bf16 --power-ema-stds 0.05 0.1"
    run = parse([*asked.split(), "--adam-beta2", "0.95", "--report", "always", "--init-from", "w"])
    words = to_command_line(run)
    assert parse(words) == run and "--load-base-model" not in words and "--eval-iters" not in words
