"""The twelve published sizes of DiT (Peebles & Xie 2023, table 1), by name."""

from __future__ import annotations

_WIDTHS = {
    # name: (num_layers, hidden_size, num_heads)
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (28, 1152, 16),
}

PRESETS: dict[str, dict[str, int]] = {
    f"DiT-{size}/{patch_size}": {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "patch_size": patch_size,
    }
    for size, (num_layers, hidden_size, num_heads) in _WIDTHS.items()
    for patch_size in (2, 4, 8)
}
