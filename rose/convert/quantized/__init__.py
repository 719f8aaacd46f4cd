"""Checkpoints whose weights are 8-bit codes: what their files say, how they are read, and where they go in a model.

A model is built as ever; the layers whose weights are codes are then replaced from outside. Knows formats and layers;
knows no architecture.
"""

from rose.convert.quantized.place import place_quantized
from rose.convert.quantized.reading import QuantizedCheckpoint, open_checkpoint
from rose.convert.quantized.schemes import Quantization, Scheme, read_quantization

__all__ = [
    "Quantization",
    "QuantizedCheckpoint",
    "Scheme",
    "open_checkpoint",
    "place_quantized",
    "read_quantization",
]
