"""Start the processes of a run: a single one, or several with torchrun or msrun. Imports no framework."""
