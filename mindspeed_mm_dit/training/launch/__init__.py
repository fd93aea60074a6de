"""How a run starts its processes: alone, by torchrun or by msrun. No framework."""
