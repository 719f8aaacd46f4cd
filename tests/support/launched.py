"""Which operators of torch were called: what a device would have launched a kernel for."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = {"aten::t", "aten::transpose", "aten::slice", "aten::view", "aten::unsqueeze", "aten::detach", "aten::alias"}


class Launched(TorchDispatchMode):
    """
    Attributes:
        names: of the operators in their order, views left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name not in _VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
