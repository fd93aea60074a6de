"""The names of commands for the users of MindSpeed-MM's old route; they are in ``wings/mindspeed_mm/megatron``."""
