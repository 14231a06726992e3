"""Training spread over ranks: the strategies, and the memory that each would hold at its peak.

    strategies  a way to spread a training step, from its text, and how it is applied
    plan        its peak on one rank, from fake tensors, in this one process
    study       the plan as a study asks it

The other files are the plan's parts: `fake` and `timeline` run a step without memory, `formulas` lays out what
fake tensors cannot, `workspace` tries convolutions on this CPU, `report` draws it.
"""
