"""Functions for MindSpore."""
