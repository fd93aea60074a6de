"""What networks say of themselves on the meta backend, against the networks that PyTorch builds and runs."""

import importlib

import pytest

from mindspeed_mm_dit.configs.dit import PRESETS, DiTConfig
from mindspeed_mm_dit.configs.joint import Flux2Config, FluxConfig, QwenImageConfig, SD3Config, ZImageConfig
from mindspeed_mm_dit.configs.video_transformer import CustomDiTConfig, WanConfig
from mindspeed_mm_dit.models.meta import forward_pass, multiply_adds, parameters_of
from tests.framework.test_paper import keep_as_a_gpu_does

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.pytorch

SMALL = {"num_layers": 3, "hidden_size": 192, "num_heads": 3, "num_classes": 10}
TEXT = {"text_dim": 96, "text_length": 40}
VIDEO = {"num_layers": 2, "ffn_dim": 512, "latent_size": (3, 8, 12)}
HEADS = {"num_heads": 6, "head_dim": 32}
WIDE = {"num_attention_heads": 6, "attention_head_dim": 32, "text_dim": 96}
JOINT = {"num_layers": 2, "num_attention_heads": 6, "attention_head_dim": 32, "joint_attention_dim": 96,
         "latent_size": (16, 16), "text_length": 40}  # fmt: skip
TURNED = {"axes_dims_rope": (8, 12, 12)}
SINGLE, TABLE = {"num_single_layers": 3}, {"pos_embed_max_size": 16}
NETWORKS = {
    "DiT": DiTConfig(16, **SMALL),
    "LightningDiT": DiTConfig(**PRESETS["LightningDiT-B/2"] | SMALL, input_size=16),
    "LightningDiT without shifts": DiTConfig(**PRESETS["LightningDiT-B/2"] | SMALL, input_size=16, wo_shift=True),
    "QK-norm by LayerNorm": DiTConfig(16, **SMALL, qk_norm=True),
    "JiT": DiTConfig(**PRESETS["JiT-B/16"] | SMALL | {"patch_size": 4, "bottleneck_dim": 24, "in_context_len": 8,
                     "in_context_start": 1}, input_size=32, in_channels=3),
    "MeanFlow": DiTConfig(16, **SMALL, learn_sigma=False, h_embedder=True),
    "text": DiTConfig(16, **SMALL | {"num_classes": 0}, **TEXT, pooled_dim=64),
    "text and classes": DiTConfig(16, **SMALL, **TEXT),
    "teachers": DiTConfig(16, **SMALL, z_dims=(80, 48), projector_dim=96, encoder_depth=2),
    "Wan": WanConfig(**VIDEO, **WIDE),
    "Wan 2.2 from an image": WanConfig(**VIDEO, **WIDE, in_channels=36),
    "Wan 2.1 from an image": WanConfig(**VIDEO, **WIDE, in_channels=36, image_dim=80, added_kv_proj_dim=192),
    "Wan 2.1 from two images": WanConfig(**VIDEO, **WIDE, in_channels=36, image_dim=80, added_kv_proj_dim=192,
                                         pos_embed_seq_len=34, last_frame=True),
    "Wan 2.2 TI2V": WanConfig(**VIDEO, **WIDE, in_channels=48, out_channels=48, expand_timesteps=True),
    "CustomDiT": CustomDiTConfig(**VIDEO, **HEADS, text_dim=96),
    "CustomDiT of labels": CustomDiTConfig(**VIDEO, **HEADS, text_dim=None, num_classes=10),
    "FLUX.1": FluxConfig(**JOINT, **TURNED, **SINGLE, pooled_projection_dim=64, guidance_embeds=True),
    "SD3": SD3Config(**JOINT, **TABLE, pooled_projection_dim=64),
    "SD3.5": SD3Config(**JOINT, **TABLE, pooled_projection_dim=64, qk_norm="rms_norm", dual_attention_layers=(0,)),
    "Qwen-Image": QwenImageConfig(**JOINT, **TURNED),
    "Z-Image": ZImageConfig(**JOINT, **TURNED, num_refiner_layers=1),
    "FLUX.2": Flux2Config(**JOINT, **SINGLE, axes_dims_rope=(8, 8, 8, 8), in_channels=16),
}  # fmt: skip
QUICK = {"DiT", "JiT", "text", "teachers", "Wan", "CustomDiT", "FLUX.1", "SD3.5", "Z-Image", "FLUX.2"}


@pytest.fixture(params=[pytest.param(n, marks=[] if n in QUICK else pytest.mark.extended) for n in NETWORKS])
def config(request):
    return NETWORKS[request.param]


def built(config):
    module, _, name = config.network.partition(":")
    return getattr(importlib.import_module(module), name)(config)


def called(network, config):
    times = (1, 2) if config.num_time_inputs == 2 else (1,)
    given = [torch.from_numpy(array) for array in config.conditions.examples(1).values()]
    project = {"project": True} if config.z_dims else {}
    return network(torch.randn(1, *config.latent_shape), torch.rand(times), *given, **project)


def test_parameters_are_those_of_the_network_in_their_order(config):
    network, declared = built(config), parameters_of(config)
    assert {name: tuple(p.shape) for name, p in network.named_parameters()} == declared.shapes()
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert trained == declared.shapes(trained_only=True).keys()
    modules = dict(network.named_modules())
    assert len(declared.blocks) == sum(len(modules[stem]) for stem in declared.block_prefixes) >= config.num_layers


def test_multiply_adds_are_those_that_pytorch_counts(config, monkeypatch):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from mindspeed_mm_dit.framework.pytorch import nn

    monkeypatch.setattr(nn, "onednn_is_faster", lambda: False)  # whose products the counter does not know
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        called(built(config), config)
    assert counter.get_total_flops() == 2 * multiply_adds(config)


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_backward_keeps_what_pytorch_keeps(config, times, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "rms_norm", keep_as_a_gpu_does)
    *others, height, width = config.latent_shape
    config = config.resized((*others, times * height, times * width))
    network, kept, block, inputs, alive = built(config), {}, [None], {}, []
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}

    def storage_of(tensor):
        alive.append(tensor)
        return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()

    def pack(tensor):
        place, size = storage_of(tensor)
        if place not in weights and not tensor.is_complex():  # (a CPU's tables, for rotary positions)
            kept.setdefault(place, (size, block[0]))
        return tensor

    def entered(module, given):
        block[0] = module
        inputs.update(storage_of(each) for each in given if isinstance(each, torch.Tensor))

    modules = dict(network.named_modules())
    for each in (modules[name] for name in parameters_of(config).blocks):
        each.register_forward_pre_hook(entered)
        each.register_forward_hook(lambda *_: block.__setitem__(0, None))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        called(network, config)
    outside = {place: size for place, (size, inside) in kept.items() if inside is None}
    paper = forward_pass(config)
    assert paper.saved_bytes() == pytest.approx(sum(size for size, _ in kept.values()), rel=0.03)
    assert paper.saved_bytes(recompute=True) == pytest.approx(sum((outside | inputs).values()), rel=0.03)
