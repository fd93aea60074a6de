"""What mm-dit plan recommends and says: bytes sent, the time of a step, the layout, its yaml, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
import torch

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.fsdp2 import load_fsdp2_config, resolve_paths
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.on_paper import parameters_of
from mindspeed_mm_dit.optimizers import muon
from mindspeed_mm_dit.optimizers.contract import Chosen
from mindspeed_mm_dit.optimizers.registry import ADAMW
from mindspeed_mm_dit.planning.arithmetic import peak_tflops, utilisation
from mindspeed_mm_dit.planning.memory import Placement, activation_bytes, optimizer_bytes
from mindspeed_mm_dit.wings.advice.recommend import Request, recommend
from mindspeed_mm_dit.wings.advice.traffic import Links, Traffic, host_traffic, step_time, traffic
from tests.conftest import ROOT
from tests.planning.test_planning import GIB, model_of


def test_traffic_follows_the_ring():
    model = model_of()
    parameters = parameters_of(model.predictor)
    everything, trained = parameters.num_elements(), parameters.num_elements(trained_only=True)
    replicated = traffic(model, Placement(8, 1))
    assert (replicated.within_shards, replicated.between_replicas) == (0, round(2 * 7 / 8 * 4 * trained))
    sharded = traffic(model, Placement(8, 8))
    assert sharded.within_shards == round(7 / 8 * (2 * 2 * everything + 4 * trained))
    assert sharded.between_replicas == 0
    kept = traffic(model, Placement(8, 8, reshard_after_forward=False))
    assert sharded.within_shards - kept.within_shards == pytest.approx(7 / 8 * 2 * everything, abs=1)
    hybrid = traffic(model, Placement(64, 8))
    assert hybrid.within_shards == sharded.within_shards
    assert hybrid.between_replicas == round(2 * 7 / 8 * 4 * trained / 8)


def test_times_follow_the_links():
    sent = Traffic(within_shards=10**9, between_replicas=10**8)
    links = Links(between_nodes_gbps=100, within_node_gbps=1000, node_size=8)
    assert links.seconds(Placement(8, 8), sent) == pytest.approx(8 * 1.1e9 / 1e12)
    assert links.seconds(Placement(64, 8), sent) == pytest.approx(8 * (1e9 / 1e12 + 1e8 / 1e11))
    assert links.seconds(Placement(64, 64), sent) == pytest.approx(8 * 1.1e9 / 1e11)
    kept, again = (step_time(model_of(), Placement(recompute=r), 256, 0.5e15) for r in (False, True))
    assert kept == pytest.approx(0.364, abs=1e-3)
    assert again == pytest.approx(kept * 4 / 3)


def test_sharding_and_recompute_come_only_when_they_are_needed():
    model = model_of()

    def placement(gib, world_size=8, images=32):
        return recommend(model, Request(Placement(world_size), gib * GIB, images, online_vae=False)).placement

    assert placement(80).shard_ranks == 1
    assert not placement(80).recompute
    assert placement(16).shard_ranks == 8
    assert placement(6, images=64).recompute
    assert placement(80, world_size=64, images=4).shard_ranks == 8  # most bytes stay within a node


def test_the_written_yaml_is_read_back_and_names_real_modules(tmp_path, capsys):
    target = tmp_path / "fsdp2.yaml"
    argv = ["plan", "--model", str(ROOT / "examples/dit/imagenet256/model.json"), "--world-size", "8"]
    assert main([*argv, "--device-memory-gib", "12", "--link-gbps", "200", "--write-fsdp2", str(target)]) == 0
    config = load_fsdp2_config(target)
    assert config.shard_ranks(8) == 8
    with torch.device("meta"):
        names = [f"predictor.{name}" for name, _ in DiT(model_of().predictor).named_modules()]
    assert len(resolve_paths(config.sub_modules_to_wrap, names, "sub_modules_to_wrap")) == 29
    keys = [line for line in target.read_text().splitlines() if line and line[0] not in "# "]
    assert all(target.read_text().splitlines()[target.read_text().splitlines().index(k) - 1][0] == "#" for k in keys)
    out = capsys.readouterr().out
    for words in ("675,129,632", "0.712 TFLOP", "largest micro-batch", "sharded over 8", "days"):
        assert words in out


def test_too_little_memory_is_refused_with_what_would_fit(capsys):
    argv = ["plan", "--model", str(ROOT / "examples/dit/imagenet256/model.json"), "--world-size", "1"]
    assert main([*argv, "--device-memory-gib", "4"]) == 2
    assert "0 fit" in capsys.readouterr().err


def test_a_plan_of_clips_says_what_it_leaves_out(capsys):
    flags = ["--world-size", "8", "--device-memory-gib", "64"]
    assert main(["plan", "--model", str(ROOT / "examples/dit/t2v_custom/model.json"), *flags]) == 0
    said = capsys.readouterr().out
    assert "385.799 TFLOP a clip" in said and "image" not in said
    assert "from files autoencoder and text encoder come on top" in said and "vae " not in said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            "imagenet256",
            ["118.62 G multiply-adds", "0.712 TFLOP", ": 895.6 hours if", " 69.96 GiB of 80 GiB"],
        ),
        ("fashion_mnist", ["44.85 M multiply-adds", "0.269 GFLOP", ": under a second if", " 122.12 MiB of 80 GiB"]),
        ("digits_flow", ["13.34 M multiply-adds", "80.019 MFLOP", ": under a second if", "  50.93 MiB of 80 GiB"]),
        ("flux_lora", ["trained          18,677,760 of them", " GiB of 80 GiB"]),
    ],
)
def test_a_plan_counts_in_units_that_fit(config, said, capsys):
    assert main(["plan", "--model", str(ROOT / f"examples/dit/{config}/model.json")]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in said), out


TABLE = [
    ("flux_lora", "", 66), ("flux_lora", "24 --offload-to-cpu", 21), ("sd3_lora", "", 37), ("sd3_lora", "24", 20),
    ("qwen_image_lora", "80 --world-size 2", 62), ("qwen_image_lora", "24 --offload-to-cpu", 19),
    ("z_image_lora", "", 56), ("z_image_lora", "24 --offload-to-cpu", 9),
]  # fmt: skip


@pytest.mark.parametrize(("config", "device", "gib"), TABLE)
def test_the_table_of_base_models_is_the_plan(config, device, gib, capsys):
    flags = f"--device-memory-gib {device}".split() if device else []
    assert main(["plan", "--model", str(ROOT / f"examples/dit/{config}/model.json"), "--latents", *flags]) == 0
    assert round(float(re.search(r"total +(\S+) GiB", capsys.readouterr().out)[1])) == gib
    for page in ("text_to_image.md", "text_to_image.zh-CN.md"):
        (row,) = [row for row in (ROOT / "docs" / page).read_text().splitlines() if f"| `{config}` |" in row]
        assert re.search(rf"\b{gib}\b", row)


@pytest.mark.parametrize(
    ("flags", "card", "hours"),
    [("24", "NVIDIA 4090", 3.8), ("64", "NVIDIA H100", 0.6), ("24 --peak-tflops 989", "", 0.6)],
)
def test_a_plan_takes_the_peak_of_a_card_of_that_memory(flags, card, hours, capsys):
    model = str(ROOT / "examples/dit/flux_lora/model.json")
    assert main(["plan", "--model", model, "--latents", "--offload-to-cpu", "--device-memory-gib", *flags.split()]) == 0
    out = capsys.readouterr().out
    assert f": {hours} hours if" in out and (card in out if card else "NVIDIA" not in out)


def test_offloaded_weights_cross_the_host_link():
    model, kept = model_of(), Placement(1, offloaded=True, reshard_after_forward=False)
    parameters = parameters_of(model.predictor)
    weights, gradients = 4 * parameters.num_elements(), 4 * parameters.num_elements(trained_only=True)
    assert host_traffic(model, kept, 3) == 3 * (weights + gradients)
    assert host_traffic(model, dataclasses.replace(kept, reshard_after_forward=True)) == 2 * weights + gradients
    assert host_traffic(model, Placement(1)) == 0


def test_a_plan_with_buckets_is_of_the_dearest(capsys, tmp_path):
    shapes = [[1, 480, 832], [49, 480, 480], [33, 480, 832]]
    param = {"dataset_type": "clips", "data_folder": "d", "json_path": "d/a.json", "buckets": shapes}
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": param}))
    model = ROOT / "examples/dit/t2v_custom/model.json"
    flags = ["--model", str(model), "--world-size", "8", "--device-memory-gib", "64"]
    assert main(["plan", *flags, "--data", f"{tmp_path}/data.json"]) == 0
    assert "planned for      33 x 480 x 832, the dearest of 3 buckets" in capsys.readouterr().out


PLAN = ["plan", "--model", str(ROOT / "examples/dit/imagenet256/model.json"), "--device-memory-gib", "80"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device-memory-gib nan", "--device-memory-gib = nan: must be positive"),
        ("--link-gbps -1", "--link-gbps = -1.0: must be positive"),
        ("--link-gbps 200 --node-link-gbps 0", "--node-link-gbps = 0.0: must be positive"),
        ("--node-link-gbps 900", "has no effect without --link-gbps"),
        ("--micro-batch-size 0", "--micro-batch-size = 0: must be positive"),
        ("--micro-batch-size 5", "--micro-batch-size = 5: does not divide the 32 images"),
        ("--mfu 40", "write 0.4 for 40 %"),
        ("--power-ema-stds 5", "'5' is not a width from 0.001 to 0.288"),
        ("--model nowhere.json", "--model = nowhere.json: cannot be read"),
    ],
)
def test_a_wrong_flag_is_named(capsys, flags, message):
    assert main([*PLAN, "--world-size", "8", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("world_size", "batch"), [(6, 252), (512, 512)])
def test_a_batch_that_the_ranks_cannot_share_is_said(capsys, world_size, batch):
    assert main([*PLAN, "--world-size", str(world_size)]) == 0
    assert f"256 images cannot be shared equally by {world_size} ranks" in (out := capsys.readouterr().out)
    assert f"This plan is for --global-batch-size {batch}" in out
    assert main([*PLAN, "--world-size", "8"]) == 0
    assert "cannot be shared" not in capsys.readouterr().out


def test_an_fsdp2_yaml_is_replaced_only_when_asked(tmp_path, capsys):
    target = tmp_path / "new" / "fsdp2.yaml"
    argv = [*PLAN, "--world-size", "8", "--write-fsdp2", str(target)]
    assert main(argv) == 0
    target.write_text("mine")
    assert main(argv) == 2
    assert "exists" in capsys.readouterr().err and target.read_text() == "mine"
    assert main([*argv, "--overwrite"]) == 0
    assert load_fsdp2_config(target)


def test_peaks_are_found_by_part_of_the_name():
    assert peak_tflops("NVIDIA H200", "bf16") == 989.0
    assert peak_tflops("NVIDIA H100 PCIe", "bf16") == 756.0
    assert peak_tflops("CPU (x86_64, 2 threads)", "bf16") is None
    assert utilisation(700, 0.7117e12, 989.0) == pytest.approx(0.504, abs=1e-3)
    assert utilisation(700, 0.7117e12, None) is None


def test_recompute_keeps_one_vector_a_token_and_block():
    model = model_of()
    kept, again = (activation_bytes(model, dataclasses.replace(Placement(), recompute=r))[0] for r in (False, True))
    assert kept > 15 * again


@pytest.mark.parametrize("preset", ["DiT-S/2", "DiT-XL/2"])
def test_muons_state_and_what_it_gathers_are_planned(preset):
    model = model_of(preset)
    shapes = {name: p for name, p in parameters_of(model.predictor).items() if p.trained}
    matrices = sum(math.prod(p.shape) for p in shapes.values() if p.matrices)
    everything = sum(math.prod(p.shape) for p in shapes.values())
    chosen = Chosen("muon", muon.MuonConfig(), muon.MUON)
    assert optimizer_bytes(parameters_of(model.predictor), chosen) == 4 * matrices + 8 * (everything - matrices)
    assert optimizer_bytes(parameters_of(model.predictor), ADAMW) == 8 * everything
    sent = [traffic(model, Placement(8, 8, optimizer=one), 3).within_shards for one in (chosen, ADAMW)]
    assert sent[0] - sent[1] == pytest.approx(7 / 8 * 4 * matrices, abs=2)
    alike = [traffic(model, Placement(8, 1, optimizer=one)) for one in (chosen, ADAMW)]
    assert alike[0] == alike[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--world-size", "6"), "--model: is required"),
        ((*PLAN[1:], "--world-size", "6", "--context-parallel-size", "4"), "--context-parallel-size = 4"),
    ],
)
def test_a_flag_that_is_missing_or_does_not_divide_is_named(capsys, flags, message):
    assert main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err


def test_that_the_exchange_of_ranks_that_share_a_sample_is_not_counted_is_said(capsys):
    assert main([*PLAN, "--world-size", "4", "--context-parallel-size", "2"]) == 0
    assert "2 ranks share a sample; what they exchange for it is not counted" in capsys.readouterr().out


def test_what_needs_least_is_said_where_nothing_fits(capsys):
    assert main(["plan", *PLAN[1:3], "--world-size", "8", "--device-memory-gib", "2"]) == 2
    assert "even sharded over 8 ranks with recompute; 0 fit" in capsys.readouterr().err
