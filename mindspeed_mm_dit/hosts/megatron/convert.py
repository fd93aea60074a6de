"""``python -m mindspeed_mm_dit.hosts.megatron.convert DiTConverter pt_to_mm ...``."""

from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.convert import DiTConverter, main

__all__ = ["DiTConverter", "main"]

if __name__ == "__main__":
    main()
