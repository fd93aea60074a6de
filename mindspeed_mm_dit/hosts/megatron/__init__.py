"""Command names for users of MindSpeed-MM's old route; the code is in ``integrations/mindspeed_mm/megatron``."""
