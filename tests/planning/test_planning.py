"""The plan's closed forms against published counts, measured bytes, and the real sharding on a simulated world."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config, load_fsdp2_config, resolve_paths
from mindspeed_mm_dit.configs.model import (
    AutoencoderKLConfig,
    GaussianDiffusionConfig,
    ModelConfig,
    PixelConfig,
    model_config_from_mapping,
)
from mindspeed_mm_dit.configs.precision import AUTOCAST, FLOAT32, SHARDED_BF16
from mindspeed_mm_dit.configs.presets import DIT, JIT, LIGHTNING_DIT, PRESETS
from mindspeed_mm_dit.configs.text_encoder import UMT5Config
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.configs.tuning import Tuning, tuned
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.pytorch import linear, ops, runtime
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion
from mindspeed_mm_dit.optimizers import muon
from mindspeed_mm_dit.optimizers.contract import Chosen
from mindspeed_mm_dit.optimizers.registry import ADAMW
from mindspeed_mm_dit.planning.arithmetic import peak_tflops, utilisation
from mindspeed_mm_dit.planning.memory import Layout, activation_bytes, memory, optimizer_bytes
from mindspeed_mm_dit.planning.recommend import Request, recommend
from mindspeed_mm_dit.planning.traffic import Links, Traffic, step_time, traffic
from mindspeed_mm_dit.training.pytorch.engine import Engine
from tests.conftest import ROOT, run_config

GIB = 2**30
PUBLISHED = {
    "DiT-XL/2": 675129632, "DiT-XL/4": 675074432, "DiT-XL/8": 675683072,
    "DiT-L/2": 458102816, "DiT-L/4": 458053760, "DiT-L/8": 458594816,
    "DiT-B/2": 130512416, "DiT-B/4": 130475648, "DiT-B/8": 130881536,
    "DiT-S/2": 32963360, "DiT-S/4": 32945024, "DiT-S/8": 33148160,
    "LightningDiT-XL/1": 675256736, "LightningDiT-B/1": 130556192,
    "LightningDiT-1p0B/1": 1029401120, "LightningDiT-1p6B/1": 1631767120,
    "JiT-B/16": 131320320, "JiT-L/16": 459139808, "JiT-H/16": 952842048,
    "JiT-B/32": 133387008, "JiT-L/32": 461796320, "JiT-H/32": 956383296,
}  # fmt: skip
LATENTS = {
    **{name: {"input_size": 32} for name in DIT},
    **{name: {"input_size": 16, "in_channels": 32} for name in LIGHTNING_DIT},
    **{name: {"input_size": 16 * sizes["patch_size"], "in_channels": 3} for name, sizes in JIT.items()},
}
SMALL = {"num_layers": 3, "hidden_size": 192, "num_heads": 3, "num_classes": 10}
OPTIONS = {
    "LightningDiT": {**PRESETS["LightningDiT-B/2"], **SMALL, "input_size": 16},
    "LightningDiT without shifts": {**PRESETS["LightningDiT-B/2"], **SMALL, "input_size": 16, "wo_shift": True},
    "QK-norm by LayerNorm": {**PRESETS["DiT-B/2"], **SMALL, "input_size": 16, "qk_norm": True},
    "JiT": {**PRESETS["JiT-B/16"], **SMALL, "patch_size": 4, "input_size": 32, "bottleneck_dim": 24,
            "in_context_len": 8, "in_context_start": 1, "in_channels": 3},
    "text": {**PRESETS["DiT-B/2"], **SMALL, "num_classes": 0, "input_size": 16, "text_dim": 96, "text_length": 40,
             "pooled_dim": 64},
    "text and classes": {**PRESETS["DiT-B/2"], **SMALL, "input_size": 16, "text_dim": 96, "text_length": 40},
}  # fmt: skip
"""Small networks that have each option at least once."""


def model_of(preset="DiT-XL/2", size=32, **predictor):
    return ModelConfig(
        ae=AutoencoderKLConfig(from_pretrained="not read"),
        diffusion=GaussianDiffusionConfig(),
        predictor=DiTConfig(**{"input_size": size, "num_classes": 1000, **PRESETS[preset], **predictor}),
    )


@pytest.mark.parametrize("preset", PUBLISHED)
def test_parameter_counts_are_the_published_ones(preset):
    config = DiTConfig(num_classes=1000, **LATENTS[preset], **PRESETS[preset])
    assert config.parameters().num_elements() == PUBLISHED[preset]


@pytest.mark.parametrize(
    ("size", "elements"), [("XL/2", 683242512), ("L/2", 465955600), ("B/2", 137845008), ("S/2", 40407312 - 891648)]
)
def test_parameter_counts_with_a_projector_are_repas(size, elements):
    """The published S/2 has a last layer for tokens twice as wide as its own, and cannot be run: 891,648 too many."""
    config = DiTConfig(32, num_classes=1000, learn_sigma=False, z_dims=(768,), **PRESETS[f"DiT-{size}"])
    assert config.parameters().num_elements() == elements


@pytest.mark.parametrize(
    ("recipe", "elements"),
    [("lightningdit", 675256736), ("repa", 683242512), ("jit", 131320320), ("meanflow", 676440592 + 294912)],
)
def test_a_published_recipe_is_planned_without_its_weights(capsys, recipe, elements):
    """MeanFlow's published count leaves out the positions, 256 tokens of 1152."""
    folder = ROOT / f"examples/dit/imagenet256_{recipe}"
    assert main(["plan", "--model", f"{folder}/model.json", "--world-size", "8", "--device-memory-gib", "80"]) == 0
    assert f"parameters       {elements:,} " in capsys.readouterr().out
    words = read_train_args(folder / "train.args")
    assert load_fsdp2_config(folder / "fsdp2.yaml") and "--use-torch-fsdp2" in words
    batch = int(words[words.index("--global-batch-size") + 1])
    assert batch == 8 * int(words[words.index("--micro-batch-size") + 1])


def test_arithmetic_and_memory_of_projectors_are_planned(monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(linear, "onednn_is_faster", lambda: False)
    plain = DiTConfig(**PRESETS["DiT-B/2"] | SMALL, input_size=16)
    config = dataclasses.replace(plain, z_dims=(80, 48), projector_dim=96, encoder_depth=2)
    network, counter, kept = DiT(config), FlopCounterMode(display=False), []
    draw, given = torch.randn(2, *config.latent_shape), (torch.zeros(2, dtype=torch.int64), *examples(config))
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        network(draw, *given, project=True)
    assert counter.get_total_flops() == 2 * 2 * config.multiply_adds()
    tokens = torch.randn(2, config.num_tokens, config.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        for project, width in zip(network.projectors, config.z_dims):
            torch.nn.functional.cosine_similarity(project(tokens), torch.randn(2, config.num_tokens, width), -1)
    known = {parameter.data_ptr() for parameter in network.parameters()} | {tokens.data_ptr()}
    sizes = {saved.data_ptr(): saved.numel() for saved in kept if saved.data_ptr() not in known and saved.shape[-1] > 1}
    planned = config.kept_by_ends().other - plain.kept_by_ends().other
    assert planned == pytest.approx(sum(sizes.values()) / 2, rel=0.1)


@pytest.mark.parametrize("sizes", [{"hidden_size": 48, "num_heads": 3, "patch_size": 4}, *OPTIONS.values()])
def test_shapes_are_those_of_the_network(sizes):
    config = DiTConfig(**{"input_size": 32, "num_classes": 1000, "num_layers": 2, **sizes})
    network = DiT(config)
    found = {name: tuple(p.shape) for name, p in network.named_parameters()}
    trained = {name: tuple(p.shape) for name, p in network.named_parameters() if p.requires_grad}
    assert list(config.parameters().shapes().items()) == list(found.items())
    assert config.parameters().shapes(trained_only=True) == trained


@pytest.mark.parametrize("sizes", [{**PRESETS["DiT-S/4"], "input_size": 16, "num_classes": 9}, *OPTIONS.values()])
def test_multiply_adds_are_those_pytorch_counts(monkeypatch, sizes):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(linear, "onednn_is_faster", lambda: False)  # whose products it does not know
    config = DiTConfig(**sizes)
    network, draw = DiT(config), torch.randn(2, *config.latent_shape)
    counter = FlopCounterMode(display=False)  # it knows attention by its matrix products only
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        network(draw, torch.zeros(2, dtype=torch.int64), *examples(config))
    assert counter.get_total_flops() == 2 * 2 * config.multiply_adds()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "precision", [FLOAT32, SHARDED_BF16], ids=["fp32", "bf16"]
)  # the CPU's autocast, unlike CUDA's, keeps norms in bf16
@pytest.mark.parametrize("preset", ["DiT-S/2", "DiT-B/4"])
def test_activations_are_within_a_tenth_of_the_bytes_autograd_keeps(preset, precision, recompute):
    model = model_of(preset, num_layers=4)
    planned, _ = activation_bytes(model, Layout(precision=precision, recompute=recompute))
    assert planned == pytest.approx(bytes_kept(model, precision, recompute), rel=0.10)


@pytest.mark.parametrize("sizes", OPTIONS.values(), ids=OPTIONS)
def test_activations_of_every_option_are_planned(sizes):
    config = DiTConfig(**sizes)
    model = ModelConfig(
        PixelConfig(3) if config.in_channels == 3 else AutoencoderKLConfig("not read"),
        GaussianDiffusionConfig(variance_type="learned_range" if config.learn_sigma else "fixed_small"),
        config,
        UMT5Config("not read") if config.text_dim else None,
    )
    planned, _ = activation_bytes(model, Layout(precision=FLOAT32))
    assert planned == pytest.approx(bytes_kept(model, FLOAT32, recompute=False), rel=0.10)


def examples(config, count=2):
    """What steers so many samples, as tensors."""
    return [torch.from_numpy(array) for array in config.conditions.examples(count).values()]


def bytes_kept(model, precision, recompute, batch=2):
    """Bytes of an image that forward and loss leave for backward, weights not counted."""
    network = DiT(model.predictor)
    if precision.way == "fsdp2":
        network.to(torch.bfloat16)
        network.t_embedder.frequencies = network.t_embedder.frequencies.float()
    if recompute:
        for block in network.blocks:
            run = block.forward
            block.forward = lambda *given, run=run: checkpoint(run, *given, use_reentrant=False)
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    copies_of_weights = {shape for p in network.parameters() for shape in (p.shape, p.shape[::-1])}  # autocast's
    diffusion = GaussianDiffusion.from_config(model.diffusion)
    x, noise = torch.randn(2, batch, *model.latent_shape)
    t, given = torch.randint(1000, (batch,)), examples(model.predictor, batch)
    kept: dict[int, int] = {}  # by storage

    def pack(tensor):
        storage = tensor.untyped_storage()
        is_copy = precision == AUTOCAST and tensor.dtype == torch.bfloat16 and tensor.shape in copies_of_weights
        if storage.data_ptr() not in weights and not is_copy:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        noised = diffusion.noised(x, t, noise)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == AUTOCAST):
            output = network(noised, t, *given)
        loss = diffusion.loss(output.float(), x, noised, t, noise).mean()
    total = sum(kept.values())
    del loss
    return total / batch


def test_activations_under_cudas_autocast(monkeypatch):
    """On a CPU, with what CUDA's autocast does otherwise: norms in float32, and addcmul in its widest input's type."""
    addcmul = torch.addcmul

    def widest_addcmul(*xs):
        widest = functools.reduce(torch.promote_types, (x.dtype for x in xs))
        return addcmul(*(x.to(widest) for x in xs))

    def float32_norm(self, x):
        return torch.native_layer_norm(x.float(), self.normalized_shape, None, None, self.eps)[0]

    monkeypatch.setattr(ops, "addcmul", widest_addcmul)
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", float32_norm)
    model = model_of("DiT-S/2", num_layers=4)
    planned, _ = activation_bytes(model, Layout(precision=AUTOCAST))
    assert planned == pytest.approx(bytes_kept(model, AUTOCAST, recompute=False), rel=0.02)


@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(recompute=True), Layout(precision=FLOAT32)], ids=["bf16", "recomputed", "fp32"]
)
def test_the_peak_of_a_step_is_within_a_tenth_of_the_plan(layout, batch):
    """Two micro-batches, so that gradients and activations meet; every byte the allocator hands out is counted."""
    model = model_of("DiT-S/2", num_layers=2)
    fsdp2 = Fsdp2Config(
        sub_modules_to_wrap=("predictor.blocks.{*}", "predictor.final_layer"), cast_forward_inputs=False,
        param_dtype="bf16" if layout.precision.way == "fsdp2" else None, reduce_dtype="fp32", use_reentrant=False,
        recompute_modules=("predictor.blocks.{*}",) if layout.recompute else None,
    )  # fmt: skip
    flags = run_config(seed=0, weight_decay=0.0, ema_decay=0.99)
    planned = memory(model, layout, online_vae=False)
    runtime.initialize(None, batch, 2 * batch)
    try:
        engine = Engine(DiTModel(model, NoAutoencoder(model.ae)), flags, fsdp2)
        engine.train_step(forward_step, cached_latents(model, batch), 1e-4)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine.train_step(forward_step, cached_latents(model, batch), 1e-4)
        moments = [value for state in engine.optimizer.state().values() for value in state.values()]
        held = [*engine.predictor.parameters(), *engine.ema.averages.values(), *moments]
        resident = sum(local(tensor).untyped_storage().nbytes() for tensor in held)
    finally:
        runtime.shutdown()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    peak = resident + max(itertools.accumulate(changes))
    assert planned.total(batch) == pytest.approx(peak, rel=0.10)


def forward_step(batches, model):
    losses = model(**runtime.to_device(next(batches)))
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean()})


def cached_latents(model, batch):
    draw, shape = np.random.default_rng(0), (batch, *model.latent_shape)
    while True:
        yield {
            "labels": draw.integers(0, model.predictor.num_classes, batch),
            "timesteps": draw.integers(0, 1000, batch),
            **{name: draw.standard_normal(shape, np.float32) for name in ("noise", "posterior_noise", "latent_mean")},
            "latent_std": np.full(shape, 0.1, np.float32),
        }


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("world_size", [8, 64, 512])
def test_sharded_weights_are_those_of_fsdp2_on_a_simulated_world(world_size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = model_of()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with torch.device("meta"):
            network = DiT(model.predictor)
        mesh = init_device_mesh("cpu", (world_size,))
        for block in network.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        local = sum(p.to_local().numel() for p in network.parameters())
    finally:
        dist.destroy_process_group()
    planned = memory(model, Layout(world_size, world_size))
    assert planned.weights == 4 * local
    assert planned.weights + planned.optimizer < 1.4 / world_size * 12 * PUBLISHED["DiT-XL/2"] + 4 * 256 * 1152


def test_two_ranks_hold_half_of_what_one_holds():
    one, two = (memory(model_of(), Layout(n, n)) for n in (1, 2))
    state = [m.weights + m.optimizer + m.ema for m in (one, two)]
    assert state[1] <= 0.55 * state[0]


def test_adapters_beside_a_wan_of_14_billion_parameters_fit_where_the_whole_does_not():
    sections = {
        "ae": {"model_id": "wan_video_vae", "from_pretrained": "vae"},
        "text_encoder": {"model_id": "umt5", "from_pretrained": "umt5"},
        "diffusion": {"model_id": "wan_flow_match_scheduler"},
        "predictor": {
            "model_id": "wan", "num_layers": 40, "num_attention_heads": 40, "attention_head_dim": 128,
            "ffn_dim": 13824, "latent_size": [21, 60, 104],
        },
    }  # fmt: skip
    whole = model_config_from_mapping(sections, "model.json")
    adapted = tuned(whole, Tuning(("to_q", "to_k", "to_v", "to_out.0"), rank=16))
    request = Request(world_size=8, device_bytes=64 * GIB, images_per_rank=1, online_vae=False)
    with pytest.raises(ConfigError, match="0 fit"):
        recommend(whole, request)
    plan, base = memory(adapted, recommend(adapted, request).layout, False), whole.parameters().num_elements()
    trained = 40 * 8 * 16 * 2 * 5120
    assert adapted.parameters().num_elements(trained_only=True) == trained
    assert plan.weights == pytest.approx(4 * (base + trained) / 8, rel=1e-3)
    assert [plan.gradients, plan.optimizer // 2, plan.ema] == [trained // 2] * 3


def test_traffic_follows_the_ring():
    model = model_of()
    parameters = model.predictor.parameters()
    everything, trained = parameters.num_elements(), parameters.num_elements(trained_only=True)
    replicated = traffic(model, Layout(8, 1))
    assert (replicated.within_shards, replicated.between_replicas) == (0, round(2 * 7 / 8 * 4 * trained))
    sharded = traffic(model, Layout(8, 8))
    assert sharded.within_shards == round(7 / 8 * (2 * 2 * everything + 4 * trained))
    assert sharded.between_replicas == 0
    kept = traffic(model, Layout(8, 8, reshard_after_forward=False))
    assert sharded.within_shards - kept.within_shards == pytest.approx(7 / 8 * 2 * everything, abs=1)
    hybrid = traffic(model, Layout(64, 8))
    assert hybrid.within_shards == sharded.within_shards
    assert hybrid.between_replicas == round(2 * 7 / 8 * 4 * trained / 8)


def test_times_follow_the_links():
    sent = Traffic(within_shards=10**9, between_replicas=10**8)
    links = Links(between_nodes_gbps=100, within_node_gbps=1000, node_size=8)
    assert links.seconds(Layout(8, 8), sent) == pytest.approx(8 * 1.1e9 / 1e12)
    assert links.seconds(Layout(64, 8), sent) == pytest.approx(8 * (1e9 / 1e12 + 1e8 / 1e11))
    assert links.seconds(Layout(64, 64), sent) == pytest.approx(8 * 1.1e9 / 1e11)
    kept, again = (step_time(model_of(), Layout(recompute=r), 256, 0.5e15) for r in (False, True))
    assert kept == pytest.approx(0.364, abs=1e-3)
    assert again == pytest.approx(kept * 4 / 3)


def test_sharding_and_recompute_come_only_when_they_are_needed():
    model = model_of()

    def layout(gib, world_size=8, images=32):
        return recommend(model, Request(world_size, gib * GIB, images, online_vae=False)).layout

    assert layout(80).shard_ranks == 1
    assert not layout(80).recompute
    assert layout(16).shard_ranks == 8
    assert layout(6, images=64).recompute
    assert layout(80, world_size=64, images=4).shard_ranks == 8  # most bytes stay within a node


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
    kept, again = (activation_bytes(model, dataclasses.replace(Layout(), recompute=r))[0] for r in (False, True))
    assert kept > 15 * again


@pytest.mark.parametrize("preset", ["DiT-S/2", "DiT-XL/2"])
def test_muons_state_and_what_it_gathers_are_planned(preset):
    model = model_of(preset)
    shapes = {name: p for name, p in model.predictor.parameters() if p.trained}
    matrices = sum(math.prod(p.shape) for p in shapes.values() if p.matrices)
    everything = sum(math.prod(p.shape) for p in shapes.values())
    chosen = Chosen("muon", muon.MuonConfig(), muon.MUON)
    assert optimizer_bytes(model.predictor.parameters(), chosen) == 4 * matrices + 8 * (everything - matrices)
    assert optimizer_bytes(model.predictor.parameters(), ADAMW) == 8 * everything
    sent = [traffic(model, Layout(8, 8, optimizer=one), 3).within_shards for one in (chosen, ADAMW)]
    assert sent[0] - sent[1] == pytest.approx(7 / 8 * 4 * matrices, abs=2)
    alike = [traffic(model, Layout(8, 1, optimizer=one)) for one in (chosen, ADAMW)]
    assert alike[0] == alike[1]
