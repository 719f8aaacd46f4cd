"""Linear layers whose weights are 8-bit codes, and norms that hand such a layer codes instead of rows.

They stand where a `Linear`, `GatedLinear`, RMSNorm or DenseAddNorm stood: same calls, same answers but for the
quantisation. Whoever wraps a model puts them there; no model knows of them. Rows arrive in the model's dtype, or as the
codes that the layer before made of them; a post-norm's answer is wanted in both forms, and carries its codes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from rose.kernels.activation import gated_activation
from rose.kernels.add_norm_quantize import add_layer_norm_quantize, add_rms_norm_quantize, rms_norm_quantize
from rose.kernels.linear import activate
from rose.kernels.onednn_linear import linear_onednn, pack_weight, runs_onednn
from rose.kernels.quantize import FP8, GROUP, quantize_group, quantize_static, quantize_token
from rose.kernels.scaled_mm import dequantize, library_columns, scaled_linear, scaled_partial
from rose.layers.linear import Linear
from rose.layers.norm import DenseAddNorm, RMSNorm, ZeroCentredRMSNorm

Activations = Literal["static", "token", "group"]


def _kept(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.contiguous(), requires_grad=False)


class QuantizedLinear(nn.Module):
    """activation(dequantised weight @ quantised x + bias), or of a gated pair.

    Args:
        weight: [N, K] float8_e4m3fn or int8 (gated: [2 N, K], gate rows first).
        weight_scale: fp32: [1], [N] ([2 N]), or a block of 128 x 128 each.
        activations: "static": e4m3 under `input_scale` [1]; "token": a scale a row; "group": one for each 128 inputs of
            a row, with blocks.
        dtype: of the model, and of the answer.

    Attributes:
        output_scale: [1] where the layer behind takes codes under it, and the answer is such codes; None: rows.
    """

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        activations: Activations,
        *,
        dtype: torch.dtype,
        input_scale: Tensor | None = None,
        bias: Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        if (activations == "static") != (input_scale is not None):
            raise ValueError("static activations have a scale settled beforehand, and no others have")
        if (activations == "group") != (weight_scale.dim() == 2):
            raise ValueError("a scale for each 128 inputs goes with blocks of the weight, and only with them")
        self.activations = activations
        self.activation = activation
        self.gated = gated
        self.dtype = dtype
        self.weight = _kept(weight)
        self.weight_scale = _kept(weight_scale.float())
        self.input_scale = None if input_scale is None else _kept(input_scale.float().view(1))
        self.bias = None if bias is None else _kept(bias)
        self.output_scale: Tensor | None = None
        self._wide: Tensor | None = None
        self._columns: Tensor | None = None

    def build(self, device: torch.device) -> None:
        """What the library takes of the scales. Where no kernel takes e4m3 (the CPU): codes, or what blocks stand for,
        as fp32, in four times the memory.

        To be called again once weights or scales have changed, with nothing in flight; until then products are of the
        old ones. Columns stay where a graph reads them, so that scales changed in place reach its replays.
        """
        if device.type == "cuda" and self.weight.dtype == FP8:
            made = library_columns(self.weight, self.weight_scale, self.input_scale)
            if made is not None and self._columns is not None and made.device == self._columns.device:
                self._columns.copy_(made)
            else:
                # Its own memory: of a scale a row, columns are a view of the parameter.
                self._columns = None if made is None else made.clone()
        if device.type == "cpu" and self.weight.dtype == FP8:
            blocks = self.weight_scale.dim() == 2
            wide = dequantize(self.weight, self.weight_scale) if blocks else self.weight.float()
            self._wide = pack_weight(wide)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, K] in the model's dtype, or codes -> [T, N], or codes under `output_scale`."""
        codes, scale = self._codes(x)
        if self._wide is not None:
            y = self._finish(self._product(codes, scale))
            return y if self.output_scale is None else quantize_static(y, self.output_scale)
        return scaled_linear(
            codes,
            scale,
            self.weight,
            self.weight_scale,
            self.bias,
            self.activation,
            self.dtype,
            gated=self.gated,
            out_scale=self.output_scale,
            columns=self._columns,
        )

    def partial(self, x: Tensor) -> Tensor:
        """The product in pieces [P, T, N], for an add + norm that sums them and takes the bias too."""
        codes, scale = self._codes(x)
        if self._wide is not None:
            return self._product(codes, scale).to(self.dtype).unsqueeze(0)
        return scaled_partial(codes, scale, self.weight, self.weight_scale, self.dtype, self._columns)

    def pieces(self, x: Tensor) -> Tensor:
        """The same with the bias already in, for a norm that takes none."""
        return self.partial(x) if self.bias is None else self(x).unsqueeze(0)

    def _codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(codes [T, K], their scales)."""
        if self.input_scale is not None:
            if x.dtype == FP8:
                return x, self.input_scale
            carried = codes_of(x)
            return quantize_static(x, self.input_scale) if carried is None else carried, self.input_scale
        return quantize_group(x) if self.activations == "group" else quantize_token(x, self.weight.dtype)

    def _product(self, codes: Tensor, scale: Tensor) -> Tensor:
        """[T, N] fp32, without the bias."""
        assert self._wide is not None
        x = codes.float()
        if self.activations == "group":
            x = x * scale.repeat_interleave(GROUP, 1)[:, : x.shape[1]]
        product = linear_onednn(x, self._wide, None, None) if runs_onednn(x) else x @ self._wide.T
        return product if self.activations == "group" else product * scale.view(-1, 1) * self.weight_scale.view(1, -1)

    def _finish(self, y: Tensor) -> Tensor:
        y = y if self.bias is None else y + self.bias.float()
        y = gated_activation(y, self.activation or "silu") if self.gated else activate(y, self.activation)
        return y.to(self.dtype)


class PartedLinear(nn.Module):
    """A fused product whose parts are not quantised alike: each part by itself, one beside the other.

    Args:
        parts: their rows are the whole's, in order; they have neither bias nor activation.
    """

    def __init__(
        self,
        parts: Sequence[QuantizedLinear | Linear],
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.activation = activation
        self.gated = gated
        self.bias = None if bias is None else _kept(bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, K] in the model's dtype -> [T, N]."""
        y = torch.cat([part(x) for part in self.parts], dim=1)
        y = y if self.bias is None else y + self.bias
        return gated_activation(y, self.activation or "silu") if self.gated else activate(y, self.activation)

    def partial(self, x: Tensor) -> Tensor:
        """[1, T, N], without the bias."""
        return torch.cat([part(x) for part in self.parts], dim=1).unsqueeze(0)

    def pieces(self, x: Tensor) -> Tensor:
        return cast(Tensor, self(x)).unsqueeze(0)


class CodedRMSNorm(nn.Module):
    """An RMSNorm whose answer is e4m3 codes under the scale of the one layer that reads it.

    Args:
        norm: its weight is kept under the same name; the gain of a zero-centred one is 1 + weight still.
        scale: [1] fp32.
    """

    def __init__(self, norm: RMSNorm | ZeroCentredRMSNorm, scale: Tensor) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight = norm.weight
        self.scale = scale
        self._norm = (norm,)  # in a tuple, so that its weight is not listed twice

    def build(self, device: torch.device) -> None:
        norm = self._norm[0]
        if isinstance(norm, ZeroCentredRMSNorm):
            norm.build(device)

    @property
    def _gain(self) -> Tensor:
        norm = self._norm[0]
        return norm.gain if isinstance(norm, ZeroCentredRMSNorm) else norm.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D] -> codes [T, D]."""
        return rms_norm_quantize(x, self._gain, self.eps, self.scale)

    def add(self, pieces: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """pieces: [P, T, D], stream: [T, D] -> (codes of the normalised new stream, new stream), both [T, D]."""
        return add_rms_norm_quantize(pieces, stream, self._gain, self.eps, self.scale)


class CodedAddNorm(nn.Module):
    """LayerNorm(residual + dense(x)) whose answer carries its codes under the scale of the layer that reads it next."""

    def __init__(self, module: DenseAddNorm, scale: Tensor) -> None:
        super().__init__()
        self.dense = module.dense
        self.LayerNorm = module.LayerNorm
        self.scale = scale

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x: [T, K], residual: [T, D] -> [T, D]."""
        norm = self.LayerNorm
        partial = self.dense.partial(x)
        out, codes = add_layer_norm_quantize(
            partial, self.dense.bias, residual, norm.weight, norm.bias, norm.eps, self.scale
        )
        return carry_codes(out, codes)


def carry_codes(x: Tensor, codes: Tensor) -> Tensor:
    """x itself, with its codes beside it. A view or a copy of x does not have them, and is quantised anew."""
    x.rose_codes = codes  # type: ignore[attr-defined]
    return x


def codes_of(x: Tensor) -> Tensor | None:
    """The codes that `carry_codes` put beside x."""
    return getattr(x, "rose_codes", None)
