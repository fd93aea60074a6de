"""How weights are stepped: one file a kind of optimizer, in arithmetic that both frameworks' tensors have."""
