"""The attachment to the real MindSpeed-MM: our composite, batches and state inside its ``pretrain``.

Nothing outside this room imports it before it is chosen, except ``kind``, its record.
"""
