"""What mm-dit plan recommends and says: bytes sent, the time of a step, the layout, its yaml, and what is refused."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.fsdp2 import load_fsdp2_config, resolve_paths
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.optimizers import muon
from mindspeed_mm_dit.optimizers.contract import ConfiguredOptimizer
from mindspeed_mm_dit.optimizers.registry import ADAMW
from mindspeed_mm_dit.planning import Placement, model_flop_utilization, optimizer_bytes, peak_tflops
from mindspeed_mm_dit.tools.planning import recommend as recommendation
from mindspeed_mm_dit.tools.planning.recommend import Links, Request, Traffic, host_traffic, recommend, traffic
from tests.conftest import ROOT
from tests.planning.test_planning import GIB, model_of
from tests.tools.tables import refusals

PLAN = ["plan", "--model", str(ROOT / "examples/dit/imagenet256/model.json"), "--device-memory-gib", "80"]


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
    kept, again = (recommendation.step_time(model_of(), Placement(recompute=r), 256, 0.5e15) for r in (False, True))
    assert kept == pytest.approx(0.364, abs=1e-3)
    assert again == pytest.approx(kept * 4 / 3)


def test_sharding_and_recompute_come_when_needed():
    def placement(gib, world_size=8, images=32):
        return recommend(model_of(), Request(Placement(world_size), gib * GIB, images, online_vae=False)).placement

    assert placement(80).shard_ranks == 1 and not placement(80).recompute
    assert placement(16).shard_ranks == 8
    assert placement(6, images=64).recompute
    assert placement(80, world_size=64, images=4).shard_ranks == 8  # most bytes stay within a node


def test_written_yaml_is_read_back_and_names_modules(tmp_path, capsys):
    target = tmp_path / "new" / "fsdp2.yaml"
    argv = [*PLAN[:3], "--world-size", "8", "--device-memory-gib", "12", "--link-gbps", "200"]
    assert main([*argv, "--write-fsdp2", str(target)]) == 0
    config = load_fsdp2_config(target)
    assert config.shard_ranks(8) == 8
    with torch.device("meta"):
        names = [f"predictor.{name}" for name, _ in DiT(model_of().predictor).named_modules()]
    assert len(resolve_paths(config.sub_modules_to_wrap, names, "sub_modules_to_wrap")) == 29
    out = capsys.readouterr().out
    assert all(words in out for words in ("675,129,632", "118.62 G", "0.712 TFLOP"))
    target.write_text("mine")
    assert main([*argv, "--write-fsdp2", str(target)]) == 2 and target.read_text() == "mine"
    assert main([*argv, "--write-fsdp2", str(target), "--overwrite"]) == 0 and load_fsdp2_config(target)


FIGURES = {"fashion_mnist": "44.85 M", "digits_flow": "13.34 M", "flux_lora": "18,677,760", "t2v_custom": "385.799"}


@pytest.mark.parametrize("config", FIGURES)
def test_plan_counts_operations_and_trained_weights(config, capsys):
    flags = ["--world-size", "8", "--device-memory-gib", "80"]
    assert main(["plan", "--model", str(ROOT / f"examples/dit/{config}/model.json"), *flags]) == 0
    assert FIGURES[config] in capsys.readouterr().out


TABLE = [
    ("flux_lora", "", 66), ("flux_lora", "24 --offload-to-cpu", 21), ("sd3_lora", "", 37), ("sd3_lora", "24", 20),
    ("qwen_image_lora", "80 --world-size 2", 62), ("qwen_image_lora", "24 --offload-to-cpu", 19),
    ("z_image_lora", "", 56), ("z_image_lora", "24 --offload-to-cpu", 9),
]  # fmt: skip


@pytest.mark.parametrize(("config", "device", "gib"), TABLE)
def test_table_of_base_models_is_the_plan(config, device, gib, capsys):
    flags = f"--device-memory-gib {device}".split() if device else []
    assert main(["plan", "--model", str(ROOT / f"examples/dit/{config}/model.json"), "--latents", *flags]) == 0
    assert round(float(re.search(r"total +(\S+) GiB", capsys.readouterr().out)[1])) == gib
    (row,) = [row for row in (ROOT / "docs/text_to_image.md").read_text().splitlines() if f"| `{config}` |" in row]
    assert re.search(rf"\b{gib}\b", row)


def test_plan_takes_the_peak_of_a_card_of_that_memory(capsys):
    model = f"--model {ROOT}/examples/dit/flux_lora/model.json --latents --offload-to-cpu --device-memory-gib"
    for flags, card, hours in (("24", "4090", 3.8), ("64", "H100", 0.6), ("24 --peak-tflops 989", "", 0.6)):
        assert main(["plan", *model.split(), *flags.split()]) == 0
        out = capsys.readouterr().out
        assert f": {hours} hours if" in out and (f"NVIDIA {card}" in out if card else "NVIDIA" not in out)
    assert peak_tflops("NVIDIA H200", "bf16") == 989.0 and peak_tflops("NVIDIA H100 PCIe", "bf16") == 756.0
    assert peak_tflops("CPU (x86_64, 2 threads)", "bf16") is None
    assert model_flop_utilization(700, 0.7117e12, 989.0) == pytest.approx(0.504, abs=1e-3)
    assert model_flop_utilization(700, 0.7117e12, None) is None


def test_offloaded_weights_cross_the_host_link():
    model, kept = model_of(), Placement(1, offloaded=True, reshard_after_forward=False)
    parameters = parameters_of(model.predictor)
    weights, gradients = 4 * parameters.num_elements(), 4 * parameters.num_elements(trained_only=True)
    assert host_traffic(model, kept, 3) == 3 * (weights + gradients)
    assert host_traffic(model, replace(kept, reshard_after_forward=True)) == 2 * weights + gradients
    assert host_traffic(model, Placement(1)) == 0


def test_plan_of_buckets_is_of_the_dearest(capsys, tmp_path):
    shapes = [[1, 480, 832], [49, 480, 480], [33, 480, 832]]
    param = {"dataset_type": "clips", "data_folder": "d", "json_path": "d/a.json", "buckets": shapes}
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": param}))
    model = ROOT / "examples/dit/t2v_custom/model.json"
    flags = ["--model", str(model), "--world-size", "8", "--device-memory-gib", "64"]
    assert main(["plan", *flags, "--data", f"{tmp_path}/data.json"]) == 0
    assert "planned for      33 x 480 x 832, the most expensive of 3 buckets" in capsys.readouterr().out


@refusals("""
--device-memory-gib nan
--device-memory-gib 2 | 0 fit
--link-gbps -1 | --link-gbps = -1.0
--link-gbps 200 --node-link-gbps 0 | --node-link-gbps = 0.0
--node-link-gbps 900 | --link-gbps
--micro-batch-size 0
--micro-batch-size 5
--mfu 40 | 0.4
--power-ema-stds 5 | '5'
--model nowhere.json
--world-size 6 --context-parallel-size 4
""")
def test_flags_that_cannot_be_planned_are_refused(capsys, flags, named):
    assert main([*PLAN, "--world-size", "8", *flags.split()]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("world_size", "batch"), [(6, 252), (512, 512)])
def test_batch_that_ranks_cannot_share_is_changed(capsys, world_size, batch):
    assert main([*PLAN, "--world-size", str(world_size)]) == 0
    assert f"--global-batch-size {batch}" in capsys.readouterr().out


@pytest.mark.parametrize("preset", ["DiT-S/2", "DiT-XL/2"])
def test_state_and_traffic_of_muon_are_planned(preset):
    model = model_of(preset)
    shapes = {name: p for name, p in parameters_of(model.predictor).items() if p.trained}
    matrices = sum(math.prod(p.shape) for p in shapes.values() if p.matrices)
    everything = sum(math.prod(p.shape) for p in shapes.values())
    chosen = ConfiguredOptimizer("muon", muon.MuonConfig(), muon.MUON)
    assert optimizer_bytes(parameters_of(model.predictor), chosen) == 4 * matrices + 8 * (everything - matrices)
    assert optimizer_bytes(parameters_of(model.predictor), ADAMW) == 8 * everything
    sent = [traffic(model, Placement(8, 8, optimizer=one), 3).within_shards for one in (chosen, ADAMW)]
    assert sent[0] - sent[1] == pytest.approx(7 / 8 * 4 * matrices, abs=2)
    assert traffic(model, Placement(8, 1, optimizer=chosen)) == traffic(model, Placement(8, 1, optimizer=ADAMW))


def test_blocks_that_wait_are_planned_with_recompute(capsys):
    flags = [*PLAN, "--lora-target-modules", "attention", "--base-dtype", "nf4", "--offload-blocks"]
    assert main([*flags, "14"]) == 0
    printed = capsys.readouterr().out
    assert "recompute on" in printed and "in the machine" in printed
    assert main([*flags, "99"]) == 2
    assert "more than the 28 blocks" in capsys.readouterr().err
