"""The tensors of a quantised checkpoint: codes with their scales, and everything else as it is.

Read by its name, a weight of codes is what the codes stand for, in fp32: whoever knows nothing of quantisation (a head,
a check of tied matrices) gets right numbers. `coded` gives the codes themselves. Scales stand beside their weight and
are no tensors of their own. Knows files and schemes; knows no model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rose.convert.checkpoint import Checkpoint, Entry
from rose.convert.quantized.schemes import BLOCK, Quantization, Scheme, read_quantization
from rose.errors import CheckpointError
from rose.kernels.scaled_mm import dequantize

_log = logging.getLogger(__name__)
_CODES = {"F8_E4M3": "F8_E4M3", "I8": "I8", str(torch.float8_e4m3fn): "F8_E4M3", str(torch.int8): "I8"}
_ZERO_POINTS = ("weight_zero_point", "input_zero_point")
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale")


@dataclass(frozen=True, slots=True)
class Coded:
    """One weight.

    Attributes:
        codes: [N, K] float8_e4m3fn or int8.
        scale: fp32: [1], [N], or [ceil(N / 128), ceil(K / 128)].
        input_scale: [1] fp32, or None.
    """

    codes: Tensor
    scale: Tensor
    input_scale: Tensor | None


class QuantizedCheckpoint(Checkpoint):
    """
    Attributes:
        schemes: name of a weight -> how it is quantised.
        left_out: small tensors that nothing here asks for: zero points that are zero, scales of a quantised cache.
    """

    def __init__(self, folder: Path, quantization: Quantization) -> None:
        """
        Raises:
            CheckpointError: as `Checkpoint`; codes that the config knows nothing of, or whose scales are missing, of a
                wrong shape, or no scales.
        """
        super().__init__(folder)
        self.quantization = quantization
        self.schemes: dict[str, Scheme] = {}
        self.left_out: list[str] = []
        self._raw: Mapping[str, Entry] = dict(self.entries)
        for name, entry in self._raw.items():
            if _leaf(name) not in _ZERO_POINTS and _is_coded(entry):
                self._take(name, entry)
        self.left_out += [name for name in self.entries if _leaf(name) in _CACHE_SCALES]
        for name in self.left_out:
            self.entries.pop(name, None)
        if not self.schemes:
            _log.info("%s: config.json names %s, and no weight is stored so", folder, quantization.method)

    def read(self, name: str) -> Tensor:
        if name not in self.schemes:
            return super().read(name)
        coded = self.coded(name)
        return dequantize(coded.codes, coded.scale)

    def read_row(self, name: str, index: int) -> Tensor:
        if name not in self.schemes:
            return super().read_row(name, index)
        scale = self._scale(name)
        row = super().read_row(name, index)[None]
        own = scale[index // BLOCK][None] if scale.dim() == 2 else scale[index : index + 1] if len(scale) > 1 else scale
        return dequantize(row, own)[0]

    def coded(self, name: str) -> Coded:
        """
        Raises:
            CheckpointError: a code that is not a number, or a scale that is none.
        """
        codes, scheme = self._stored(name), self.schemes[name]
        if codes.dtype == torch.float8_e4m3fn and bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise CheckpointError(f"{name} in {self._raw[name].file} holds values that are not finite")
        inputs = None
        if scheme.activations == "static":
            stored = self._found(name, scheme.input_scales)
            inputs = self._finite(stored).view(1)
            if not bool(inputs > 0):
                raise CheckpointError(f"{stored} is {inputs.item()}, and must be above zero")
        return Coded(codes, self._scale(name), inputs)

    def _stored(self, name: str) -> Tensor:
        """A tensor as the file has it, scales and codes too."""
        return self._files[self._raw[name].file].read(name)

    def _take(self, name: str, entry: Entry) -> None:
        module, _, leaf = name.rpartition(".")
        scheme = self.quantization.find(module)
        if scheme is None or leaf != "weight" or len(entry.shape) != 2:
            raise CheckpointError(
                f"{name} in {entry.file} holds {entry.dtype}, and quantization_config says nothing of it"
            )
        if _CODES.get(entry.dtype) != scheme.codes:
            raise CheckpointError(
                f"{name} in {entry.file} holds {entry.dtype}, and quantization_config says {scheme.codes}"
            )
        self.schemes[name] = scheme
        self.entries[name] = replace(entry, dtype="F32")
        for leaves in [scheme.scales] + ([scheme.input_scales] if scheme.activations == "static" else []):
            self.entries.pop(self._found(name, leaves), None)
        self._check_shapes(name, entry.shape, scheme)
        if scheme.activations != "static":
            inputs = (_beside(name, own) for own in scheme.input_scales)
            self.left_out += [own for own in inputs if own in self._raw]
        for own in _ZERO_POINTS:
            if _beside(name, own) in self._raw:
                if bool(self._stored(_beside(name, own)).any()):
                    raise CheckpointError(f"{_beside(name, own)} is not zero: asymmetric codes are not served")
                self.left_out.append(_beside(name, own))

    def _found(self, name: str, leaves: Sequence[str]) -> str:
        """The name under which a weight's scales are stored. Raises CheckpointError where there are none."""
        for leaf in leaves:
            if _beside(name, leaf) in self._raw:
                return _beside(name, leaf)
        raise CheckpointError(f"{_beside(name, leaves[0])} is missing, without which {name} means nothing")

    def _check_shapes(self, name: str, shape: tuple[int, ...], scheme: Scheme) -> None:
        rows, width = shape
        own = self._found(name, scheme.scales)
        stored = self._raw[own].shape
        blocks = (-(-rows // BLOCK), -(-width // BLOCK))
        held, plain = math.prod(stored), tuple(size for size in stored if size > 1)
        if scheme.weight == "block":
            right = held == math.prod(blocks) and plain == tuple(size for size in blocks if size > 1)
            wanted = str(blocks)
        else:
            # A tensor's one scale may be stored a row all the same.
            right = held == rows or (scheme.weight == "tensor" and held == 1)
            wanted = f"({rows}, 1)" if scheme.weight == "channel" else "(1,)"
        if not right:
            raise CheckpointError(f"{own} has shape {stored}, and {name} {shape} takes {wanted}")

    def _scale(self, name: str) -> Tensor:
        scheme = self.schemes[name]
        scale = self._finite(self._found(name, scheme.scales))
        if scheme.weight != "block":
            return scale.flatten()
        rows, width = self._raw[name].shape
        return scale.view(-(-rows // BLOCK), -(-width // BLOCK))

    def _finite(self, name: str) -> Tensor:
        scale = self._stored(name).float()
        if not bool(scale.isfinite().all()) or bool((scale < 0).any()):
            raise CheckpointError(f"{name} in {self._raw[name].file} holds what is no scale: a value below zero or NaN")
        return scale


def _is_coded(entry: Entry) -> bool:
    """E8M0 is a power of two: the type of scales, never of weights."""
    if "E8M0" in entry.dtype.upper():
        return False
    return entry.dtype in _CODES or entry.dtype.startswith(("F8", "torch.float8"))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _beside(weight: str, leaf: str) -> str:
    return f"{weight.rpartition('.')[0]}.{leaf}"


def open_checkpoint(folder: Path) -> Checkpoint:
    """The folder's tensors; a QuantizedCheckpoint where its config says that some are codes.

    Raises:
        CheckpointError: as either, or a scheme that is not served.
    """
    quantization = read_quantization(folder)
    return Checkpoint(folder) if quantization is None else QuantizedCheckpoint(folder, quantization)
