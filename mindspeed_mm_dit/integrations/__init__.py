"""Integrations with other frameworks, which the core does not import: both routes of MindSpeed-MM."""
