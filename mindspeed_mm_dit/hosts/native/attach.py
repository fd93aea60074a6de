"""What the engine imports: it attaches our model and data."""

from mindspeed_mm_dit.integrations.mindspeed_mm.native.attach import attach

attach()
