"""MindSpeed-MM as the host of a run, by either of its routes."""

from __future__ import annotations


def join() -> None:
    """Make both hosts known, of which the one that joins later is asked first, and the keys of a data.json."""
    from mindspeed_mm_dit.registry import join

    join("host", "mindspeed-mm", f"{__name__}.megatron.record:KIND")
    join("host", "mindspeed-mm-native", f"{__name__}.native.record:KIND")
    join("dialect of data.json", "mindspeed-mm", f"{__name__}.data_json:in_our_words")
