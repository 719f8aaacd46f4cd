"""The forms a vector can be sent in: numbers or base64, float32, bytes or bits, each from the output it is made of.

    float, base64         the model's vector; base64 is little-endian float32 whatever the model computes in
    int8, uint8           the model's own quantiser; uint8 is int8 + 128. A scale that the model was not trained for
                          would be a guess, so other models have neither
    ubinary, binary       sign bits (x > 0), most significant bit first, as sentence-transformers packs them; binary is
                          the same bytes - 128
    base64_int8, base64_binary    Perplexity's: signed bytes; bits (x >= 0) least significant bit first

Knows arrays and output cards; knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rose.errors import InvalidInput
from rose.gateway.inputs import show
from rose.gateway.outputs import find_output, output_cards
from rose.gateway.vectors import cut_vectors
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray

FLOAT, BASE64 = "float", "base64"
Dtype = Literal["float32", "int8", "uint8", "binary", "ubinary"]
# Perplexity's formats and the outputs they are.
QUANTISED: dict[str, Dtype] = {"base64_int8": "int8", "base64_binary": "binary"}
_DTYPES: dict[str | None, Dtype] = {
    None: "float32",
    "float": "float32",
    "int8": "int8",
    "uint8": "uint8",
    "binary": "binary",
    "ubinary": "ubinary",
}


@dataclass(frozen=True, slots=True)
class Form:
    """How one vector is written.

    Attributes:
        dtype: what its numbers are; bits for the binary ones.
        base64: bytes in base64 instead of a list of numbers.
        source: the output of the model it is made from.
        dimension: of that vector, in numbers before any are packed.
        bit_order: of packed bits.
    """

    dtype: Dtype
    base64: bool
    source: str
    dimension: int
    bit_order: Literal["msb", "lsb"] | None = None

    @property
    def engine_cuts(self) -> bool:
        """Whether the engine cuts the vector to the asked dimensions; quantised rows are cut here, afterwards."""
        return self.bit_order == "msb" or self.dtype == "float32"

    def check(self, dimensions: int) -> None:
        """0 keeps all. Raises InvalidInput for more than there are or fewer than none, or for a part of a byte."""
        step = 8 if self.bit_order else 1
        wanted = dimensions or self.dimension
        if not 0 < wanted <= self.dimension or wanted % step:
            kind = f"a multiple of {step} up to {self.dimension}" if step > 1 else f"1..{self.dimension}"
            name = self.source if self.dtype == "float32" else self.dtype
            raise InvalidInput(f"dimensions of {show(wanted)}: {kind} for {name}", param="dimensions")

    def apply(self, rows: AnyArray, dimensions: int) -> AnyArray:
        """[items, ...] rows of the source, as they are sent. Quantising goes number by number, so a cut is a prefix."""
        if self.dtype == "float32":
            return np.ascontiguousarray(rows, dtype="<f4") if self.base64 else rows
        if self.bit_order == "msb":
            packed = np.packbits(rows > 0, axis=1)
            return packed if self.dtype == "ubinary" else (packed ^ 0x80).view(np.int8)
        if dimensions:
            rows = rows[:, : dimensions // 8 if self.bit_order else dimensions]
        return (rows.view(np.uint8) ^ 0x80) if self.dtype == "uint8" else rows

    def fields(self) -> bytes:
        """Further fields of each item, so that nobody has to guess what the bytes are."""
        if self.dtype == "float32":
            return b""
        order = b"" if self.bit_order is None else b',"bit_order":"%b"' % self.bit_order.encode()
        return b',"dtype":"%b"%b' % (self.dtype.encode(), order)


def vector_form(card: pb.ModelCard, encoding: str | None, dtype: str | None) -> Form:
    """
    Args:
        encoding: `encoding_format` of a request; None is "float".
        dtype: `output_dtype`; None is "float".

    Raises:
        InvalidInput: one that is unknown, that the model cannot give, or two that contradict each other.
    """
    if dtype not in _DTYPES:
        known = ", ".join(name for name in _DTYPES if name)
        raise InvalidInput(f"output_dtype {dtype!r}: expected one of {known}", param="output_dtype")
    if encoding in QUANTISED and dtype is not None and _DTYPES[dtype] != QUANTISED[encoding]:
        raise InvalidInput(f"encoding_format {encoding!r} is not {dtype}: send one of both", param="output_dtype")
    if encoding in QUANTISED:
        if not _has(card, QUANTISED[encoding]):
            raise _unknown(card, encoding)
        return _quantised(card, QUANTISED[encoding], base64=True)
    if encoding not in (None, FLOAT, BASE64):
        raise _unknown(card, encoding)
    return _plain(card, _DTYPES[dtype], base64=encoding == BASE64)


def _plain(card: pb.ModelCard, dtype: Dtype, *, base64: bool) -> Form:
    if dtype in ("int8", "uint8"):
        if not _has(card, "int8"):
            raise InvalidInput(
                f"output_dtype {dtype!r} cannot be had: {card.model!r} has no quantiser of its own, and a scale would "
                "be a guess",
                param="output_dtype",
            )
        return _quantised(card, dtype, base64=base64)
    (output,) = output_cards(card, ()) or (pb.OutputCard(dimension=card.hidden_size),)
    order: Literal["msb"] | None = None if dtype == "float32" else "msb"
    if order and output.dtype != pb.FLOAT32:
        raise InvalidInput(
            f"output_dtype {dtype!r} is made from float vectors, which the model has not", param="output_dtype"
        )
    return Form(dtype, base64, output.name, output.dimension, order)


def _quantised(card: pb.ModelCard, dtype: Dtype, *, base64: bool) -> Form:
    """From the output of the model that is quantised already."""
    name = "binary" if dtype == "binary" else "int8"
    output = find_output(card, name)
    assert output is not None  # its caller has looked
    if name == "binary":
        return Form(dtype, base64, name, output.dimension * 8, "lsb")
    return Form(dtype, base64, name, output.dimension)


def _has(card: pb.ModelCard, name: str) -> bool:
    output = find_output(card, name)
    return output is not None and not output.unavailable


def _unknown(card: pb.ModelCard, encoding: str) -> InvalidInput:
    known = [FLOAT, BASE64, *(name for name, output in QUANTISED.items() if _has(card, output))]
    return InvalidInput(
        f"encoding_format {encoding!r} cannot be had here: expected one of {', '.join(known)}", param="encoding_format"
    )


def cut_rows(card: pb.ModelCard, form: Form, rows: AnyArray, cut: int) -> AnyArray:
    """Rows of the form's source as they are sent. Float vectors are cut and normalised again as the engine does it.

    Args:
        cut: length that rows still have to be cut to; 0 leaves them.

    Raises:
        NonFinite: as `cut_vectors` does.
    """
    output = find_output(card, form.source)
    if cut and form.engine_cuts:
        rows = cut_vectors(rows, cut, form.source, normalized=output is not None and output.normalized)
    return form.apply(rows, cut)
