import json
import shutil

import numpy as np
import pytest

from mindspeed_mm_dit.configs.autoencoder import WanVAEConfig, read_latent_facts
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from tests.conftest import GOLDEN

pytest.importorskip("torch")
pytest.importorskip("diffusers")
import diffusers
import torch

from mindspeed_mm_dit.configs.model import autoencoder_config_of
from mindspeed_mm_dit.models.registry import load_autoencoder

VAE = GOLDEN / "wan_vae_tiny"

pytestmark = pytest.mark.pytorch


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(VAE, tmp_path / "vae")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def autoencoder(folder=VAE, **changes):
    from mindspeed_mm_dit.models.pytorch_encoders import AutoencoderKLWan

    return AutoencoderKLWan(WanVAEConfig(str(folder), **changes))


@pytest.fixture(scope="module")
def video():
    with np.load(GOLDEN / "t2v_tiny.npz") as file:
        return file["vae/video"]


def test_latents_of_wans_sizes_and_of_no_others():
    config = WanVAEConfig("vae")
    assert config.latent_shape((81, 480, 832)) == (16, 21, 60, 104)
    assert config.latent_shape((1, 8, 8)) == (16, 1, 1, 1)
    for sizes, message in (
        ((80, 480, 832), r"dataset_param.num_frames = 80(?s:.*)77 or 81"),
        ((81, 484, 832), r"dataset_param.max_height = 484(?s:.*)480 or 488"),
        ((81, 480, 4), r"dataset_param.max_width = 4\b(?s:.*) 8\b"),
    ):
        with pytest.raises(ConfigError, match=message):
            WanVAEConfig("vae").latent_shape(sizes)


def test_mindspeed_mms_section_is_read_as_it_stands():
    sizes = {"tile_sample_min_height": 256, "tile_sample_min_width": 256, "tile_sample_stride_width": 128}
    section = {"model_id": "wan_video_vae", "from_pretrained": "./ckpt/vae/", "enable_tiling": False,
               "norm_latents": True, "norm_mode": "channel_specified_shift_scale", "do_sample": False}  # fmt: skip
    config = from_mapping(WanVAEConfig, section | {"tiling_param": sizes}, "model.json: ae")
    assert config.tiling().tile_sample_stride_width == 128
    for wrong in ({"tile_sample_stride_width": 300}, {"tile_sample_min_with": 256}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            from_mapping(WanVAEConfig, section | {"tiling_param": wrong}, "ae")


@pytest.mark.parametrize(("changes", "message"), [
    ({"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}, "channels = 16.*contrad"),
    ({"patch_size": 2}, "ae.spatial_factor = 8.*contradicts"),
    ({"temperal_downsample": [True] * 3}, "ae.temporal_factor = 4.*contradicts"),
    ({"latents_mean": [0.0] * 15}, "must be 16 numbers each"),
    ({"latents_std": [1.0] * 15 + [0.0]}, "and the latter positive"),
    ({"_class_name": "AutoencoderKL"}, "is of class 'AutoencoderKL', not AutoencoderKLWan"),
])  # fmt: skip
def test_an_autoencoder_that_is_another_than_model_json_says_is_refused(copied, changes, message):
    change_config(copied, **changes)
    with pytest.raises(ConfigError, match=message):
        read_latent_facts(WanVAEConfig(str(copied)))


def test_the_numbers_of_the_normalisation_are_those_of_config_json(copied):
    change_config(copied, latents_mean=[1.0] * 16, latents_std=[2.0] * 16)
    facts = read_latent_facts(WanVAEConfig(str(copied)))
    assert facts.latents_mean == (1.0,) * 16 and facts.latents_std == (2.0,) * 16


def test_decode_takes_back_and_the_first_frame_is_a_still(framework, video):
    ae, images = autoencoder(), framework.ops.tensor(video)
    mean, _ = ae.moments(images)
    direct = framework.ops.numpy(ae.module.decode(mean).sample)
    assert framework.ops.numpy(ae.decode(ae.encode(images))) == pytest.approx(direct, abs=1e-4)
    ae = autoencoder()
    latents, still = (framework.ops.numpy(ae.encode(framework.ops.tensor(x))) for x in (video, video[:, :, :1]))
    assert latents.shape[2] == 3 and latents[:, :, :1] == pytest.approx(still, abs=1e-5)


def test_a_draw_from_the_posterior_is_mean_plus_noise_times_std(framework, video):
    ae, images = autoencoder(do_sample=True), framework.ops.tensor(video)
    mean, std = map(framework.ops.numpy, ae.moments(images))
    noise = np.random.default_rng(0).standard_normal(mean.shape, np.float32)
    drawn = framework.ops.numpy(ae.encode(images, framework.ops.tensor(noise)))
    facts = read_latent_facts(ae.config)
    centre, spread = (np.reshape(x, (1, 16, 1, 1, 1)) for x in (facts.latents_mean, facts.latents_std))
    assert drawn == pytest.approx((mean + std * noise - centre) / spread, rel=1e-4, abs=1e-5)


def test_tiles_change_large_frames_alone_and_a_little(framework, video):
    tiles = {f"tile_sample_{kind}_{side}": size
             for kind, size in (("min", 24), ("stride", 16)) for side in ("height", "width")}  # fmt: skip
    whole, tiled, small = (
        framework.ops.numpy(autoencoder(**settings).encode(framework.ops.tensor(video)))
        for settings in ({}, {"enable_tiling": True, "tiling_param": tiles}, {"enable_tiling": True})
    )
    assert np.array_equal(whole, small)
    assert 1e-4 < np.linalg.norm(tiled - whole) / np.linalg.norm(whole) < 0.5


def test_bf16_is_near_fp32_and_frames_that_would_be_dropped_are_refused(framework, video):
    images = framework.ops.tensor(video)
    exact, rounded = (framework.ops.numpy(autoencoder(dtype=dtype).encode(images)) for dtype in ("fp32", "bf16"))
    assert rounded.dtype == np.float32 and 1e-4 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 5e-2
    with pytest.raises(ConfigError, match="num_frames = 8"):
        autoencoder().encode(images[:, :, :8])


def test_weights_that_are_missing_are_named(framework, copied):
    from safetensors.numpy import load_file, save_file

    path = copied / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    del weights["encoder.conv_in.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"encoder\.conv_in\.weight"):
        autoencoder(copied)


def test_qwen_image_s_autoencoder_encodes_an_image_as_a_video_of_one_frame(framework, tmp_path):
    diffusers = pytest.importorskip("diffusers")
    import torch

    from mindspeed_mm_dit.configs.model import autoencoder_config_of
    from mindspeed_mm_dit.models.registry import load_autoencoder

    torch.manual_seed(0)
    statistics = {"latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 0.5, 0.7]}
    theirs = diffusers.AutoencoderKLQwenImage(base_dim=4, z_dim=4, **statistics).eval()
    theirs.save_pretrained(tmp_path)
    config = autoencoder_config_of(str(tmp_path), "ae")
    assert (config.model_id, config.latent_shape((16, 24)), config.sample_size((4, 2, 3))) == (
        "qwen_image_vae", (4, 2, 3), (16, 24)
    )  # fmt: skip
    images, ours = torch.rand(2, 3, 16, 24) * 2 - 1, load_autoencoder(config)
    mean, std = (torch.tensor(statistics[f"latents_{name}"]).reshape(-1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        raw = theirs.encode(images[:, :, None]).latent_dist.mode()
        decoded = theirs.decode(raw).sample[:, :, 0]
    torch.testing.assert_close(ours.encode(images), (raw[:, :, 0] - mean) / std)
    torch.testing.assert_close(ours.decode(ours.encode(images)), decoded, atol=1e-5, rtol=1e-5)


TINY = {
    "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
    "num_decoder_blocks": (1, 1), "latent_channels": 3, "scaling_factor": 0.5, "shift_factor": 0.25,
}  # fmt: skip
DC = {
    "encoder_block_out_channels": (8, 16, 16), "decoder_block_out_channels": (8, 16, 16), "latent_channels": 4,
    "encoder_layers_per_block": (1, 1, 1), "decoder_layers_per_block": (1, 1, 1), "attention_head_dim": 8,
    "encoder_qkv_multiscales": ((), (), (5,)), "decoder_qkv_multiscales": ((), (), (5,)), "scaling_factor": 0.4,
    "encoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
    "decoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "model_id", "factor"),
    [("AutoencoderTiny", TINY, "autoencoder_tiny", 2), ("AutoencoderDC", DC, "autoencoder_dc", 4)],
)
def test_latents_are_those_of_diffusers_and_are_not_drawn(framework, tmp_path, kind, settings, model_id, factor):
    torch.manual_seed(0)
    module = getattr(diffusers, kind)(**settings).eval()
    module.save_pretrained(tmp_path)
    config = autoencoder_config_of(str(tmp_path), "--vae")
    assert (config.model_id, config.samples_posterior, config.downsample_factor) == (model_id, False, factor)
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    shift, scale = settings.get("shift_factor", 0.0), settings["scaling_factor"]
    with torch.no_grad():
        latents = (module.encode(images, return_dict=False)[0] - shift) * scale
        decoded = module.decode(latents / scale + shift).sample
    autoencoder = load_autoencoder(config)
    found = autoencoder.encode(images)
    assert autoencoder.moments(images)[1] is None
    assert tuple(found.shape[1:]) == config.latent_shape((16, 16)) and config.sample_size(found.shape[1:]) == (16, 16)
    torch.testing.assert_close(found, latents)
    torch.testing.assert_close(autoencoder.decode(found), decoded)
