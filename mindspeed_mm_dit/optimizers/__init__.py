"""Optimizers, one file each, written with operations that tensors of both frameworks have."""
