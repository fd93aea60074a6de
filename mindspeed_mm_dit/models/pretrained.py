"""What Hugging Face's ``from_pretrained`` leaves to be done: silence, and a look at what it found."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mindspeed_mm_dit.errors import CheckpointError


@contextmanager
def quiet(library_logging: ModuleType) -> Iterator[None]:
    """Keep diffusers or transformers, by its ``utils.logging``, from advising, and from calling a .bin an error."""
    before = library_logging.get_verbosity()
    library_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        library_logging.set_verbosity(before)


def check_complete(what: str, found: Mapping[str, Any]) -> None:
    """Raise CheckpointError where weights were missing, of another shape or unused: random ones would fill the gaps.

    found: the loading info that comes with ``output_loading_info``.
    """
    for kind, words in (("missing_keys", "is missing"), ("mismatched_keys", "has another shape than config.json says"),
                        ("unexpected_keys", "is none of this network")):  # fmt: skip
        names = sorted(str(name) for name in found.get(kind) or ())
        if names:
            more = f", and so are {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(what, f"weight {names[0]} {words}{more}", "copy the folder again")
