"""A DiT on rectangles: its positions, where its patches are laid out, and what its config says of it."""

import dataclasses

import numpy as np
import pytest

from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import multiply_adds, parameters_of
from mindspeed_mm_dit.models.positions import rotary_tables_2d, sincos_positions_2d

CONFIG = DiTConfig(
    input_size=8, num_classes=3, in_channels=2, patch_size=2, hidden_size=16, num_layers=2, num_heads=2,
    learn_sigma=False,
)  # fmt: skip
OPTIONS = {
    "plain": {},
    "rope": {"rope": True},
    "in context": {"rope": True, "in_context_len": 2, "in_context_start": 1},
}


def made(framework, config, seed=0):
    """Return a network whose every weight is drawn, zeros too."""
    draw = np.random.default_rng(seed)
    weights = {
        name: array if name == "pos_embed" else array + draw.normal(0, 0.2, array.shape).astype(np.float32)
        for name, array in initial_weights(parameters_of(config), seed).items()
    }
    return filled(framework, config, weights)


def filled(framework, config, weights):
    from mindspeed_mm_dit.models.dit import DiT

    model = DiT(config)
    framework.runtime.load_arrays(model, weights)
    return model


def answer(framework, model, height, width):
    draw = np.random.default_rng(1)
    ops = framework.ops
    x = ops.tensor(draw.normal(size=(3, 2, height, width)).astype(np.float32))
    return ops.numpy(model(x, ops.tensor(np.array([1.0, 20.0, 300.0], np.float32)), ops.tensor(np.array([0, 1, 3]))))


@pytest.mark.parametrize(("height", "width", "base"), [(3, 5, 4), (8, 8, 4), (2, 7, 7), (4, 4, 4)])
def test_positions_of_a_grid_are_those_that_pixart_stretches_to_the_square(height, width, base):
    """Its ``get_2d_sincos_pos_embed``: arange(side) / (side / base), columns in the first half (Chen et al. 2023)."""
    found = sincos_positions_2d(8, base, (height, width)).reshape(height, width, 2, 2, 2)
    omega = np.array([1.0, 0.01])
    for row in range(height):
        for column in range(width):
            places = column / (width / base), row / (height / base)
            wanted = [[f(place * omega) for f in (np.sin, np.cos)] for place in places]
            np.testing.assert_allclose(found[row, column], wanted, atol=1e-6)


def test_positions_of_the_square_are_the_published_ones_to_the_bit():
    assert np.array_equal(sincos_positions_2d(16, 6, (6, 6)), sincos_positions_2d(16, 6))
    for grid, square in zip(rotary_tables_2d(8, 6, 2, (6, 6)), rotary_tables_2d(8, 6, 2)):
        assert np.array_equal(grid, square)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_network_on_a_larger_square_is_one_made_for_it_with_stretched_positions(framework, option):
    config = dataclasses.replace(CONFIG, **OPTIONS[option])
    larger = made(framework, dataclasses.replace(config, input_size=16))
    ours = answer(framework, made(framework, config), 16, 16)
    assert not np.allclose(ours, answer(framework, larger, 16, 16), atol=1e-3)
    framework.runtime.load_arrays(larger, {"pos_embed": sincos_positions_2d(16, 4, (8, 8))[None]})
    if config.rope:
        cos, sin = rotary_tables_2d(8, 4, config.in_context_len, (8, 8))
        larger.rope_cos, larger.rope_sin = framework.ops.tensor(cos), framework.ops.tensor(sin)
    np.testing.assert_array_equal(ours, answer(framework, larger, 16, 16))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_place_of_a_rectangle_matters_and_is_answered(framework, option):
    model = made(framework, dataclasses.replace(CONFIG, **OPTIONS[option]))
    wide, tall = answer(framework, model, 4, 12), answer(framework, model, 12, 4)
    assert wide.shape == (3, 2, 4, 12) and tall.shape == (3, 2, 12, 4)
    assert np.isfinite(wide).all() and not np.allclose(wide, tall.transpose(0, 1, 3, 2), atol=1e-2)


def test_patches_of_a_rectangle_are_laid_out_where_they_were_cut(framework):
    from mindspeed_mm_dit.models.layers import unpatchify

    config = dataclasses.replace(CONFIG, in_channels=1, hidden_size=4, num_heads=1)
    identity = {"x_embedder.proj.weight": np.eye(4, dtype=np.float32).reshape(4, 1, 2, 2)}
    model = filled(framework, config, initial_weights(parameters_of(config), 0) | identity)
    x = np.arange(2 * 6 * 10, dtype=np.float32).reshape(2, 1, 6, 10)
    tokens = model.x_embedder(framework.ops.tensor(x))
    np.testing.assert_array_equal(framework.ops.numpy(unpatchify(tokens, (3, 5), model.config.patch_size)), x)


def test_config_of_another_shape_has_the_same_weights():
    wide = CONFIG.resized((2, 4, 12))
    assert parameters_of(wide).shapes() == parameters_of(CONFIG).shapes() and wide.latent_shape == (2, 4, 12)
    assert (CONFIG.num_tokens, wide.num_tokens) == (16, 12)
    assert multiply_adds(wide) < multiply_adds(CONFIG) and CONFIG.resized((2, 8, 8)) == CONFIG
    for changes, named in (
        ({"latent_size": (4, 5)}, r"latent_size = \[4, 5\]"),
        ({"latent_size": (4,)}, "must be two positive whole numbers"),
        ({"latent_size": (4, 8), "z_dims": (4,), "encoder_depth": 1}, "a teacher's features need square latents"),
    ):
        with pytest.raises(ConfigError, match=named):
            dataclasses.replace(CONFIG, **changes)
