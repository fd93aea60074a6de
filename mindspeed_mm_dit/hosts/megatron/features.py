"""``python -m mindspeed_mm_dit.hosts.megatron.features --mm-model JSON --mm-data JSON ...``."""

from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.features import main

if __name__ == "__main__":
    main()
