"""Commands of ``mm-dit``."""
