"""The network of AutoencoderKL, the autoencoder of latent diffusion (Rombach et al. 2022), for every framework.

The parameters carry diffusers' names. Letters: B batch, C channels, H W height and width, N pixels, Z latent
channels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.autoencoder_kl.files import KLArchitecture

Tensor = Any  # a tensor of the active framework


class ResnetBlock(nn.Module):
    """Two convolutions, each after a norm and an activation, with a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels, eps=1e-6)
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out_channels, eps=1e-6)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1)
        self.act = nn.SiLU()
        self.has_conv_shortcut = in_channels != out_channels
        if self.has_conv_shortcut:
            self.conv_shortcut = nn.Conv2d(in_channels, out_channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.conv_shortcut(x) if self.has_conv_shortcut else x  # (B, C', H, W)
        x = self.conv1(self.act(self.norm1(x)))  # (B, C', H, W)
        return shortcut + self.conv2(self.act(self.norm2(x)))  # (B, C', H, W)


class AttentionBlock(nn.Module):
    """Residual self-attention with one head over all pixels."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.Sequential(nn.Linear(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        pixels = ops.permute(ops.reshape(self.group_norm(x), (B, C, H * W)), (0, 2, 1))  # (B, N, C)
        heads = [ops.reshape(to(pixels), (B, 1, H * W, C)) for to in (self.to_q, self.to_k, self.to_v)]
        mixed = ops.reshape(ops.attention(heads[0], heads[1], heads[2]), (B, H * W, C))  # (B, N, C)
        return x + ops.reshape(ops.permute(self.to_out(mixed), (0, 2, 1)), (B, C, H, W))  # (B, C, H, W)


class MidBlock(nn.Module):
    """Residual block, attention (unless left out), residual block."""

    def __init__(self, channels: int, groups: int, add_attention: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([AttentionBlock(channels, groups)] if add_attention else [])
        self.resnets = nn.ModuleList([ResnetBlock(channels, channels, groups) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.resnets[0](x)  # (B, C, H, W)
        for attention in self.attentions:
            x = attention(x)  # (B, C, H, W)
        return self.resnets[1](x)  # (B, C, H, W)


class Downsample(nn.Module):
    """Halve height and width with a strided convolution, padded only at the bottom and on the right."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel_size=3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(ops.pad(x, (0, 1, 0, 1)))  # (B, C, H / 2, W / 2)


class Upsample(nn.Module):
    """Double height and width by repeating pixels, then convolve."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(ops.upsample_nearest_2x(x))  # (B, C, 2 H, 2 W)


class DownBlock(nn.Module):
    """Residual blocks and, except at the last level, a downsampling."""

    def __init__(self, in_channels: int, out_channels: int, layers: int, groups: int, resample: bool) -> None:
        super().__init__()
        self.resnets = _resnets(in_channels, out_channels, layers, groups)
        self.downsamplers = nn.ModuleList([Downsample(out_channels)] if resample else [])

    def forward(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)  # (B, C', H, W)
        for downsample in self.downsamplers:
            x = downsample(x)  # (B, C', H / 2, W / 2)
        return x


class UpBlock(nn.Module):
    """Residual blocks and, except at the last level, an upsampling."""

    def __init__(self, in_channels: int, out_channels: int, layers: int, groups: int, resample: bool) -> None:
        super().__init__()
        self.resnets = _resnets(in_channels, out_channels, layers, groups)
        self.upsamplers = nn.ModuleList([Upsample(out_channels)] if resample else [])

    def forward(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)  # (B, C', H, W)
        for upsample in self.upsamplers:
            x = upsample(x)  # (B, C', 2 H, 2 W)
        return x


def _resnets(in_channels: int, out_channels: int, layers: int, groups: int) -> nn.ModuleList:
    widths = [in_channels] + [out_channels] * layers
    return nn.ModuleList([ResnetBlock(before, after, groups) for before, after in pairwise(widths)])


class Encoder(nn.Module):
    """Images to the 2 Z channels of the posterior, before ``quant_conv``."""

    def __init__(self, architecture: KLArchitecture) -> None:
        super().__init__()
        widths, groups = architecture.block_out_channels, architecture.norm_num_groups
        self.conv_in = nn.Conv2d(architecture.in_channels, widths[0], kernel_size=3, padding=1)
        self.down_blocks = nn.ModuleList([
            DownBlock(before, after, architecture.layers_per_block, groups, resample=level < len(widths) - 1)
            for level, (before, after) in enumerate(zip((widths[0], *widths), widths))
        ])  # fmt: skip
        self.mid_block = MidBlock(widths[-1], groups, architecture.mid_block_add_attention)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=1e-6)
        self.conv_act = nn.SiLU()
        self.conv_out = nn.Conv2d(widths[-1], 2 * architecture.latent_channels, kernel_size=3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv_in(images)  # (B, C, H, W)
        for block in self.down_blocks:
            x = block(x)  # (B, C', H / 2, W / 2), the last (B, C', h, w)
        x = self.mid_block(x)  # (B, C', h, w)
        return self.conv_out(self.conv_act(self.conv_norm_out(x)))  # (B, 2 Z, h, w)


class Decoder(nn.Module):
    """Latents, after ``post_quant_conv``, to images."""

    def __init__(self, architecture: KLArchitecture) -> None:
        super().__init__()
        groups = architecture.norm_num_groups
        widths = (architecture.decoder_block_out_channels or architecture.block_out_channels)[::-1]
        self.conv_in = nn.Conv2d(architecture.latent_channels, widths[0], kernel_size=3, padding=1)
        self.up_blocks = nn.ModuleList([
            UpBlock(before, after, architecture.layers_per_block + 1, groups, resample=level < len(widths) - 1)
            for level, (before, after) in enumerate(zip((widths[0], *widths), widths))
        ])  # fmt: skip
        self.mid_block = MidBlock(widths[0], groups, architecture.mid_block_add_attention)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=1e-6)
        self.conv_act = nn.SiLU()
        self.conv_out = nn.Conv2d(widths[-1], architecture.out_channels, kernel_size=3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(latents))  # (B, C, h, w)
        for block in self.up_blocks:
            x = block(x)  # (B, C', 2 h, 2 w), the last (B, C', H, W)
        return self.conv_out(self.conv_act(self.conv_norm_out(x)))  # (B, 3, H, W)


class AutoencoderKLNetwork(nn.Module):
    """Encoder and decoder with the 1 x 1 convolutions between them and the latents."""

    def __init__(self, architecture: KLArchitecture) -> None:
        super().__init__()
        Z = architecture.latent_channels
        self.architecture = architecture
        self.encoder, self.decoder = Encoder(architecture), Decoder(architecture)
        if architecture.use_quant_conv:
            self.quant_conv = nn.Conv2d(2 * Z, 2 * Z, kernel_size=1)
        if architecture.use_post_quant_conv:
            self.post_quant_conv = nn.Conv2d(Z, Z, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [-1, 1] -> mean and log variance of the posterior, (B, 2 Z, h, w)."""
        moments = self.encoder(ops.cast_like(images, self.encoder.conv_in.weight))  # (B, 2 Z, h, w)
        return self.quant_conv(moments) if self.architecture.use_quant_conv else moments

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, Z, h, w) -> images (B, 3, H, W)."""
        latents = ops.cast_like(latents, self.decoder.conv_in.weight)
        return self.decoder(self.post_quant_conv(latents) if self.architecture.use_post_quant_conv else latents)
