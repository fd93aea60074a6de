"""Callbacks of a run while it trains: the loop calls a list of them and knows none by name."""
