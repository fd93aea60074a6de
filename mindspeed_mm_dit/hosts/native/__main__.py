"""``python -m mindspeed_mm_dit.hosts.native CONFIG.yaml``."""

from mindspeed_mm_dit.integrations.mindspeed_mm.native.host import main

if __name__ == "__main__":
    main()
