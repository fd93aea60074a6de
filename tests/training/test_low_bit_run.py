"""Runs that train adapters on a base in few bits: the same numbers wherever its bytes wait."""

import pytest

from tests.training.launch import Configs
from tests.training.test_lora_run import FLAGS, LORA

pytestmark = pytest.mark.ranks
RECOMPUTED = "recompute_modules: ['predictor.blocks.{*}']\nuse_reentrant: false\nsharding_size: auto\n"


@pytest.fixture(scope="module")
def losses(tmp_path_factory, few_digits):
    """Return the outcome of four steps of a network of five blocks, with these flags and lines of fsdp2.yaml."""
    folder = tmp_path_factory.mktemp("low_bit")
    configs = Configs.create(folder, few_digits, hidden_size=32, num_layers=5, num_heads=2)
    first = configs.run(FLAGS + f"--train-iters 2 --save {folder}/base")
    assert first.code == 0, first.output

    def run(flags, fsdp2=RECOMPUTED):
        (folder / "fsdp2.yaml").write_text("sub_modules_to_wrap:\n  - predictor.blocks.{*}\n" + fsdp2)
        sharded = f"--use-torch-fsdp2 --fsdp2-config-path {folder}/fsdp2.yaml " if fsdp2 else ""
        return configs.run(f"{FLAGS}{LORA}--init-from {folder}/base --train-iters 4 {sharded}{flags}")

    return run


def test_blocks_that_wait_in_memory_change_no_number(losses):
    on_device = losses("--base-dtype nf4")
    assert on_device.code == 0, on_device.output
    for count in (1, 5):
        waiting = losses(f"--base-dtype nf4 --offload-blocks {count}")
        assert waiting.losses == on_device.losses, waiting.output
    assert losses("").losses != on_device.losses


@pytest.mark.parametrize(("flags", "fsdp2", "fragment"), [
    ("--base-dtype nf4 --offload-blocks 6", RECOMPUTED, "--offload-blocks = 6 is more than the 5 blocks"),
    ("--offload-blocks 1", RECOMPUTED, "--base-dtype"),
    ("--base-dtype nf4 --offload-blocks 1", "", "recompute_modules"),
    ("--base-dtype nf4 --offload-blocks 1", RECOMPUTED + "offload_to_cpu: true\n", "offload_to_cpu"),
    ("--base-dtype nf5", RECOMPUTED, "--base-dtype"),
])  # fmt: skip
def test_a_base_that_cannot_be_is_refused_before_weights_are_read(losses, flags, fsdp2, fragment):
    outcome = losses(flags, fsdp2)
    assert outcome.code == 2 and fragment in outcome.output and "initial weights" not in outcome.output, outcome.output


def test_a_base_in_few_bits_is_for_adapters(tiny):
    outcome = tiny.run(FLAGS + "--train-iters 1 --base-dtype nf4")
    assert outcome.code == 2 and "--lora-target-modules" in outcome.output
