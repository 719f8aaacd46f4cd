"""Programs come from the tokens and sequences of a batch: one long sequence beside many short ones costs no more."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from rose.kernels.causal_conv import causal_conv_triton
from rose.kernels.delta_heads import DeltaHeads, Gates
from rose.kernels.gated_delta_rule import gated_delta_rule_triton
from rose.kernels.paged_prefill import paged_prefill_triton
from rose.kernels.pool import pool_finish_triton
from rose.kernels.short_attention import short_attention_triton

LONG, SHORT = 4096, 127  # one of the first beside so many of one token
T, B = LONG + SHORT, SHORT + 1
H, D = 4, 64


def cu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def attend(bounds: torch.Tensor, longest: int) -> None:
    q, k, v = torch.zeros(T, 3 * H, D).split(H, dim=1)
    short_attention_triton(q, k, v, bounds, longest, False, 1.0)


def prefill(bounds: torch.Tensor, longest: int) -> None:
    caches = [torch.zeros(2, 16, H, D) for _ in range(2)]
    table, lengths = torch.zeros(B, 1, dtype=torch.int32), torch.ones(B, dtype=torch.int32)
    paged_prefill_triton(torch.zeros(T, H, D), *caches, table, lengths, bounds, 0, 1.0)


def convolve(bounds: torch.Tensor, longest: int) -> None:
    causal_conv_triton(torch.zeros(T, 256), torch.zeros(256, 1, 4), bounds)


def recur(bounds: torch.Tensor, longest: int) -> None:
    heads = DeltaHeads(2, H, 64, 64)
    gates = Gates(torch.zeros(T, 2 * H), torch.zeros(H), torch.zeros(H))
    gated_delta_rule_triton(torch.zeros(T, heads.channels), gates, bounds, heads)


def pool(bounds: torch.Tensor, longest: int) -> None:
    pool_finish_triton(torch.zeros(T, 256), bounds, "mean", "none")


@pytest.mark.parametrize("call", [attend, prefill, convolve, recur, pool])
def test_programs_are_of_tokens_and_sequences(call, monkeypatch):
    programs: list[int] = []
    for name in ("short_attention", "paged_prefill", "causal_conv", "gated_delta_rule", "pool"):
        module = importlib.import_module(f"rose.kernels.{name}")
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *_, **__: programs.append(math.prod(grid)))
    call(cu([LONG, *[1] * SHORT]), LONG)
    uneven = list(programs)
    programs.clear()
    call(cu([T // B] * (B - 1) + [T - T // B * (B - 1)]), LONG)
    assert uneven == programs, "the same tokens and sequences, cut otherwise"
    # Blocks of at least 16 tokens and a part of one a sequence, for each head; columns of 32 channels or features.
    assert max(uneven) <= (T // 16 + B) * max(H, 256 // 32)
    assert max(uneven) < B * LONG // 128 * H, "blocks of the longest, for every sequence"
