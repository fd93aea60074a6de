"""Our AutoencoderKL reads diffusers' files and computes what diffusers computes; what it cannot do, it says."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig, Flux2VAEConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError, UserError
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from tests.autoencoder_kl_fixtures import (
    SMALL,
    inputs,
    our_shapes,
    relative_error,
    results,
    weight,
    write_flux2,
    write_folder,
)


@pytest.fixture
def small(framework, tmp_path):
    """Return (folder of a small AutoencoderKL, build(path, **settings) -> our autoencoder)."""
    from mindspeed_mm_dit.models.autoencoder import AutoencoderKL

    def build(path, **settings):
        return AutoencoderKL(AutoencoderKLConfig(str(path), downsample_factor=2, **settings))

    return write_folder(tmp_path / "vae", SMALL, our_shapes(SMALL)), build


@pytest.mark.pytorch
@pytest.mark.parametrize(
    "change", [{}, {"mid_block_add_attention": False}, {"use_quant_conv": False, "use_post_quant_conv": False}], ids=str
)
def test_every_variant_equals_diffusers(framework, tmp_path, small, change):
    from mindspeed_mm_dit.models.pytorch_encoders import AutoencoderKL

    config = SMALL | change
    folder = write_folder(tmp_path / "changed", config, our_shapes(config))
    arrays = inputs(16, 8, batch=2)
    ours = results(framework, small[1](folder), arrays)
    theirs = results(framework, AutoencoderKL(AutoencoderKLConfig(str(folder), downsample_factor=2)), arrays)
    for name in ours:
        assert relative_error(ours[name], theirs[name]) < 1e-5, name


def test_latents_are_scaled_and_the_draw_has_the_posterior_s_width(framework, small):
    folder, build = small
    arrays = inputs(16, 8, batch=2)
    one, two = (results(framework, build(folder, scaling_factor=factor), arrays) for factor in (1.0, 2.0))
    np.testing.assert_allclose(two["mean"], 2 * one["mean"], rtol=1e-6)
    assert one["mean"].shape == (2, 4, 8, 8) and one["decoded"].shape == (2, 3, 16, 16)
    mean, std = (0.5, -1.0, 0.0, 2.0), (1.0, 2.0, 0.5, 4.0)
    each = results(framework, build(folder, scaling_factor=2.0, latents_mean=mean, latents_std=std), arrays)
    mean, std = (np.array(numbers, np.float32)[:, None, None] for numbers in (mean, std))
    np.testing.assert_allclose(each["mean"], (one["mean"] - mean) * 2 / std, rtol=1e-6, atol=1e-6)
    raw = arrays | {"scaled_latents": arrays["scaled_latents"] * std / 2 + mean}
    raw = results(framework, build(folder, scaling_factor=1.0), raw)
    np.testing.assert_allclose(each["decoded"], raw["decoded"], rtol=1e-5, atol=1e-6)
    zero = results(framework, build(folder), arrays | {"posterior_noise": 0 * arrays["posterior_noise"]})
    np.testing.assert_allclose(zero["draw"], zero["mean"], rtol=1e-6)


def test_flux2_s_latents_are_patches_normalised_by_the_statistics_among_its_weights(framework, tmp_path, small):
    from mindspeed_mm_dit.configs.model import autoencoder_config_of
    from mindspeed_mm_dit.models.registry import load_autoencoder

    config = autoencoder_config_of(str(write_flux2(tmp_path / "flux2")), "--vae")
    assert (config.model_id, config.latent_shape((16, 24)), config.sample_size((16, 4, 6))) == (
        "flux2_vae", (16, 4, 6), (16, 24)
    )  # fmt: skip
    arrays = inputs(16, 8, batch=2)
    plain = results(framework, small[1](small[0], scaling_factor=1.0), arrays)
    mean, std = (weight(f"bn.running_{name}", (16,))[:, None, None] for name in ("mean", "var"))
    std = np.sqrt(std + np.float32(1e-4))

    def cut(raw):  # channel c of row i and column j of a patch is channel 4 c + 2 i + j
        return raw.reshape(2, 4, 4, 2, 4, 2).transpose(0, 1, 3, 5, 2, 4).reshape(2, 16, 4, 4)

    given = {
        "posterior_noise": cut(arrays["posterior_noise"]),
        "scaled_latents": (cut(arrays["scaled_latents"]) - mean) / std,
    }
    found = results(framework, load_autoencoder(config), arrays | given)
    for name in ("mean", "draw"):
        np.testing.assert_allclose(found[name], (cut(plain[name]) - mean) / std, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["decoded"], plain["decoded"], rtol=1e-4, atol=1e-5)
    if framework.runtime.CAN_SAMPLE_IN_BF16:  # ae.dtype says its precision, not that of the step around it
        with framework.runtime.autocast(True):
            around = results(framework, load_autoencoder(config), arrays | given)
        assert all(np.array_equal(around[name], found[name]) for name in found)


@pytest.mark.pytorch
def test_an_autoencoder_that_is_not_flux2_s_is_refused(tmp_path):
    for changes, lost, message in (
        ({"patch_size": [4, 4]}, "", "patch_size"),
        ({"_class_name": "AutoencoderKL"}, "", "is of class 'AutoencoderKL'"),
        ({}, "bn.running_mean", "holds no AutoencoderKLFlux2"),
        ({}, "bn.running_var", "has no tensor bn.running_var"),
        ({"batch_norm_eps": -9.0}, "", "standard deviations must be positive|finite numbers"),
    ):
        folder = write_flux2(tmp_path, **changes)
        path = folder / "diffusion_pytorch_model.safetensors"
        save_file({name: array for name, array in load_file(path).items() if name != lost}, path)
        with pytest.raises(UserError, match=message):
            Flux2VAEConfig(str(folder), latent_channels=16, downsample_factor=4).scale()


def test_a_bin_file_and_old_attention_names_give_the_same(framework, tmp_path, small):
    folder, build = small
    weights = {}
    for name, shape in our_shapes(SMALL).items():
        old_name = name
        for new, old in {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}.items():
            old_name = old_name.replace(f".{new}.", f".{old}.")
        weights[old_name] = weight(name, shape)
    assert "decoder.mid_block.attentions.0.proj_attn.weight" in weights
    file = tmp_path / "old" / "diffusion_pytorch_model.bin"
    file.parent.mkdir()
    (file.parent / "config.json").write_text(json.dumps(SMALL))
    write_torch_file(file, weights)
    arrays = inputs(16, 8)
    wanted = results(framework, build(folder), arrays)
    for path in (file.parent, file):
        found = results(framework, build(path), arrays)
        assert all((found[name] == wanted[name]).all() for name in wanted)


def test_a_config_that_does_not_fit_is_refused(small):
    for change, message in (
        ({"down_block_types": ["DownEncoderBlock2D", "AttnDownEncoderBlock2D"]}, "AttnDownEncoderBlock2D"),
        ({"up_block_types": ["UpDecoderBlock2D"] * 3}, "up_block_types for 3 levels"),
        ({"act_fn": "gelu"}, "act_fn = gelu"),
        ({"norm_num_groups": 3}, "norm_num_groups = 3"),
        ({"latent_channels": 16}, "ae.latent_channels = 4"),
        ({"layers_per_block": 2}, "lacks weight decoder.up_blocks.0.resnets.2"),
        ({"mid_block_add_attention": False}, "unknown decoder.mid_block.attentions"),
    ):
        folder, build = small
        (folder / "config.json").write_text(json.dumps(SMALL | change))
        with pytest.raises(UserError, match=message):
            build(folder)


@pytest.mark.parametrize("module", ["ours", pytest.param("diffusers", marks=pytest.mark.pytorch)])
def test_latents_scaled_otherwise_than_the_autoencoder_s_are_refused(small, module):
    folder, build = small
    if module == "diffusers":
        from mindspeed_mm_dit.models.pytorch_encoders import AutoencoderKL

        def build(path):
            return AutoencoderKL(AutoencoderKLConfig(str(path), downsample_factor=2))

    for change, message in (
        ({"scaling_factor": 0.13025}, r"config.json makes it 0.13025"),
        ({"scaling_factor": 0.18215, "shift_factor": 0.1}, "ae.shift_factor = 0.0.*contradicts"),
    ):
        (folder / "config.json").write_text(json.dumps(SMALL | change))
        for path in (folder, folder / "diffusion_pytorch_model.safetensors"):
            with pytest.raises(ConfigError, match=message):
                build(path)
    (folder / "config.json").write_text(json.dumps(SMALL | {"scaling_factor": 0.18215, "shift_factor": None}))
    build(folder)


def test_missing_files_are_named(small, tmp_path):
    folder, build = small
    weights, config = folder / "diffusion_pytorch_model.safetensors", folder / "config.json"
    with pytest.raises(CheckpointError, match="nothing is downloaded"):
        build(tmp_path / "nowhere")
    for change, named in (
        (lambda: config.rename(tmp_path / "config.json"), r"config\.json"),
        (lambda: (tmp_path / "config.json").rename(config) and weights.write_bytes(b"damaged"), "cannot be read"),
        (weights.unlink, "holds none of"),
    ):
        change()
        with pytest.raises(CheckpointError, match=named):
            build(folder)


def test_bf16_on_mindspore_s_cpu_is_refused(mindspore, small):
    if mindspore.get_context("device_target") != "CPU":
        pytest.skip("this machine has an accelerator")
    with pytest.raises(PlatformError, match="bf16"):
        small[1](small[0], dtype="bf16")
