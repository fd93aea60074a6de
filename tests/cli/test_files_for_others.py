"""What a run leaves for others names no folder of the machine that it was made on."""

import shutil

import pytest

from mindspeed_mm_dit.cli.main import main
from tests.training.launch import Configs

CHAIN = ["--sampler", "ddim", "--steps", "2"]


@pytest.fixture(scope="module")
def run_of_alice(tmp_path_factory, digits_folder):
    """A run started with absolute paths from another folder than its files lie in."""
    home = tmp_path_factory.mktemp("home") / "alice"
    shutil.copytree(digits_folder, home / "digits")
    configs = Configs.create(home / "configs", home / "digits", hidden_size=32, num_layers=1, num_heads=2)
    flags = (
        f"--train-iters 4 --save-interval 2 --save-retain-interval 1 --micro-batch-size 8 --lr 1e-2 --save {home}/ck"
    )
    outcome = configs.run(f"{flags} --power-ema-stds 0.05 0.1 --tensorboard-dir {home}/tensorboard")
    assert outcome.code == 0, outcome.output
    return home / "ck"


@pytest.mark.extended
@pytest.mark.parametrize(
    "command",
    [
        ["convert", "{source}", "{out}/weights.pt"],
        ["convert", "{source}", "{out}/weights.safetensors"],
        ["convert", "{source}", "{out}/folder", "--to", "pytorch"],
        ["convert", "{source}", "{out}/there", "--to", "mindspore"],
        ["convert", "{source}", "{out}/hub", "--to", "diffusers"],
        ["ema", "--checkpoint", "{source}", "--std", "0.07", "--output", "{out}/ema.safetensors"],
        ["ema", "--checkpoint", "{source}", "--std", "0.07", "--output", "{out}/ema", "--to", "pytorch"],
        ["sample", "--checkpoint", "{source}", "--output", "{out}/page.html", "--num-per-class", "1", *CHAIN],
        ["sample", "--checkpoint", "{source}", "--output", "{out}/single/", "--num-per-class", "1", *CHAIN],
        ["sample", "--checkpoint", "{source}", "--output", "{out}/samples.npz", "--num-per-class", "1", *CHAIN],
        ["evaluate", "--checkpoint", "{source}", "--output", "{out}/report", "--num", "60", "--reference", "digits",
         *CHAIN],
    ],
    ids=lambda command: " ".join(word.removeprefix("{out}/") for word in command if "{source}" not in word)[:40],
)  # fmt: skip
def test_files_for_others_name_no_folder_of_this_machine(run_of_alice, tmp_path, command):
    assert b"alice" in (run_of_alice / "iter_0000004/run.json").read_bytes()  # (so that the run can be replayed)
    assert main([word.format(source=run_of_alice, out=tmp_path) for word in command]) == 0
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert written and not [path for path, content in written.items() if b"alice" in content]
