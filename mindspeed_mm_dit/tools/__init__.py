"""What helps and does not train: verification, planning, evaluation, pictures.

The core imports none of it, and the tools do not import each other. The ``register`` of each makes its commands known, by
name and module; a tool that is not installed is not missed.
"""
