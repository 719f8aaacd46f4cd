"""Sequences laid out in pages, with poison wherever nobody's tokens lie, and their attention in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE = 16


@dataclass
class Paged:
    """One layer's cache and the history it was made from.

    Attributes:
        keys, values: of each sequence, [kv length, G, head_dim], the tokens of the batch last.
        new: of each sequence, tokens that belong to the batch and are not in the cache yet.
        q, k, v: of the batch, strided views of one packed tensor.
    """

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    kv_lengths: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    new: list[int]
    packed: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def expected(self, scale: float, window: int | None = None) -> Tensor:
        """[T, H, head_dim] fp64, by torch's attention over the history."""
        out, row = [], 0
        for keys, values, new in zip(self.keys, self.values, self.new, strict=True):
            total, group = len(keys), self.q.shape[1] // keys.shape[1]
            q = self.q[row : row + new].double().transpose(0, 1)
            k, v = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
            ahead = torch.arange(total)[None] - torch.arange(total - new, total)[:, None]
            seen = (ahead <= 0) & (ahead >= -(total if window is None else window))
            out.append(
                F.scaled_dot_product_attention(q, k, v, attn_mask=seen.to(q.device), scale=scale).transpose(0, 1)
            )
            row += new
        return torch.cat(out)

    def store_new(self) -> None:
        """Put the batch's own tokens into the cache, as plain indexing."""
        rows = self.slots.long()
        self.k_cache.view(-1, *self.k_cache.shape[2:])[rows] = self.k
        self.v_cache.view(-1, *self.v_cache.shape[2:])[rows] = self.v


def paged(place, kv_lengths, new, heads, kv_heads, head_dim, seed=0, spare=3, page=PAGE, width=None):
    """Sequences of `kv_lengths` tokens, of which the last `new` are the batch's; pages in random order.

    Pages and rows that hold no token, those of the batch included, are NaN; so are the keys of sequence pages beyond.
    """
    needed = [-(-n // page) for n in kv_lengths]
    order = torch.randperm(sum(needed) + spare, generator=torch.Generator().manual_seed(seed)) + 1
    k_cache, v_cache = (
        torch.full((len(order) + 1, page, kv_heads, head_dim), torch.nan, dtype=place.dtype, device=place.device)
        for _ in range(2)
    )
    # Entries past a sequence's pages are 0 by contract, and page 0 is as poisoned as any other.
    table = torch.zeros(len(needed), width or max(needed), dtype=torch.int32)
    keys, values, slots, taken = [], [], [], 0
    for index, (total, own) in enumerate(zip(kv_lengths, new, strict=True)):
        pages = order[taken : taken + needed[index]]
        taken += needed[index]
        table[index, : len(pages)] = pages.int()
        keys.append(place.randn(total, kv_heads, head_dim))
        values.append(place.randn(total, kv_heads, head_dim))
        at = torch.arange(total)
        rows = pages[at // page] * page + at % page
        for cache, history in ((k_cache, keys[-1]), (v_cache, values[-1])):
            cache.view(-1, kv_heads, head_dim)[rows[: total - own].to(place.device)] = history[: total - own]
        slots += rows[total - own :].tolist()
    tokens = sum(new)
    packed = torch.full(
        (tokens + 5, (heads + 2 * kv_heads) * head_dim), torch.nan, dtype=place.dtype, device=place.device
    )
    q, k, v = packed.view(tokens + 5, -1, head_dim)[:tokens].split([heads, kv_heads, kv_heads], dim=1)
    q.copy_(place.randn(tokens, heads, head_dim))
    for view, history in ((k, keys), (v, values)):
        view.copy_(torch.cat([part[len(part) - own :] for part, own in zip(history, new, strict=True)]))
    return Paged(
        k_cache,
        v_cache,
        table.to(place.device),
        place.tensor(list(kv_lengths)),
        place.tensor(slots),
        place.tensor([sum(new[:i]) for i in range(len(new) + 1)]),
        keys,
        values,
        list(new),
        packed[:tokens],
        q,
        k,
        v,
    )
