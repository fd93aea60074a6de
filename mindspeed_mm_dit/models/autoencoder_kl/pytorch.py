"""AutoencoderKL on PyTorch: diffusers' module, frozen."""

from mindspeed_mm_dit.models.diffusers_autoencoders import AutoencoderKL

__all__ = ["AutoencoderKL"]
