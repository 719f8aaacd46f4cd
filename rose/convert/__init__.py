"""From a checkpoint's tensors to a model's: rule tables per family and one weight stream, for loading and for writing.

Knows names, shapes and files; knows nothing of serving.
"""

from rose.convert.load import load_generative, load_model

__all__ = ["load_generative", "load_model"]
