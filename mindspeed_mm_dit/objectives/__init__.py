"""Objectives: the training loss and the samplers of a model. One folder per objective."""
