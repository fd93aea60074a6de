"""Our AutoencoderKL makes what diffusers' makes, on the whole SD-VAE architecture (83,653,863 weights)."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm_dit.configs.model import AutoencoderKLConfig, autoencoder_config_of
from tests.autoencoder_kl_fixtures import FLUX, SD_VAE, inputs, our_shapes, relative_error, results, write_folder

GOLDEN = Path(__file__).parent / "data" / "autoencoder_kl.npz"


@pytest.mark.extended  # 335 MB; tests/models/test_autoencoder_kl.py compares small ones of each variant
def test_encode_and_decode_of_the_whole_vae_equal_diffusers(framework, all_compiled, tmp_path):
    from mindspeed_mm_dit.models.autoencoder import AutoencoderKL

    golden, shapes = np.load(GOLDEN), our_shapes(SD_VAE)
    assert sum(map(math.prod, shapes.values())) == 83_653_863
    folder = write_folder(tmp_path / "vae", SD_VAE, shapes)
    found = results(framework, AutoencoderKL(AutoencoderKLConfig(str(folder))), inputs(64, 8))
    shutil.rmtree(folder)  # 335 MB
    errors = {name: relative_error(found[name], golden[name]) for name in golden}
    # Some fifty layers of float32 in another order of summation; a wrong padding or epsilon gives 1e-3 and more.
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("module", ["ours", "the framework's"])
def test_shifted_latents_without_quant_convs_equal_diffusers(framework, tmp_path, module):
    from mindspeed_mm_dit.models.autoencoder import AutoencoderKL, NoAutoencoder, draw_latents
    from mindspeed_mm_dit.models.registry import load_autoencoder

    golden = np.load(GOLDEN.with_name("autoencoder_kl_flux.npz"))
    config = autoencoder_config_of(str(write_folder(tmp_path, FLUX, our_shapes(FLUX))), "--vae")
    assert (config.latent_shape((16, 16)), config.downsample_factor) == ((16, 8, 8), 2)
    ae, arrays = AutoencoderKL(config) if module == "ours" else load_autoencoder(config), inputs(16, 8, channels=16)
    found = results(framework, ae, arrays)
    mean, std = ae.moments(framework.ops.tensor(arrays["images"]))  # what a cache holds
    cached = draw_latents(mean, std, framework.ops.tensor(arrays["posterior_noise"]), NoAutoencoder(config).scaled)
    found["cached"] = framework.ops.numpy(cached)
    wanted = {**golden, "cached": golden["draw"]}
    errors = {name: relative_error(array, wanted[name]) for name, array in found.items()}
    assert max(errors.values()) < 1e-5, errors
