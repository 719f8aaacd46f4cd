"""Offline conversion: a checkpoint, or adapters on one, becomes a folder that is served as it lies.

Everything is settled from headers and small files first, as a list of choices that say where they came from; then the
weights are streamed tensor by tensor into a folder that appears whole or not at all. Knows nothing of serving.
"""

from rose.convert.offline.decide import Plan, Wishes, decide
from rose.convert.offline.open import open_weights
from rose.convert.offline.source import Source, find_source, named_base
from rose.convert.offline.write import convert

__all__ = ["Plan", "Source", "Wishes", "convert", "decide", "find_source", "named_base", "open_weights"]
