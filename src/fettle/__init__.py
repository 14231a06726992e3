"""fettle: the fastest configuration of a PyTorch model that keeps its answers, with the evidence."""

__version__ = "0.1.0"
