from __future__ import annotations

import pytest
import torch

from mindspeed_mm_dit.configs.model import AutoencoderKLConfig
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.models.diffusers_autoencoders import AutoencoderKL


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory):
    """A small AutoencoderKL with random weights, factor 2."""
    from diffusers import AutoencoderKL as DiffusersAutoencoderKL

    torch.manual_seed(0)
    vae = DiffusersAutoencoderKL(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=8, sample_size=16,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("vae")
    vae.save_pretrained(folder)
    return folder, vae.eval()


def config(folder, **changes):
    return AutoencoderKLConfig(**{"from_pretrained": str(folder), "downsample_factor": 2, **changes})


def test_latents_are_the_scaled_posterior_of_diffusers(vae_folder):
    folder, vae = vae_folder
    images, noise = torch.rand(2, 3, 16, 16) * 2 - 1, torch.randn(2, 4, 8, 8)
    ours = AutoencoderKL(config(folder))
    with torch.no_grad():
        posterior = vae.encode(images).latent_dist
    torch.testing.assert_close(ours.encode(images, None), posterior.mean * 0.18215, rtol=1e-4, atol=1e-5)
    sampled = (posterior.mean + posterior.std * noise) * 0.18215
    torch.testing.assert_close(ours.encode(images, noise), sampled, rtol=1e-4, atol=1e-5)


def test_decoding_is_that_of_diffusers(vae_folder):
    folder, vae = vae_folder
    latents = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        expected = vae.decode(latents / 0.18215).sample
    torch.testing.assert_close(AutoencoderKL(config(folder)).decode(latents), expected, rtol=1e-4, atol=1e-4)


def test_one_weights_file_loads_as_the_folder_does(vae_folder):
    folder, _ = vae_folder
    latents = torch.randn(1, 4, 8, 8)
    from_file = AutoencoderKL(config(folder / "diffusion_pytorch_model.safetensors"))
    torch.testing.assert_close(from_file.decode(latents), AutoencoderKL(config(folder)).decode(latents))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"from_pretrained": "nowhere"}, "nothing is downloaded"),
        ({"downsample_factor": 8}, r"ae.downsample_factor = 8: contradicts the autoencoder.*makes it 2"),
    ],
)
def test_a_wrong_autoencoder_is_an_error(vae_folder, changes, message):
    with pytest.raises(UserError, match=message):
        AutoencoderKL(config(vae_folder[0], **changes))
