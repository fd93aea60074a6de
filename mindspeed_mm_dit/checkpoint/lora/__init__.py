"""LoRA adapters in files: their content, how programs name their layers, and how they are merged into weights."""
