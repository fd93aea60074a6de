"""Hosts: the programs that run a training. There are our own and MindSpeed-MM's; a run chooses one at its start."""
