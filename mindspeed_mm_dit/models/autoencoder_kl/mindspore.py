"""AutoencoderKL on MindSpore: our implementation, which runs on every framework."""

from mindspeed_mm_dit.models.autoencoder_kl.autoencoder import AutoencoderKL

__all__ = ["AutoencoderKL"]
