"""Adapters (LoRA) in files: what they hold, what programs call their layers, and how they become full weights."""
