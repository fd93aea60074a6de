"""The plugin that yamls of MindSpeed-MM's native engine name: ``training.plugin: [mindspeed_mm_dit.hosts.native]``.

The engine imports it, which checks the run and attaches our model and data. To start such a yaml with the checks first:
``python -m mindspeed_mm_dit.hosts.native CONFIG.yaml``.
"""

if __name__ == "__main__":
    from mindspeed_mm_dit.integrations.mindspeed_mm.native.host import main

    main()
else:
    from mindspeed_mm_dit.integrations.mindspeed_mm.native.attach import attach

    attach()
