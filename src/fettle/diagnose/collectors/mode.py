"""The mode of PyTorch by which collectors see operators."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators of a call as it is.

    Beside other modes torch runs compiled code eagerly, and goes on so when they are gone. It refuses them what runs
    operators itself, such as `torch.cond` and `flex_attention`.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code be compiled code."""
        return True
