"""Optional components besides training: verification, planning, evaluation, visualization.

The core imports none of them, and they do not import each other. The ``register`` function of each registers its
commands by name and module, so the core also runs without them.
"""
