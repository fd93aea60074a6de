"""The attachment to the real MindSpeed-MM: our composite, batches and state inside its ``pretrain``.

Nothing outside this room imports it, except ``hosts.choose`` when it has chosen that host.
"""
