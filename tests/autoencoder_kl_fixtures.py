"""AutoencoderKL folders with weights that are a function of their names, so that golden files need none."""

import json
import math
import zlib

import numpy as np

SD_VAE = {"_class_name": "AutoencoderKL", "in_channels": 3, "out_channels": 3, "act_fn": "silu", "latent_channels": 4,
          "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
          "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32,
          "sample_size": 256}  # fmt: skip
SMALL = SD_VAE | {"block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4,
                  "down_block_types": ["DownEncoderBlock2D"] * 2,
                  "up_block_types": ["UpDecoderBlock2D"] * 2}  # fmt: skip
FLUX = SMALL | {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611,
                "shift_factor": 0.1159}  # fmt: skip
"""As SMALL, with what is otherwise in Stable Diffusion 3 and FLUX: 16 channels, shifted, and no 1 x 1 convolutions."""


def weight(name, shape):
    """Return the weight called ``name``: about unit gain, norms and biases off their trivial values."""
    draw = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if name.endswith("running_var"):
        return 0.5 + draw**2
    if len(shape) == 1:
        return draw * np.float32(0.1) + np.float32("norm" in name and name.endswith("weight"))
    return draw / np.float32(math.sqrt(math.prod(shape[1:])))


def inputs(pixels, latent_pixels, batch=1, channels=4):
    draw = np.random.default_rng(0)
    return {
        "images": draw.uniform(-1, 1, (batch, 3, pixels, pixels)).astype(np.float32),
        "posterior_noise": draw.standard_normal((batch, channels, latent_pixels, latent_pixels), np.float32),
        "scaled_latents": draw.standard_normal((batch, channels, latent_pixels, latent_pixels), np.float32),
    }


def our_shapes(config):
    """Return {name: shape} of the weights of our network for a diffusers config."""
    from mindspeed_mm_dit.configs.strict import from_mapping
    from mindspeed_mm_dit.models.autoencoder_kl import AutoencoderKLNetwork
    from mindspeed_mm_dit.models.pretrained import KLArchitecture

    others = ("_class_name", "sample_size", "scaling_factor", "shift_factor", "batch_norm_eps", "patch_size")
    keys = {key: value for key, value in config.items() if key not in others}
    network = AutoencoderKLNetwork(from_mapping(KLArchitecture, keys, "test"))
    return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}


def write_folder(folder, config, names_and_shapes, more=()):
    """Write config.json and diffusion_pytorch_model.safetensors; return ``folder``."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight(name, shape) for name, shape in names_and_shapes.items()} | dict(more)
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    return folder


def write_flux2(folder, **more):
    """Write a small AutoencoderKLFlux2, whose latents have four times its channels; return ``folder``."""
    config = SMALL | {"_class_name": "AutoencoderKLFlux2", "batch_norm_eps": 1e-4, "patch_size": [2, 2]} | more
    shapes = our_shapes(config)
    statistics = dict.fromkeys(("bn.running_mean", "bn.running_var"), (4 * config["latent_channels"],))
    return write_folder(folder, config, shapes | statistics, {"bn.num_batches_tracked": np.array(7)})


def results(framework, autoencoder, arrays):
    """Return mean, draw and decoded images of ``autoencoder`` for ``inputs``, as arrays."""
    ops = framework.ops
    images, noise, latents = (ops.tensor(arrays[name]) for name in ("images", "posterior_noise", "scaled_latents"))
    found = {"mean": autoencoder.encode(images, None), "draw": autoencoder.encode(images, noise),
             "decoded": autoencoder.decode(latents)}  # fmt: skip
    return {name: ops.numpy(value) for name, value in found.items()}


def relative_error(found, wanted):
    return np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted)
