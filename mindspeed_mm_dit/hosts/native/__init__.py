"""A plugin of MindSpeed-MM's native FSDP2 engine, ``mindspeed_mm/fsdp``.

A yaml with ``training.plugin: [mindspeed_mm_dit.hosts.native]`` makes the engine import every module of this package;
``attach``, the first, checks the run and registers model and data.
"""
