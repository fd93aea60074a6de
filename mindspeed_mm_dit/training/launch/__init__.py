"""Start the processes of a run: one alone, or several with torchrun or msrun. No framework."""
