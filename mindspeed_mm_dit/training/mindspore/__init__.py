"""The train step on MindSpore: compiled gradients, a flat AdamW sharded over the workers, moving average."""
