"""``python -m mindspeed_mm_dit.hosts.megatron.run SCRIPT [flags of the script]``."""

from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.run import main

if __name__ == "__main__":
    main()
