"""The plan's closed forms against published counts, measured bytes, and the real sharding on a simulated world."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from mindspeed_mm_dit import planning
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.arguments import read_train_args
from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.configs.dit import DIT, JIT, LIGHTNING_DIT, PRESETS, DiTConfig
from mindspeed_mm_dit.configs.fsdp2 import AUTOCAST, FLOAT32, SHARDED_BF16, Fsdp2Config, load_fsdp2_config
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config
from mindspeed_mm_dit.configs.predictor import count
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.meta import parameters_of, with_tuning
from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion
from mindspeed_mm_dit.planning import (
    MemoryLimit,
    Placement,
    activation_bytes,
    check_model_fits,
    check_state_fits,
    memory,
)
from mindspeed_mm_dit.tools.planning.recommend import Request, recommend
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


def model_of(preset="DiT-XL/2", size=32, **predictor):
    ae = AutoencoderKLConfig("not read", latent_channels=predictor.get("in_channels", 4))
    sizes = {"input_size": size, "num_classes": 1000, **PRESETS[preset], **predictor}
    return ModelConfig(ae, GaussianDiffusionConfig(), DiTConfig(**sizes))


def test_parameter_counts_are_the_published_ones():
    """REPA's S/2 has a last layer for tokens twice as wide as its own, and cannot be run: 891,648 too many."""
    for preset, elements in PUBLISHED.items():
        config = DiTConfig(num_classes=1000, **LATENTS[preset], **PRESETS[preset])
        assert parameters_of(config).num_elements() == elements, preset
    published = {"XL/2": 683242512, "L/2": 465955600, "B/2": 137845008, "S/2": 40407312 - 891648}
    for size, elements in published.items():
        config = DiTConfig(32, num_classes=1000, learn_sigma=False, z_dims=(768,), **PRESETS[f"DiT-{size}"])
        assert parameters_of(config).num_elements() == elements, size


@pytest.mark.parametrize(("recipe", "elements", "hours"), [
    ("lightningdit", 675256736, 5.1), ("repa", 683242512, 65.1), ("jit", 131320320, 10.2),
    ("meanflow", 676440592 + 294912, 19.2),
])  # fmt: skip
def test_published_recipes_are_planned_without_weights(capsys, recipe, elements, hours):
    """MeanFlow's published count leaves out the positions, 256 tokens of 1152. docs/recipes.md has the hours."""
    folder = ROOT / f"examples/dit/imagenet256_{recipe}"
    words = read_train_args(folder / "train.args")
    assert load_fsdp2_config(folder / "fsdp2.yaml") and "--use-torch-fsdp2" in words
    flags = ["--model", f"{folder}/model.json", "--world-size", "8", "--device-memory-gib", "80"]
    for name in ("--train-iters", "--global-batch-size"):
        flags += [name, words[words.index(name) + 1]]
    assert main(["plan", *flags]) == 0
    said = capsys.readouterr().out
    assert f" {elements:,} " in said and f": {hours} hours" in said


@pytest.mark.parametrize(("recipe", "elements", "experts"), [
    ("t2v_a14b", 14_288_491_584, "106.5 GiB"), ("i2v_a14b", 14_288_901_184, "106.5 GiB"),
    ("ti2v_5b", 4_999_787_712, ""),
])  # fmt: skip
def test_wan_2_2_is_planned_with_both_experts(capsys, recipe, elements, experts):
    folder = ROOT / f"examples/dit/wan2.2_{recipe}"
    shared = ["--global-batch-size", "1", "--context-parallel-size", "8"]
    flags = ["--model", f"{folder}/model.json", "--world-size", "8", "--device-memory-gib", "64", *shared]
    assert main(["plan", *flags]) == 0
    found = capsys.readouterr().out
    assert f" {elements:,} " in found and experts in found and ("two experts" in found) == bool(experts)
    assert {"--use-torch-fsdp2", "--init-from", *shared} <= set(read_train_args(folder / "train.args"))
    assert load_fsdp2_config(folder / "fsdp2.yaml") and load_data_config(folder / "data.json")


@pytest.mark.parametrize(  # (the CPU's autocast, unlike CUDA's, keeps norms in bf16)
    ("preset", "precision", "recompute"),
    [("DiT-S/2", FLOAT32, False), ("DiT-B/4", SHARDED_BF16, False), ("DiT-B/4", FLOAT32, True)],
)
def test_activations_are_the_bytes_that_autograd_keeps(preset, precision, recompute):
    model = model_of(preset, num_layers=4)
    planned, _ = activation_bytes(model, Placement(precision=precision, recompute=recompute))
    assert planned == pytest.approx(bytes_kept(model, precision, recompute), rel=0.05)


def bytes_kept(model, precision, recompute, batch=2):
    """Bytes of an image that forward and loss leave for backward, weights not counted."""
    network = DiT(model.predictor)
    if precision.mode == "fsdp2":
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
    steering = model.predictor.conditions.examples(batch).values()
    t, given = torch.randint(1000, (batch,)), [torch.from_numpy(array) for array in steering]
    kept: dict[int, int] = {}  # by storage

    def pack(tensor):
        storage = tensor.untyped_storage()
        is_copy = precision == AUTOCAST and tensor.dtype == torch.bfloat16 and tensor.shape in copies_of_weights
        if storage.data_ptr() not in weights and not is_copy:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        noised = diffusion.add_noise(x, t, noise)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == AUTOCAST):
            output = network(noised, t, *given)
        loss = diffusion.loss(output.float(), x, noised, t, noise).mean()
    total = sum(kept.values())
    del loss
    return total / batch


def test_activations_under_autocast_of_cuda(monkeypatch):
    """On a CPU, with what CUDA's autocast does otherwise: norms in float32, and addcmul in its widest input's type."""
    addcmul = torch.addcmul

    def widest_addcmul(*xs):
        widest = functools.reduce(torch.promote_types, (x.dtype for x in xs))
        return addcmul(*(x.to(widest) for x in xs))

    def float32_norm(self, x):
        return torch.native_layer_norm(x.float(), self.normalized_shape, None, None, self.eps)[0]

    monkeypatch.setattr(torch, "addcmul", widest_addcmul)
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", float32_norm)
    model = model_of("DiT-S/2", num_layers=4)
    planned, _ = activation_bytes(model, Placement(precision=AUTOCAST))
    assert planned == pytest.approx(bytes_kept(model, AUTOCAST, recompute=False), rel=0.02)


@pytest.mark.extended
@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("placement", [Placement(), Placement(recompute=True), Placement(precision=FLOAT32)], ids=str)
def test_peak_of_a_step_is_within_a_tenth_of_the_plan(placement, batch):
    """Two micro-batches, so that gradients and activations meet; every byte the allocator hands out is counted."""
    model = model_of("DiT-S/2", num_layers=2)
    fsdp2 = Fsdp2Config(
        sub_modules_to_wrap=("predictor.blocks.{*}", "predictor.final_layer"), cast_forward_inputs=False,
        param_dtype="bf16" if placement.precision.mode == "fsdp2" else None, reduce_dtype="fp32", use_reentrant=False,
        recompute_modules=("predictor.blocks.{*}",) if placement.recompute else None,
    )  # fmt: skip
    flags = run_config(seed=0, weight_decay=0.0, ema_decay=0.99)
    planned = memory(model, placement, online_vae=False)
    runtime.initialize(None, batch, 2 * batch)
    try:
        engine = Engine(DiTModel(model, NoAutoencoder(model.ae)), flags, fsdp2)
        engine.train_step(forward_step, cached_latents(model, batch), 1e-4)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine.train_step(forward_step, cached_latents(model, batch), 1e-4)
        moments = [value for state in engine.optimizer.state().values() for value in state.values()]
        held = [*engine.predictor.parameters(), *engine.ema.averages.values(), *moments]
        here = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]
        resident = sum(tensor.untyped_storage().nbytes() for tensor in here)
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


@pytest.mark.parametrize("world_size", [8, 512])
def test_sharded_weights_are_those_of_fsdp2(world_size):
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
    planned = memory(model, Placement(world_size, world_size))
    assert planned.weights == 4 * local
    assert planned.weights + planned.optimizer < 1.4 / world_size * 12 * PUBLISHED["DiT-XL/2"] + 4 * 256 * 1152


def test_offloaded_state_takes_no_memory_of_the_device():
    whole = load_model_config(str(ROOT / "examples/dit/flux_lora/model.json"))
    model = with_tuning(whole, Tuning(("attention",), rank=16))
    request = Request(Placement(), device_bytes=24 * GIB, images_per_rank=8, online_vae=False)
    with pytest.raises(ConfigError, match="0 fit"):
        recommend(model, request)
    placement = recommend(model, dataclasses.replace(request, run=Placement(offloaded=True))).placement
    plan, before = (memory(model, dataclasses.replace(placement, offloaded=way), False) for way in (True, False))
    state = ("weights", "gradients", "optimizer", "ema")
    assert plan.host_bytes_offloaded == sum(getattr(before, name) for name in state) > 40 * GIB
    assert not any(getattr(plan, name) for name in state) and plan.fixed == before.fixed - plan.host_bytes_offloaded


def test_adapters_of_wan_14b_fit_where_the_whole_does_not():
    whole = load_model_config(str(ROOT / "examples/dit/wan2.2_t2v_a14b/model.json"))
    adapted = with_tuning(whole, Tuning(("to_q", "to_k", "to_v", "to_out.0"), rank=16))
    request = Request(Placement(8), device_bytes=56 * GIB, images_per_rank=1, online_vae=False)
    with pytest.raises(ConfigError, match="0 fit"):
        recommend(whole, request)
    plan, base = memory(adapted, recommend(adapted, request).placement, False), parameters_of(whole).num_elements()
    trained = 40 * 8 * 16 * 2 * 5120
    assert parameters_of(adapted).num_elements(trained_only=True) == trained
    assert plan.weights == pytest.approx(4 * (base + trained) / 8, rel=1e-3)
    assert [plan.gradients, plan.optimizer // 2, plan.ema] == [trained // 2] * 3


@pytest.mark.parametrize("sizes", [
    {"hidden_size": 10**9}, {"num_layers": 1000}, {"num_classes": 10**12}, {"input_size": 10**6}, {"mlp_ratio": 1e9},
    {"in_channels": 10**9}, {"hidden_size": 2**62, "mlp_ratio": 1.0},
], ids=str)  # fmt: skip
def test_model_that_cannot_fit_is_refused_by_its_setting(sizes):
    for check in (check_model_fits, lambda model, place: check_state_fits(model, Placement(1, 1, FLOAT32), place)):
        with pytest.raises(ConfigError, match=rf"predictor.{next(iter(sizes))} = .*80.0 GiB"):
            check(model_of(**sizes), MemoryLimit("a GPU", 80 * GIB))


def test_closed_form_counts_what_the_shapes_have():
    parameters = parameters_of(model_of().predictor)
    each = list(parameters.values())
    for shards in (1, 7):
        assert parameters.num_elements(shards) == count(each, shards)
        assert parameters.num_elements(shards, trained_only=True) == count([p for p in each if p.trained], shards)


def test_exact_fit_passes_and_a_byte_less_does_not():
    model, placement = model_of(), Placement(2, 2, FLOAT32)
    need = planning.state_bytes(memory(model, placement))
    check_state_fits(model, placement, MemoryLimit("a GPU", need))
    check_state_fits(model, placement, MemoryLimit("this machine", 2 * need, num_processes=2))
    for place in (MemoryLimit("a GPU", need - 1), MemoryLimit("this machine", 2 * need - 1, num_processes=2)):
        with pytest.raises(ConfigError, match="gradients, optimizer state and average"):
            check_state_fits(model, placement, place)
    check_model_fits(model, MemoryLimit("this machine", planning.host_bytes(model.predictor)))
    with pytest.raises(ConfigError, match=" 2 ranks"):
        check_model_fits(model, MemoryLimit("this machine", planning.host_bytes(model.predictor), 2))


def test_step_that_may_not_fit_is_a_warning():
    placement, place = Placement(1, 1, AUTOCAST), MemoryLimit("a GPU", 24 * GIB)
    warning = planning.memory_warning(model_of(), placement, 64, False, place)
    fits = memory(model_of(), placement, False).largest_micro_batch(24 * GIB)
    assert f"a micro-batch of {fits} fits" in warning and "--micro-batch-size = 64" in warning
    assert planning.memory_warning(model_of(), placement, fits, False, place) is None


def test_layout_of_a_run_is_that_of_its_yaml():
    assert Placement(8, 1, AUTOCAST).with_sharding(None) == Placement(8, 1, AUTOCAST)
    yaml = Fsdp2Config(sharding_size=4, recompute_modules=("predictor.blocks.{*}",), num_to_forward_prefetch=1,
                       reshard_after_forward=False)  # fmt: skip
    wanted = Placement(8, 4, SHARDED_BF16, recompute=True, prefetch=1, reshard_after_forward=False)
    assert Placement(8, 1, SHARDED_BF16).with_sharding(yaml) == wanted
