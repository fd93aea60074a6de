"""Image transformers of joint attention against diffusers' own, their published sizes, and what they refuse."""

import dataclasses

import numpy as np
import pytest

from mindspeed_mm_dit.configs.dit import JOINT
from mindspeed_mm_dit.configs.joint import Flux2Config, FluxConfig, QwenImageConfig, SD3Config, ZImageConfig
from mindspeed_mm_dit.configs.model import PREDICTOR_CONFIGS, model_config_from_mapping
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.weight_adapters import weight_converter_of
from mindspeed_mm_dit.tools.verify.against import diffusers_inputs, tensor_of

on_pytorch = pytest.mark.pytorch  # compares with diffusers, or the same on every framework
HEADS = {"num_layers": 3, "num_attention_heads": 3, "attention_head_dim": 16, "joint_attention_dim": 40}
TURNED = {"axes_dims_rope": (4, 6, 6)}
PLACES = {"latent_size": (8, 8), "pos_embed_max_size": 8}
THEIRS = {
    "flux": HEADS | TURNED | {"in_channels": 12, "num_single_layers": 2, "pooled_projection_dim": 24},
    "flux guided": HEADS | TURNED | {"in_channels": 20, "num_single_layers": 1, "pooled_projection_dim": 24,
                                     "guidance_embeds": True},
    "sd3": HEADS | {"in_channels": 5, "out_channels": 5, "pooled_projection_dim": 24, "caption_projection_dim": 48,
                    "sample_size": 12, "pos_embed_max_size": 10},
    "sd3 dual": HEADS | {"in_channels": 4, "out_channels": 4, "pooled_projection_dim": 24, "caption_projection_dim": 48,
                         "sample_size": 16, "pos_embed_max_size": 8, "qk_norm": "rms_norm",
                         "dual_attention_layers": (0, 1)},
    "qwen_image": HEADS | TURNED | {"in_channels": 12, "out_channels": 3},
}  # fmt: skip
"""Settings of diffusers' networks."""
OURS = {
    "flux": FluxConfig(**HEADS, **TURNED, num_single_layers=2, pooled_projection_dim=24, guidance_embeds=True),
    "sd3": SD3Config(**HEADS, **PLACES, pooled_projection_dim=24, qk_norm="rms_norm", dual_attention_layers=(1,)),
    "qwen_image": QwenImageConfig(**HEADS, **TURNED),
    "z_image": ZImageConfig(**HEADS, **TURNED, num_refiner_layers=1),
    "flux2": Flux2Config(**HEADS, axes_dims_rope=(4, 4, 4, 4), num_single_layers=2, in_channels=12),
}


def config_of(name):
    kind = PREDICTOR_CONFIGS[name.split()[0]]
    theirs = THEIRS[name] | {"_class_name": kind.diffusers_class}
    return from_mapping(kind, weight_converter_of(kind).of_diffusers(theirs), "config.json")


def filled(framework, config, seed=0):
    from mindspeed_mm_dit.models.registry import network_of

    network, draw = network_of(config), np.random.default_rng(seed)
    shapes = parameters_of(config).shapes()
    values = {name: 0.1 * draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    framework.runtime.load_arrays(network, values)
    return framework.runtime.to_runtime_device(network)


def inputs_of(config, side=(8, 12), batch=2, length=9):
    draw = np.random.default_rng(1)
    given = [array[:, :length] if array.ndim == 3 else array for array in config.conditions.examples(batch).values()]
    x = draw.standard_normal((batch, config.in_channels, *side), np.float32)
    return [x, draw.random(batch, np.float32), *given]


def add_residual(framework, network, inputs):
    with framework.ops.no_grad():
        return framework.ops.numpy(network(*map(framework.ops.tensor, inputs)))


@on_pytorch
@pytest.mark.parametrize("name", THEIRS)
def test_outputs_at_other_sizes_are_those_of_diffusers(framework, name):
    import diffusers
    import torch

    config = config_of(name)
    network, theirs = filled(framework, config), getattr(diffusers, config.diffusers_class)(**THEIRS[name]).eval()
    theirs.load_state_dict(network.state_dict())
    inputs = inputs_of(config)
    given = dict(zip(("x", "t", "text", "pooled"), map(torch.from_numpy, inputs), strict=False))
    if getattr(config, "guidance_embeds", False):
        given["guidance"] = torch.full((2,), config.guidance)
    asked = {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
             for key, value in diffusers_inputs(config, given, theirs).items()}  # fmt: skip
    with torch.no_grad():
        wanted = tensor_of(config, given)(theirs(**asked))
    found = add_residual(framework, network, inputs)
    assert np.linalg.norm(found - wanted.numpy()) < 1e-5 * np.linalg.norm(wanted.numpy())


@on_pytorch
@pytest.mark.parametrize(("preset", "count"), [
    ("FLUX.1-dev", 11_901_408_320), ("FLUX.1-schnell", 11_891_178_560), ("FLUX.2-dev", 32_223_281_152),
    ("FLUX.2-klein-4B", 3_875_544_576), ("FLUX.2-klein-9B", 9_078_581_248),
    ("SD3-medium", 2_028_328_000), ("SD3.5-medium", 2_243_171_520), ("SD3.5-large", 8_056_627_520),
    ("Qwen-Image", 20_430_401_088), ("Z-Image", 6_154_908_736),
])  # fmt: skip
def test_presets_have_the_published_numbers_of_parameters(preset, count):
    """Those of diffusers' classes, which count a table of positions as no parameter."""
    section = JOINT[preset]
    parameters = parameters_of(from_mapping(PREDICTOR_CONFIGS[section["model_id"]], section, "predictor"))
    assert sum(np.prod(p.shape) for name, p in parameters.items() if name != "pos_embed.pos_embed") == count


@on_pytorch
@pytest.mark.parametrize("preset", ["FLUX.1-dev", "FLUX.1-schnell"])
def test_the_shapes_of_a_file_tell_the_network(preset):
    config = from_mapping(FluxConfig, JOINT[preset], "predictor")
    assert weight_converter_of(FluxConfig).of_shapes(parameters_of(config).shapes()) == config
    assert weight_converter_of(FluxConfig).of_shapes({"x_embedder.weight": (4, 4)}) is None


@pytest.mark.parametrize("name", ["qwen_image", "z_image"])
def test_states_that_are_zero_at_the_end_of_a_text_are_padding(framework, name):
    network = filled(framework, OURS[name])
    x, t, text = inputs_of(OURS[name])
    longer = np.pad(text, ((0, 0), (0, 40), (0, 0)))
    found = add_residual(framework, network, [x, t, longer])
    np.testing.assert_allclose(found, add_residual(framework, network, [x, t, text]), atol=1e-5)


@pytest.mark.parametrize("name", ["flux", pytest.param("flux2", marks=pytest.mark.pytorch)])
def test_the_strength_of_guidance_is_an_input_with_a_default(framework, name):
    config = OURS[name]
    network, inputs = filled(framework, config), inputs_of(config)
    default = add_residual(framework, network, inputs)
    same, other = (np.full(2, strength, np.float32) for strength in (config.guidance, 1.5))
    np.testing.assert_allclose(add_residual(framework, network, [*inputs, same]), default, atol=1e-5)
    stronger = filled(framework, dataclasses.replace(config, guidance=1.5))
    found = add_residual(framework, stronger, inputs)
    np.testing.assert_allclose(found, add_residual(framework, network, [*inputs, other]), atol=1e-5)
    assert not np.allclose(found, default, atol=1e-3)


@pytest.mark.mindspore
@pytest.mark.parametrize("name", ["flux2", *(pytest.param(n, marks=pytest.mark.extended) for n in [*OURS][:4])])
def test_a_compiled_network_gives_the_same_answer(framework, name):
    network, inputs = filled(framework, OURS[name]), inputs_of(OURS[name])
    wanted = add_residual(framework, network, inputs)
    found = add_residual(framework, framework.runtime.jit_forward(network), inputs)
    assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)


@on_pytorch
def test_settings_that_no_network_has_are_refused():
    for model_id, changed, words in (
        ("flux", {"axes_dims_rope": [16, 56, 54]}, "must be even numbers whose sum is the width of a head"),
        ("flux", {"latent_size": [7, 8]}, "latent_size = \\[7, 8\\].*multiples of 2"),
        ("flux", {"guidance": -1}, "predictor.guidance = -1"),
        ("sd3", {"dual_attention_layers": [24]}, "names block 24"),
        ("sd3", {"latent_size": [400, 8]}, "at most predictor.pos_embed_max_size = 192"),
        ("sd3", {"num_attention_heads": 1, "attention_head_dim": 6}, "must be a multiple of 4"),
        ("flux2", {"timestep_guidance_channels": 7}, "must be even"),
    ):
        with pytest.raises(ConfigError, match=words):
            from_mapping(PREDICTOR_CONFIGS[model_id], changed, "model.json: predictor")


@on_pytorch
@pytest.mark.parametrize(("model_id", "data_time"), [("flux", 0), ("z_image", 1)])
def test_an_objective_whose_velocity_points_the_other_way_is_refused(model_id, data_time):
    content = {"ae": {"model_id": "pixel"}, "predictor": {"model_id": model_id, "in_channels": 3}}
    content["text_encoder"] = [{"from_pretrained": "x"}] * len(OURS[model_id].conditions)
    flow = {"model_id": "flow_matching", "data_time": data_time}
    assert model_config_from_mapping(content | {"diffusion": flow}, "x").predictor.model_id == model_id
    for other in (flow | {"data_time": 1 - data_time}, {"model_id": "wan_flow_match_scheduler"}):
        with pytest.raises(ConfigError, match=f"learns a velocity with data at time {data_time}"):
            model_config_from_mapping(content | {"diffusion": other}, "x")


@on_pytorch
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_cannot_share_an_image_are_told_what_they_do_not_divide(ranks):
    config = dataclasses.replace(OURS["flux"], num_attention_heads=ranks, latent_size=(2 * ranks + 2, 2))
    with pytest.raises(ConfigError, match=rf"--context-parallel-size = {ranks}.*the tokens of an image"):
        config.check_context_parallel(ranks)


@on_pytorch
@pytest.mark.parametrize("name", OURS)
def test_weights_in_bfloat16_take_float32_inputs(framework, name):
    """As under FSDP2 with param_dtype bf16, which casts no inputs."""
    network, inputs = filled(framework, OURS[name]), inputs_of(OURS[name])
    exact = add_residual(framework, network, inputs)
    for weight in network.parameters():
        weight.data = weight.data.bfloat16()
    rounded = add_residual(framework, network, inputs)
    assert np.linalg.norm(rounded - exact) < 0.1 * np.linalg.norm(exact)
