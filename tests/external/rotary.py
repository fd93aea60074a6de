"""The network of ``condition.py``: the residual one, steered by an angle too."""

from mindspeed_mm_dit.framework import ops
from tests.external.residual import Residual


class Turned(Residual):
    """The angle shifts the label's vector."""

    def forward(self, x, t, y, angle):
        times = ops.to_float32(t)[:, None] / 1000  # (B, 1)
        flat = ops.cat([ops.reshape(x, (x.shape[0], -1)), times], 1)  # (B, C H W + 1)
        x = self.first(flat) + self.labels(y) * (1 + angle[:, :1]) + angle[:, 1:]  # (B, D)
        for stage in self.stages:
            x = stage(x)  # (B, D)
        return ops.reshape(self.last(x), (x.shape[0], *self.latent_shape))  # (B, C, H, W)
