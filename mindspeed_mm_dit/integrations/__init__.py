"""Connections to other programs, which the core does not import: MindSpeed-MM's two routes."""
