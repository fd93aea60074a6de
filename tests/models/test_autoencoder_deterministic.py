"""AutoencoderTiny and AutoencoderDC: latents without a posterior, scaled and shifted as diffusers' pipelines do."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import diffusers
import torch

from mindspeed_mm_dit.configs.model import autoencoder_config_of
from mindspeed_mm_dit.models.registry import load_autoencoder

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
