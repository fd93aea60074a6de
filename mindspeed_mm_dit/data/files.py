"""Files as this room reads them: those of ``configs/files.py``."""

from mindspeed_mm_dit.configs.files import (
    UnusableFile,
    add_content,
    check_file,
    digest_of,
    is_folder,
    read_bytes,
    reason_of,
)

__all__ = ["UnusableFile", "add_content", "check_file", "digest_of", "is_folder", "read_bytes", "reason_of"]
