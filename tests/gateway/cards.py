"""Model cards of each kind, and folders a front can read them with."""

from __future__ import annotations

from pathlib import Path

from rose.proto import rose_pb2 as pb
from tests.gateway.conftest import DIMENSION, card_for

DENSE = pb.OutputCard(name="dense", dtype=pb.FLOAT32, dimension=DIMENSION, normalized=True, kind="vector")
SPARSE = pb.OutputCard(name="sparse", dtype=pb.FLOAT32, dimension=1, per_token=True, kind="weights")
COLBERT = pb.OutputCard(
    name="colbert", dtype=pb.FLOAT32, dimension=16, per_token=True, normalized=True, kind="vector", skip_tokens=1
)
INT8 = pb.OutputCard(name="int8", dtype=pb.INT8, dimension=DIMENSION, kind="vector")
BINARY = pb.OutputCard(name="binary", dtype=pb.UINT8, dimension=DIMENSION // 8, kind="vector")


def score(labels: int = 1, unavailable: str = "") -> pb.OutputCard:
    return pb.OutputCard(name="score", dtype=pb.FLOAT32, dimension=labels, kind="score", unavailable=unavailable)


def m3_card(folder: Path, **changes) -> pb.ModelCard:
    """All three of BGE-M3's outputs."""
    return card_for(folder, outputs=[DENSE, SPARSE, COLBERT], prompts={}, **changes)


def pplx_card(folder: Path, **changes) -> pb.ModelCard:
    """An embedder with a quantiser of its own."""
    return card_for(folder, outputs=[DENSE, INT8, BINARY], prompts={}, **changes)


def reranker_card(folder: Path, labels: int = 1, **changes) -> pb.ModelCard:
    fields = {"outputs": [score(labels)], "default_output": "score", "prompts": {}, "pooling": ""}
    return card_for(folder, **fields | changes)
