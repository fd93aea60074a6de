"""Proofs that two programs compute the same, quantity by quantity: ours and a published one, or two frameworks."""
