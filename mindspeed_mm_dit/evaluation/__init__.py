"""How good a model is: against reference values, and by its samples."""
