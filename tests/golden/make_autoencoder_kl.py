"""Write data/autoencoder_kl.npz: what diffusers' AutoencoderKL makes of fixed inputs (PYTHONPATH=.:tests)."""

import tempfile
from pathlib import Path

import numpy as np

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.configs.model import AutoencoderKLConfig
from mindspeed_mm_dit.models.autoencoder_kl.pytorch import AutoencoderKL
from tests.autoencoder_kl_fixtures import SD_VAE, inputs, our_shapes, results, write_folder

if __name__ == "__main__":
    arrays = inputs(64, 8)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), SD_VAE, our_shapes(SD_VAE))
        found = results(framework, AutoencoderKL(AutoencoderKLConfig(folder)), arrays)
    np.savez(Path(__file__).parent / "data" / "autoencoder_kl.npz", **found)
