"""Language models: the workload that writes text, how it writes, how well and how fast.

`GenerationWorkload` is what a user gives. `decoding` is plain PyTorch that is handed out with the techniques,
`quality` judges what is written, `speed` takes its time apart.
"""

from fettle.generate.workload import GenerationWorkload, brief

__all__ = ["GenerationWorkload", "brief"]
