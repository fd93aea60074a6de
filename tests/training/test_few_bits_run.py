"""Runs of adapters on a base whose file has few bits: the same as on the numbers that it stands for."""

import re

import pytest

from mindspeed_mm_dit.cli.main import main

pytestmark = [pytest.mark.pytorch, pytest.mark.ranks]
FLAGS = "--global-batch-size 16 --lr 1e-2 --lr-decay-style constant --num-workers 0 --train-iters 3 "
LORA = "--lora-target-modules attn.qkv blocks.{*}.mlp.fc1 --lora-r 4 --lora-alpha 8 "


def convert(*arguments):
    assert main(["convert", *map(str, arguments)]) == 0


@pytest.fixture(scope="module")
def base(tiny):
    outcome = tiny.run(FLAGS + f"--save {tiny.folder / 'base'}")
    assert outcome.code == 0, outcome.output
    return tiny.folder / "base"


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_a_small_file_is_the_base_that_is_quantised_at_load(tiny, base, kind, tmp_path):
    small, wide = tmp_path / "small.safetensors", tmp_path / "wide.safetensors"
    convert(base, small, "--dtype", kind)
    convert(small, wide, "--dtype", "float32")
    assert small.stat().st_size < wide.stat().st_size / 2
    runs = [
        tiny.run(f"{FLAGS} {LORA} --init-from {path} {base_dtype} --save {tmp_path / name}")
        for name, path, base_dtype in (
            ("small", small, f"--base-dtype {kind}"),
            ("wide", wide, ""),
            ("widened", small, ""),
            ("again", base, f"--base-dtype {kind}"),
        )
    ]
    assert all(run.code == 0 and len(run.losses) == 3 for run in runs), [run.output for run in runs]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-6)
    assert runs[1].losses == runs[2].losses
    assert re.search(f"tensors are stored in {kind.replace('fp8', 'float8')}", runs[0].output)
    chain = ["--classes", "0", "--num-per-class", "1", "--sampler", "ddim", "--steps", "2", "--cfg-scale", "1"]
    for name in ("small", "wide"):  # (either file holds the base of either run)
        other = {"small": wide, "wide": small}[name]
        lora = ["--checkpoint", str(other), "--lora", str(tmp_path / name), "--model", str(tiny.folder / "model.json")]
        assert main(["sample", *lora, *chain, "--output", str(tmp_path / "drawn.npz")]) == 0
    resumed = tiny.run(f"{FLAGS.replace('iters 3', 'iters 4')} {LORA} --init-from {wide} --load {tmp_path / 'small'}")
    assert resumed.code == 0 and len(resumed.losses) == 1, resumed.output
