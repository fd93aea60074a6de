"""Functions for PyTorch."""
