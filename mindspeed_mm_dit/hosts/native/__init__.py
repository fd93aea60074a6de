"""The host on MindSpeed-MM's native FSDP2 engine, ``mindspeed_mm/fsdp``, as a plugin of that engine.

A yaml with ``training.plugin: [mindspeed_mm_dit.hosts.native]`` makes the engine import every module of this package;
The first one, ``attach``, checks the run and registers model and data.
"""
