"""What the configs of the two video transformers, ``custom_dit`` and ``wan``, have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm_dit.configs.limits import LARGEST, check_between
from mindspeed_mm_dit.errors import ConfigError

_AXES = ("frames", "height", "width")


class VideoTransformerSizes:
    """Checks and derived sizes; the fields are those of the dataclass that inherits."""

    if TYPE_CHECKING:
        num_layers: int
        patch_size: tuple[int, int, int]
        in_channels: int
        out_channels: int
        text_dim: int
        freq_dim: int
        ffn_dim: int
        rope_max_seq_len: int
        eps: float

        @property
        def num_heads(self) -> int: ...  # noqa: D102

        @property
        def head_dim(self) -> int: ...  # noqa: D102

    @property
    def hidden_size(self) -> int:
        """Width D of a token."""
        return self.num_heads * self.head_dim

    def check_sizes(self, heads: str, head_dim: str) -> None:
        """Raise ConfigError for sizes that no network has; ``heads``, ``head_dim``: the section's names of these."""
        sizes = {heads: self.num_heads, head_dim: self.head_dim}
        names = ("num_layers", "in_channels", "out_channels", "text_dim", "freq_dim", "ffn_dim", "rope_max_seq_len")
        for name, value in {**sizes, **{name: getattr(self, name) for name in names}}.items():
            check_between(f"predictor.{name}", value, 1, LARGEST)
        if len(self.patch_size) != 3 or min(self.patch_size) < 1:
            raise ConfigError(
                f"predictor.patch_size = {list(self.patch_size)}",
                "must be three positive whole numbers: frames, height and width of a patch",
                "Wan has [1, 2, 2]",
            )
        if self.head_dim < 6 or self.head_dim % 2:
            raise ConfigError(
                f"predictor.{head_dim} = {self.head_dim}",
                "rotary positions turn pairs, of frames, rows and columns: it must be even, and at least 6",
                "Wan has 128",
            )
        if self.freq_dim % 2:
            raise ConfigError(
                f"predictor.freq_dim = {self.freq_dim}", "must be even: half of the code are cosines, half sines"
            )
        if not 0 < self.eps < 1:
            raise ConfigError(f"predictor.eps = {self.eps}", "must lie between 0 and 1", "Wan has 1e-6")

    def check_latents(self, shape: tuple[int, ...]) -> None:
        """Raise ConfigError unless the network can be given latents of ``shape`` (C, F, H, W)."""
        if len(shape) != 4 or shape[0] != self.in_channels or min(shape) < 1:
            raise ConfigError(
                f"latents of shape {shape}", f"the predictor takes ({self.in_channels}, frames, height, width)"
            )
        for axis, size, patch in zip(_AXES, shape[1:], self.patch_size):
            if size % patch:
                raise ConfigError(
                    f"latents of {axis} {size}",
                    f"do not fit predictor.patch_size {list(self.patch_size)}: {size} % {patch} = {size % patch}",
                    f"use a multiple of {patch}",
                )
            if size // patch > self.rope_max_seq_len:
                raise ConfigError(
                    f"predictor.rope_max_seq_len = {self.rope_max_seq_len}",
                    f"is less than the {size // patch} patches of latents of {axis} {size}",
                    "set it as high as the longest side in patches; no weight depends on it",
                )

    def num_tokens(self, shape: tuple[int, ...]) -> int:
        """Return the sequence length N of latents of ``shape`` (C, F, H, W)."""
        _, F, H, W = shape
        P_f, P_h, P_w = self.patch_size
        return (F // P_f) * (H // P_h) * (W // P_w)
