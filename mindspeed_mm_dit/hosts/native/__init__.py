"""The plugin name in yamls of MindSpeed-MM's native engine; the code is in ``integrations/mindspeed_mm/native``.

A yaml with ``training.plugin: [mindspeed_mm_dit.hosts.native]`` makes the engine import the modules of this package.
"""
