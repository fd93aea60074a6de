"""CustomDiT and Wan: held to diffusers at sizes of their own, and to what must not matter."""

import dataclasses

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.state import infer_predictor
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.configs.video_transformer import CustomDiTConfig, WanConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import rotary_pairs_by_axis, rotary_table
from mindspeed_mm_dit.models.weight_adapters import weight_converter_of
from mindspeed_mm_dit.tools.verify.table import relative_error

CUSTOM = CustomDiTConfig(
    num_layers=2, num_heads=3, head_dim=18, patch_size=(2, 1, 3), in_channels=5, out_channels=4, text_dim=10,
    freq_dim=12, ffn_dim=40, rope_max_seq_len=8, latent_size=(4, 3, 6),
)  # fmt: skip
WAN = WanConfig(
    num_layers=2, num_attention_heads=3, attention_head_dim=18, patch_size=(2, 1, 3), in_channels=5, out_channels=4,
    text_dim=10, freq_dim=12, ffn_dim=40, rope_max_seq_len=8, eps=1e-4, latent_size=(4, 3, 6),
)  # fmt: skip
DRAW = np.random.default_rng(0)
X = DRAW.standard_normal((2, 5, 4, 3, 6)).astype(np.float32)
T, TEXT = np.array([1000, 12.5], np.float32), DRAW.standard_normal((2, 7, 10)).astype(np.float32)


def test_ranks_and_latents_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"predictor.num_heads.*3 % 2 = 1(?s:.*)divisor of 3"):
        CUSTOM.check_context_parallel(2)
    with pytest.raises(ConfigError, match=r"tokens of a clip.*1 % 3 = 1(?s:.*)another sample size"):
        dataclasses.replace(CUSTOM, latent_size=(2, 1, 3)).check_context_parallel(3)
    CUSTOM.check_latents((5, 16, 8, 24))
    for shape, named in (
        ((4, 4, 3, 6), "takes"),
        ((5, 3, 3, 6), "frames 3 do not fit"),
        ((5, 4, 3, 7), "width 7 do not fit"),
        ((5, 18, 3, 6), "more than predictor.rope_max_seq_len = 8"),
    ):
        with pytest.raises(ConfigError, match=named):
            CUSTOM.check_latents(shape)


def with_random_weights(framework, kind, custom=CUSTOM, wan=WAN):
    from mindspeed_mm_dit.models.video_transformer import CustomDiT, Wan

    model = Wan(wan) if kind == "wan" else CustomDiT(custom)
    draw = np.random.default_rng(1)
    shapes = framework.runtime.shapes(model)
    weights = {name: (0.3 * draw.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    framework.runtime.load_arrays(model, weights)
    return framework.runtime.to_runtime_device(model), weights


def output(framework, model, x=X, t=T, text=TEXT):
    with framework.ops.no_grad():
        return framework.ops.numpy(model(*map(framework.ops.tensor, (x, t, text))))


IMAGE = {"in_channels": 12, "image_dim": 10, "added_kv_proj_dim": 54}
NETWORKS = {
    "from a text": {},
    "from an image": {"in_channels": 12},
    "from an image and its features": IMAGE,
    "from two images": {**IMAGE, "last_frame": True, "pos_embed_seq_len": 6},
    "times by token": {"in_channels": 4, "expand_timesteps": True, "patch_size": (1, 1, 3)},
}
CONFIGS = [dataclasses.replace(WAN, **settings) for settings in NETWORKS.values()]


@pytest.mark.pytorch
@pytest.mark.parametrize("config", CONFIGS, ids=NETWORKS)
def test_wan_is_diffusers_transformer_at_any_sizes(framework, config):
    import torch
    from diffusers import WanTransformer3DModel

    model, weights = with_random_weights(framework, "wan", wan=config)
    theirs = WanTransformer3DModel.from_config(weight_converter_of(config).to_diffusers(config))
    theirs.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    x, given = X[:, : config.latent_channels], config.conditions.examples(2)
    given["text"] = given["text"][:, :512]  # diffusers takes what is before the last 512 tokens for an image's
    inputs = {"hidden_states": x, "timestep": T, "encoder_hidden_states": given["text"]}
    if config.expand_timesteps:
        first = given["frames"][:, :1].astype(bool)
        inputs["hidden_states"] = np.where(first, given["frames"][:, 1:], x)
        inputs["timestep"] = np.where(first[:, 0, :, :, ::3], 0, T[:, None, None, None]).reshape(2, -1)
    elif config.mask_channels:
        inputs["hidden_states"] = np.concatenate([x, given["frames"]], 1)
    if config.image_dim:
        halves = 2 if config.pos_embed_seq_len else 1
        inputs["encoder_hidden_states_image"] = given["image_embeds"].reshape(2 * halves, -1, 10)
    with torch.no_grad():
        wanted = theirs(**{name: torch.from_numpy(array) for name, array in inputs.items()}).sample.numpy()
        found = model(*map(torch.from_numpy, (x, T, *given.values()))).numpy()
    assert found.shape == (2, 4, 4, 3, 6)
    assert relative_error(found, wanted) < 2e-6


@pytest.mark.parametrize("kind", ["custom_dit", "wan"])
def test_answers_depend_on_the_sample_alone_at_any_size(framework, kind):
    model, _ = with_random_weights(framework, kind)
    both, last = output(framework, model), output(framework, model, X[1:], T[1:], TEXT[1:])
    np.testing.assert_allclose(both[1:], last, rtol=1e-4, atol=1e-4 * np.abs(last).max())
    shared = output(framework, model, t=T[:1])
    np.testing.assert_allclose(shared[:1], both[:1], rtol=1e-4, atol=1e-4 * np.abs(both).max())
    assert relative_error(shared[1:], both[1:]) > 0.01
    model, _ = with_random_weights(framework, kind)
    assert (output(framework, model, text=TEXT[:, None]) == output(framework, model)).all()
    model, _ = with_random_weights(framework, kind)
    for shape in ((2, 5, 2, 1, 3), (2, 5, 8, 7, 24)):
        assert output(framework, model, np.ones(shape, np.float32)).shape == (2, 4, *shape[2:])


@pytest.mark.parametrize("config", [CUSTOM, *CONFIGS], ids=["custom_dit", *NETWORKS])
def test_the_config_declares_just_the_parameters_of_the_network_and_is_found_by_their_shapes(framework, config):
    from mindspeed_mm_dit.models.registry import network_of

    shapes = framework.runtime.shapes(network_of(config))
    assert parameters_of(config).shapes() == shapes
    found = infer_predictor(shapes, {})
    assert type(found) is type(config) and parameters_of(found).shapes() == shapes


def test_parameters_begin_as_in_wan_s_own_code():
    starter = initial_weights(parameters_of(WAN), 0)
    assert not starter["proj_out.weight"].any() and (starter["blocks.1.attn2.norm_k.weight"] == 1).all()
    assert (starter["blocks.0.norm2.weight"] == 1).all() and not starter["blocks.0.norm2.bias"].any()
    assert starter["blocks.0.scale_shift_table"].std() == pytest.approx(54**-0.5, rel=0.2)
    assert starter["condition_embedder.text_embedder.linear_2.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert abs(starter["patch_embedding.weight"]).max() <= (6 / (54 + 5 * 2 * 3)) ** 0.5
    assert abs(starter["blocks.0.ffn.net.2.weight"]).max() > 0.9 * (6 / (54 + 40)) ** 0.5


def test_the_published_networks_have_their_published_number_of_parameters():
    """diffusers 0.35.2 builds WanTransformer3DModel with as many, 1.3B and 14B."""
    small = WanConfig(num_attention_heads=12, num_layers=30, ffn_dim=8960)
    assert parameters_of(small).num_elements() == 1_418_996_800
    assert parameters_of(WanConfig()).num_elements() == 14_288_491_584


def test_rotary_positions_turn_by_frame_row_and_column():
    """Wan's head of 128: 22, 21 and 21 pairs, the first of each turning by one radian a patch."""
    assert rotary_pairs_by_axis(128) == (22, 21, 21)
    for pairs in rotary_pairs_by_axis(128):
        cos, sin = (rotary_table(wave, pairs, 5) for wave in (np.cos, np.sin))
        np.testing.assert_allclose(np.arctan2(sin, cos)[:4, 0], np.arange(4), rtol=1e-6)
        np.testing.assert_allclose(np.arctan2(sin, cos)[4, -1], 4 * 10000 ** (1 / pairs - 1), rtol=1e-4)


@pytest.mark.pytorch
def test_sizes_that_no_network_has_are_refused():
    for kind, wrong, named in (
        (CustomDiTConfig, {"head_dim": 9}, "predictor.head_dim = 9"),
        (CustomDiTConfig, {"patch_size": [1, 2]}, r"predictor.patch_size = \[1, 2\]"),
        (CustomDiTConfig, {"freq_dim": 13}, "predictor.freq_dim = 13"),
        (CustomDiTConfig, {"num_layers": 0}, "predictor.num_layers = 0"),
        (CustomDiTConfig, {"rope_max_seq_len": 51}, "more than predictor.rope_max_seq_len = 51"),
        (CustomDiTConfig, {"latent_size": [13, 60]}, r"latent_size = \[13, 60\]"),
        (WanConfig, {"attention_head_dim": 9}, "predictor.attention_head_dim = 9"),
        (WanConfig, {"cross_attn_norm": False}, "predictor.cross_attn_norm = false"),
        (WanConfig, {"qk_norm": "rms_norm"}, "qk_norm = 'rms_norm'"),
        (WanConfig, {"image_dim": 1280}, "image_dim = 1280.*does not go with"),
        (WanConfig, {"in_channels": 36, "image_dim": 1280}, "added_kv_proj_dim = None.*must be 5120"),
        (WanConfig, {"in_channels": 36, "expand_timesteps": True}, "expand_timesteps = true.*does not go with"),
        (WanConfig, {"expand_timesteps": True, "patch_size": [13, 2, 2]}, "patch_size = .* does not go with"),
        (WanConfig, {"last_frame": True}, "last_frame = true.*does not go with"),
        (WanConfig, {"frame_dropout_prob": 0.1}, "frame_dropout_prob = 0.1.*does not go with"),
        (WanConfig, {"in_channels": 36, "pos_embed_seq_len": 514}, "pos_embed_seq_len = 514.*does not go with"),
    ):
        with pytest.raises(ConfigError, match=named):
            from_mapping(kind, wrong, "model.json: predictor")


def test_a_label_joins_the_time_and_may_take_the_place_of_the_text(framework):
    both = dataclasses.replace(CUSTOM, num_classes=3)
    alone = dataclasses.replace(both, text_dim=None)
    assert [type(condition).__name__ for condition in both.conditions] == ["ClassLabel", "TextStates"]
    shapes = parameters_of(alone).shapes()
    assert not any("attn2" in name or "text" in name for name in shapes)
    assert weight_converter_of(CustomDiTConfig).of_shapes(shapes).conditions == alone.conditions
    model, _ = with_random_weights(framework, "custom_dit", alone)
    found = output(framework, model, text=np.array([0, 0]))
    changed = output(framework, model, text=np.array([0, 3]))
    np.testing.assert_array_equal(found[0], changed[0])
    assert relative_error(changed[1], found[1]) > 1e-3
    with pytest.raises(ConfigError, match=r"predictor.num_classes = 0.*and text_dim = null"):
        dataclasses.replace(alone, num_classes=0)
