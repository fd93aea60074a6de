"""Conditions: from a sample's items to the arrays of a batch, and from these to the inputs of a network."""
