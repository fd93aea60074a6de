"""What helps, beside what trains and samples: each folder here is a wing, which may be left out.

A wing imports the core, and the core imports no wing; wings do not import each other. Its ``join`` makes it known, as
the function behind a plugin's entry point does: it names its parts and where they are, and imports none of them.
"""
