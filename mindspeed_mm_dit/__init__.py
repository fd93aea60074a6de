"""Train and sample class-conditional diffusion transformers (DiT, Peebles & Xie 2023)."""

__version__ = "0.1.0"
