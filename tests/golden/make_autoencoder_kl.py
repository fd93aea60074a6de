"""Write data/autoencoder_kl.npz and autoencoder_kl_flux.npz: what diffusers makes of fixed inputs (PYTHONPATH=.:tests).

The latter is diffusers alone: encoded, shifted and scaled as its pipelines of Stable Diffusion 3 and FLUX do it.
"""

import tempfile
from pathlib import Path

import diffusers
import numpy as np
import torch

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig
from mindspeed_mm_dit.models.pytorch_encoders import AutoencoderKL
from tests.autoencoder_kl_fixtures import FLUX, SD_VAE, inputs, our_shapes, results, write_folder


def flux() -> dict[str, np.ndarray]:
    """Return mean, draw and decoded images of the small autoencoder in FLUX's manner."""
    images, noise, latents = map(torch.from_numpy, inputs(16, 8, channels=16).values())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        vae = diffusers.AutoencoderKL.from_pretrained(write_folder(Path(folder), FLUX, our_shapes(FLUX))).double()
        posterior = vae.encode(images.double()).latent_dist
        shift, scale = vae.config.shift_factor, vae.config.scaling_factor
        drawn = posterior.mean + posterior.std * noise
        decoded = vae.decode(latents.double() / scale + shift).sample
    found = {"mean": (posterior.mean - shift) * scale, "draw": (drawn - shift) * scale, "decoded": decoded}
    return {name: value.numpy() for name, value in found.items()}


if __name__ == "__main__":
    arrays = inputs(64, 8)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), SD_VAE, our_shapes(SD_VAE))
        found = results(framework, AutoencoderKL(AutoencoderKLConfig(folder)), arrays)
    np.savez(Path(__file__).parent / "data" / "autoencoder_kl_flux.npz", **flux())
    np.savez(Path(__file__).parent / "data" / "autoencoder_kl.npz", **found)
