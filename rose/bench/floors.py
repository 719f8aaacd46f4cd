"""Least times of a shape on one H200, from its bytes and products and the chip's measured ceilings.

    python -m rose.bench.floors 512

Ceilings: a device copy (read + write) and an 8192^3 bf16 product, both as measured on an H200, not the data sheet's.
Knows the arithmetic of shapes; measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

BYTES_PER_S, FLOPS_PER_S = 4.21e12, 784e12
_BYTES = 2  # bf16
_STATE_BYTES = 4  # recurrent state is fp32


def floor_ms(config: Mapping[str, Any], tokens: int, sequences: int = 1) -> float:
    """Least milliseconds of one bf16 forward: weights read once, or its products at full rate, whichever is more.

    Embedding tables and heads are left out: a few rows of them are read.

    Args:
        config: config.json of a shape.
        tokens: of each sequence.
    """
    weights = layer_weights(config)
    full, _ = _layers(config)
    width, _ = _attention_widths(config)
    seen = 0.5 if _causal(config) else 1.0  # of the square of queries and keys
    flops = sequences * (2 * weights * tokens + seen * 4 * full * width * tokens**2)
    return float(1e3 * max(_BYTES * weights / BYTES_PER_S, flops / FLOPS_PER_S))


def decode_floor_ms(config: Mapping[str, Any], batch: int, length: int) -> float:
    """Least milliseconds of one step that gives each of `batch` sequences its next token.

    Weights and the head are read once, keys and values of every sequence once; recurrent state is read and written.

    Args:
        length: tokens of each sequence in the cache.
    """
    full, linear = _layers(config)
    width, kv_width = _attention_widths(config)
    weights = layer_weights(config) + config["vocab_size"] * config["hidden_size"]
    cache = batch * length * full * 2 * kv_width
    state = 0
    if linear:
        state = (
            linear * config["linear_num_value_heads"] * config["linear_key_head_dim"] * config["linear_value_head_dim"]
        )
    read = _BYTES * (weights + cache) + 2 * _STATE_BYTES * batch * state
    flops = batch * (2 * weights + 4 * full * width * length)
    return float(1e3 * max(read / BYTES_PER_S, flops / FLOPS_PER_S))


def layer_weights(config: Mapping[str, Any]) -> int:
    """Weights of all layers' matrices."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    full, linear = _layers(config)
    width, kv_width = _attention_widths(config)
    gate = width if linear else 0  # models with recurrent layers gate their attention's output
    attention = hidden * (2 * width + gate + 2 * kv_width)
    recurrent = 0
    if linear:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        # q, k, v and z, then b and a, then the way back.
        recurrent = hidden * (2 * keys + 2 * values + 2 * config["linear_num_value_heads"] + values)
    gated = 3 if config["hidden_act"] == "silu" else 2
    return int(full * attention + linear * recurrent + (full + linear) * gated * hidden * inner)


def _layers(config: Mapping[str, Any]) -> tuple[int, int]:
    """(layers with attention, layers with recurrent state)."""
    kinds = config.get("layer_types")
    if kinds is None:
        return config["num_hidden_layers"], 0
    return sum(kind == "full_attention" for kind in kinds), sum(kind == "linear_attention" for kind in kinds)


def _attention_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = heads * config.get("head_dim", hidden // heads)
    return width, width * config.get("num_key_value_heads", heads) // heads


def _causal(config: Mapping[str, Any]) -> bool:
    return config["model_type"].startswith("qwen3") and not config.get("use_bidirectional_attention", False)


def main() -> int:
    from rose.bench.shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="+", help="of each sequence")
    parser.add_argument("--batch", type=int, default=100)
    arguments = parser.parse_args()
    for name, shape in SHAPES.items():
        for tokens in arguments.tokens:
            floor = floor_ms(shape.config, tokens, arguments.batch)
            print(
                f"{name:24} {arguments.batch} x {tokens:<6} {floor:9.2f} ms  {arguments.batch / floor * 1e3:10.1f} /s"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
