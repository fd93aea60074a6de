"""Whole runs: other ranks, what survives a crash, validations, and what is refused."""

import re
import resource
import signal
import subprocess

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from mindspeed_mm_dit.cli.main import main
from tests.buckets_fixtures import write_configs, write_pictures
from tests.forked import PATIENCE_SECONDS
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

LOSS_TOLERANCE = 2e-6  # float32 sums in another order; plain DiT drifts by 3e-7 in 20 steps


def write_fsdp2(configs: Configs, name: str, text: str) -> str:
    path = configs.folder / name
    path.write_text("sub_modules_to_wrap:\n  - predictor.blocks.{*}\n" + text)
    return f"--use-torch-fsdp2 --fsdp2-config-path {path} "


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_bfloat16_stays_near_float32_plain_and_sharded(tiny, ranks):
    steps = "--train-iters 6 --global-batch-size 64 --lr 1e-3 --lr-decay-style constant "
    sharding = "sharding_size: auto\nparam_dtype: bf16\nreduce_dtype: fp32\n"
    flags = "--bf16 " if ranks == 1 else write_fsdp2(tiny, "bf16.yaml", sharding)
    exact, rounded = tiny.run(steps), tiny.run(steps + flags, ranks)
    assert rounded.code == 0 and rounded.losses != exact.losses, rounded.output
    assert rounded.losses == pytest.approx(exact.losses, rel=2e-2)  # bfloat16 has 8 bits: 0.4 % a rounding


@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((1, 3, 2), marks=pytest.mark.extended)], ids=str)
def test_a_run_moves_to_another_number_of_ranks(tiny, tmp_path, ranks):
    """Neither 2 nor 3 divides the 11 rows of the table of classes."""
    flags = "--global-batch-size 30 --lr 1e-3 --lr-decay-iters 6 --lr-warmup-iters 3 "
    whole, losses = tiny.run(flags + "--train-iters 6 --micro-batch-size 15").losses, {}
    flags += write_fsdp2(tiny, "auto.yaml", "sharding_size: auto\n") + f"--save {tmp_path} --load {tmp_path} "
    for number, count in enumerate(ranks, 1):
        outcome = tiny.done(f"{flags} --train-iters {6 * number // len(ranks)} --micro-batch-size {30 // count}", count)
        losses |= outcome.losses
    assert losses == pytest.approx(whole, rel=LOSS_TOLERANCE) and len(losses) == 6


LONG = "--train-iters 100000 --micro-batch-size 32 --lr 1e-3 --log-interval 1 "


def wait_for(process: subprocess.Popen, pattern: str) -> str:
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return "".join(seen)
    raise AssertionError("".join(seen))


@pytest.mark.extended
def test_sigterm_to_a_torchrun_of_the_users_own_saves_and_ends(tiny, tmp_path):
    process = tiny.start(LONG + f"--save {tmp_path}", ranks=2)
    wait_for(process, "iteration +3/")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert "saving it" in rest and process.returncode != 0
    (saved,) = CheckpointStore(tmp_path).iterations()
    assert saved >= 3 and torch_dcp.find_damage(CheckpointStore(tmp_path).path(saved)) is None


def test_a_second_run_is_refused_and_a_kill_during_saves_loses_at_most_the_save_in_flight(tiny, tmp_path):
    """Saving after every step, a kill nearly always hits a save."""
    process = tiny.start(LONG + f"--save {tmp_path} --save-interval 1")
    reached = [int(n) for n in re.findall(r"iteration +(\d+)/", wait_for(process, "iteration +25/"))][-1]
    second = tiny.run(LONG + f"--save {tmp_path} --load {tmp_path}")
    assert second.code == 2 and second.output.count(f"(process {process.pid}), which began ") == 1
    process.kill()
    process.communicate()
    store = CheckpointStore(tmp_path)
    latest, passed = store.latest(torch_dcp.find_damage)
    assert passed == [] and latest >= reached - 2  # one in flight, one that waits for it
    resumed = tiny.run(f"{LONG.replace('100000', str(latest + 2))} --save {tmp_path} --load {tmp_path}")
    assert resumed.code == 0 and list(resumed.losses) == [latest + 1, latest + 2]


def test_a_full_disk_keeps_the_checkpoint_before_and_is_reported(tiny, tmp_path):
    """A limit on the size of files makes every write of weights fail, as a full disk does."""
    flags = f"--micro-batch-size 32 --lr 1e-3 --save {tmp_path} --load {tmp_path} --train-iters "
    assert tiny.run(flags + "3").code == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        outcome = tiny.run(flags + "6 --save-interval 4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome.code == 2 and "could not be written" in outcome.output and "GiB are free" in outcome.output
    assert list(outcome.losses) == [4, 5, 6]  # the failed save in the middle did not stop the training
    assert CheckpointStore(tmp_path).iterations() == [3]
    assert tiny.run(flags + "4").code == 0


@pytest.mark.extended
def test_a_small_run_learns(tiny):
    losses = list(tiny.run("--train-iters 150 --micro-batch-size 32 --lr 3e-3 --log-interval 25").losses.values())
    assert losses[-1] < 0.7 * losses[0]


def test_a_mistake_ends_the_run_before_anything_is_written(tiny):
    (tiny.folder / "bad.yaml").write_text("sub_modules_to_wrap: ['predictor.block.{*}', 'predictor.blcks']\n")
    flags = "--micro-batch-size 4 --save saved --use-torch-fsdp2 --fsdp2-config-path bad.yaml"
    outcome = tiny.run("--train-iters 2 --lr 1e-3 " + flags)
    assert outcome.code == 2 and outcome.output.count("Error: ") == 1 and "predictor.block" in outcome.output
    assert "Traceback" not in outcome.output and not (tiny.folder / "saved").exists()


def test_a_run_goes_on_only_with_its_own_model_and_in_its_own_folder(tiny, tmp_path):
    flags = f"--micro-batch-size 4 --lr 1e-3 --save {tmp_path}/out --train-iters 2"
    assert tiny.run(flags).code == 0
    (tmp_path / "flow").mkdir()
    flow = tiny.copy(tmp_path / "flow").change("model.json", diffusion={"model_id": "flow_matching"})
    other = tiny.copy(tmp_path).change("model.json", predictor={"num_layers": 3})
    for configs, load, named in (
        (other, f"--load {tmp_path}/out", "predictor.num_layers is 2 there and 3 here"),
        (flow, f"--load {tmp_path}/out", "diffusion.model_id is 'gaussian_diffusion' there"),
        (tiny, "", f"Pass --load {tmp_path}/out"),
        (tiny, f"--load {tmp_path}/out/iter_0000002", f"Pass --load {tmp_path}/out"),
    ):
        outcome = configs.run(f"{flags} {load}")
        assert outcome.code == 2 and named in outcome.output, outcome.output
    done = tiny.run(flags + f" --load {tmp_path}/out")
    assert done.code == 0 and not done.losses


def test_published_weights_are_trained_on_with_a_new_optimizer(tiny, tmp_path):
    flags = f"--micro-batch-size 4 --lr 1e-3 --train-iters 1 --save {tmp_path}/run --no-save-optim"
    assert tiny.run(flags).code == 0
    onwards = flags.replace("iters 1", "iters 2") + f" --load {tmp_path}/run"
    refused = tiny.run(onwards)
    assert refused.code == 2 and "Pass --no-load-optim" in refused.output and "Traceback" not in refused.output
    assert list(tiny.run(onwards + " --no-load-optim").losses) == [2]


VALIDATED = "--train-iters 6 --global-batch-size 32 --lr 1e-3 --eval-interval 2 --eval-iters 3 "


@pytest.fixture(scope="module")
def validated_whole(validated):
    outcome = validated.run(VALIDATED)
    assert outcome.code == 0 and list(outcome.validations) == [2, 4, 6], outcome.output
    return outcome


def test_validation_uses_the_same_images_and_draws_every_time(validated):
    still = validated.run(VALIDATED.replace("1e-3", "1e-30")).validations
    assert still[2] == still[4] == still[6] and len(still[2]) == 5  # the weights did not move


def test_a_validation_is_the_mean_of_its_quarters_and_changes_no_step(validated, validated_whole):
    for mean, *quarters in validated_whole.validations.values():  # 96 samples, 24 in each; seven digits are printed
        assert float(mean) == pytest.approx(sum(map(float, quarters)) / 4, rel=1e-6)
    plain = validated.run(VALIDATED.replace("--eval-interval 2", ""))
    assert plain.lines == validated_whole.lines and not plain.validations


BUCKETS = "--global-batch-size 16 --lr 1e-3 --lr-decay-style constant --num-workers 1 "


def test_run_on_buckets_draws_samples_of_any_shape(tmp_path, capsys):
    configs = Configs(write_configs(tmp_path / "configs", write_pictures(tmp_path / "pictures"), valid_fraction=0.2))
    flags = f"--micro-batch-size 4 --train-iters 1 --save {tmp_path / 'saved'} --sample-interval 1 "
    configs.done(BUCKETS + flags + f"--tensorboard-dir {tmp_path / 'board'}")
    for name, size in (("a.npz", "8x16"), ("b.npz", "20x4"), ("c.png", "8x16"), ("d.html", "12x8")):
        asked = ["--classes", "0,1", "--num-per-class", "2", "--steps", "2", "--size", size]
        assert main(["sample", "--checkpoint", f"{tmp_path}/saved", *asked, "--output", f"{tmp_path}/{name}"]) == 0
    assert np.load(tmp_path / "a.npz")["arr_0"].shape == (4, 8, 16, 1)
    assert np.load(tmp_path / "b.npz")["arr_0"].shape == (4, 20, 4, 1)
    assert Image.open(tmp_path / "c.png").size[1] == 2 * (48 + 2)
    refused = ["sample", "--checkpoint", f"{tmp_path}/saved", "--size", "8x14", "--output", f"{tmp_path}/e.png"]
    assert main(refused) == 2 and "--size = 8x14" in capsys.readouterr().err
