"""Linear layers over rose.kernels.linear: plain, and the gated pair of SwiGLU."""

from __future__ import annotations

from torch import Tensor, nn

from rose.kernels.activation import gated_activation
from rose.kernels.linear import linear, linear_gated, linear_partial
from rose.kernels.onednn_linear import pack_weight
from rose.layers.parameter import parameter


class Linear(nn.Module):
    """activation(x @ weight.T + bias). weight: [N, K], bias: [N] or None."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, activation: str | None = None
    ) -> None:
        super().__init__()
        self.activation = activation
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, K] -> [T, N]."""
        return linear(x, self.weight, self.bias, self.activation)

    def partial(self, x: Tensor) -> Tensor:
        """x @ weight.T in pieces [P, T, N], for an add + norm that sums them and takes the bias too."""
        return linear_partial(x, self.weight)

    def pieces(self, x: Tensor) -> Tensor:
        """The same with the bias already in, for a norm that takes none."""
        return self.partial(x) if self.bias is None else self(x).unsqueeze(0)


class GatedLinear(nn.Module):
    """activation(x @ gate.T + b) * (x @ up.T + c). weight: [2 N, K], the N gate rows first; bias: [2 N] or None."""

    def __init__(self, in_features: int, out_features: int, activation: str, *, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.weight = parameter(2 * out_features, in_features)
        self.bias = parameter(2 * out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, K] -> [T, N]."""
        if self.bias is not None:  # too rare for an epilogue of its own
            return gated_activation(linear(x, self.weight, self.bias), self.activation)
        return linear_gated(x, self.weight, self.activation)


def pack_linears(model: nn.Module) -> None:
    """Lay out every weight for the CPU's products, where that pays (fp32); to be called once, after loading."""
    for module in model.modules():
        if isinstance(module, Linear | GatedLinear):
            module.weight = nn.Parameter(pack_weight(module.weight), requires_grad=False)
