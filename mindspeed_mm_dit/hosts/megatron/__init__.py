"""The names of commands for the users of MindSpeed-MM's old route; they are in ``integrations/mindspeed_mm/megatron``."""
