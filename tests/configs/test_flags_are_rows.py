"""A flag is one row: adding a row is all it takes for a flag to be known wherever flags are listed."""

import json
import subprocess
import sys

from mindspeed_mm_dit.configs.run import rows

ADDED = '''
import json, re
from pathlib import Path
import importlib.util, sys

OWN = '    host: str = flag('
ROWS = """
    sparkle: int = flag("stars beside the loss", 1, _typed(unsigned_int), native="training.sparkle",
                        idle_in=("megatron",), compared="fact", when_quiet=False)
    sparkle_colour: str | None = flag("of the stars", takes=_choices("red", "blue"), idle_in=("native",),
                                      needs=("sparkle",))
    sparkle_sound: bool = flag("of the stars", False, refused_in=("native",), refusal="is silent")
"""
found = importlib.util.find_spec("mindspeed_mm_dit.configs.run")
source = Path(found.origin).read_text()
assert source.count(OWN) == 1
run = sys.modules[found.name] = importlib.util.module_from_spec(found)
exec(compile(source.replace(OWN, ROWS + OWN), found.origin, "exec"), vars(run))

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron import commandline as megatron
from mindspeed_mm_dit.integrations.mindspeed_mm.native import run as native
from mindspeed_mm_dit.training.resume import changes
from mindspeed_mm_dit.training.flags import full_parser, parse, quiet
from mindspeed_mm_dit.tools.verify.past_run import flags_of

RUN = "--mm-model m.json --mm-data d.json --train-iters 4 --lr 1e-4 --global-batch-size 8".split()

def refusal(*words):
    try:
        native.yaml_for(native.parse([*RUN, *words], 1), 1)
    except ConfigError as error:
        return re.match(r"[-a-z]+: (must be|has no effect.*|is not supported in this host)", str(error))[0]

given = [*RUN, "--sparkle", "3", "--sparkle-colour", "red"]
replayed = quiet(flags_of({"arguments": given, "folder": "."}, [], Path("."), "--checkpoint"))
print(json.dumps({
    "help": "stars beside the loss (default: 1)" in full_parser().format_help(),
    "parsed": parse(given).sparkle,
    "of a wrong type": refusal("--sparkle", "-3"),
    "without what it needs": refusal("--sparkle", "0", "--sparkle-colour", "red"),
    "where another host would do otherwise": refusal("--sparkle-sound"),
    "yaml": native.yaml_for(native.parse(given, 1), 1)["training"]["sparkle"],
    "idle in native": native.without_effect(native.parse(given, 1)),
    "idle in megatron": megatron.without_effect(given),
    "not given": native.without_effect(native.parse(RUN, 1)) + megatron.without_effect(RUN),
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
        "of a wrong type": "--sparkle: must be",
        "without what it needs": "--sparkle-colour: has no effect without --sparkle",
        "where another host would do otherwise": "--sparkle-sound: is not supported in this host",
        "yaml": 3,
        "idle in native": ["--sparkle-colour"],
        "idle in megatron": ["--sparkle"],
        "not given": [],
        "changed": [["--sparkle", "1", "2"]],
        "replayed": 1,
    }


def test_every_flag_and_every_key_of_the_yaml_has_one_row() -> None:
    names = [row.name for row in rows()]
    keys = [key for row in rows() for key in (row.native, row.native_counts) if key]
    assert len(set(names)) == len(names) and len(set(keys)) == len(keys)
    for row in rows():  # names known flags, and is not both idle and acted on
        assert set(row.needs) <= set(names), row.name
        assert not ("native" in row.idle_in and (row.native or row.native_counts)), row.name


def test_a_run_spells_the_command_line_that_asks_for_it() -> None:
    from mindspeed_mm_dit.training.flags import parse, words_of

    asked = "--mm-model m --mm-data d --lr 1e-3 --train-iters 9 --global-batch-size 8 --bf16 --power-ema-stds 0.05 0.1"
    run = parse([*asked.split(), "--adam-beta2", "0.95", "--report", "always", "--init-from", "w"])
    words = words_of(run)
    assert parse(words) == run and "--load-base-model" not in words and "--eval-iters" not in words
