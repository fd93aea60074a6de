"""Our AutoencoderKL makes what diffusers' makes, on the whole SD-VAE architecture (83,653,863 weights)."""

import math
import shutil
from pathlib import Path

import numpy as np

from tests.autoencoder_kl_fixtures import SD_VAE, inputs, our_shapes, relative_error, results, write_folder

GOLDEN = Path(__file__).parent / "data" / "autoencoder_kl.npz"


def test_encode_and_decode_equal_diffusers(framework, tmp_path):
    from mindspeed_mm_dit.configs.model import AutoencoderKLConfig
    from mindspeed_mm_dit.models.autoencoder_kl.network import AutoencoderKL

    golden, shapes = np.load(GOLDEN), our_shapes(SD_VAE)
    assert sum(map(math.prod, shapes.values())) == 83_653_863
    folder = write_folder(tmp_path / "vae", SD_VAE, shapes)
    found = results(framework, AutoencoderKL(AutoencoderKLConfig(str(folder))), inputs(64, 8))
    shutil.rmtree(folder)  # 335 MB
    errors = {name: relative_error(found[name], golden[name]) for name in golden}
    # Some fifty layers of float32 in another order of summation; a wrong padding or epsilon gives 1e-3 and more.
    assert max(errors.values()) < 1e-4, errors
