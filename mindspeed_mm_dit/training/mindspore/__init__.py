"""The train step on MindSpore: compiled gradients, a flat optimizer sharded over the workers, EMA."""
