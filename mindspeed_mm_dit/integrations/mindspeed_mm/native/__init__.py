"""The host on MindSpeed-MM's native FSDP2 engine, ``mindspeed_mm/fsdp``, as a plugin of that engine."""
