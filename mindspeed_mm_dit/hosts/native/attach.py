"""What the engine imports: it attaches our model and data."""

from mindspeed_mm_dit.wings.mindspeed_mm.native.attach import attach

attach()
