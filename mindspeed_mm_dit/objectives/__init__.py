"""Objectives: what a network learns, and how sampling turns its outputs into data. One folder per objective."""
