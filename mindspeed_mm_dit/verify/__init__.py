"""Checks, quantity by quantity, that two programs compute the same: ours and published code, or two frameworks."""
