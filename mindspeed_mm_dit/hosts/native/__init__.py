"""The name that yamls of MindSpeed-MM's native engine give to our plugin; it is in ``integrations/mindspeed_mm/native``.

A yaml with ``training.plugin: [mindspeed_mm_dit.hosts.native]`` makes the engine import the modules of this package.
"""
