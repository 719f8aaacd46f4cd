"""Choosing the next token of each row of logits: greedy or drawn, and log probabilities.

Drawing is the Gumbel trick: of the tokens that are left, the one with the largest x_i - log(e_i), where x is the logits
over the temperature and e_i is exponentially distributed, falls on token i with probability softmax(x)_i. The e_i come
from (seed, step, i) alone (rose/kernels/philox.py). So a row draws the same token in every batch, and nothing has to be
normalised or summed in any order.

What is left, in the order that transformers applies it: all tokens are ranked by logit, equal ones by lower id first;
top_k keeps the first k; of these, top_p keeps the first whose probabilities (of the softmax over what top_k kept) add
up to it; of these, min_p keeps those at least min_p times as likely as the first. The first is always kept. All three
keep a prefix of the ranking, exactly: top_k = 1 is greedy even where logits tie, as rounded ones do.

Knows logits; knows neither requests nor text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.greedy import greedy_triton
from rose.kernels.launch import runs_triton
from rose.kernels.philox import exponential_ref
from rose.kernels.sample_triton import sample_triton

# Below it a row is greedy: dividing by less would leave fp32.
MIN_TEMPERATURE = 1e-5
# What a row gives that has a NaN or +inf, or nothing above -inf: no token can be told from it.
NOT_FINITE = -1


def greedy_ref(logits: Tensor, vocab_limit: int) -> Tensor:
    x = logits[:, :vocab_limit]
    best, ids = x.max(-1)  # the first of equal ones is not promised
    ids = torch.where(x == best[:, None], torch.arange(x.shape[1], device=x.device), x.shape[1]).amin(-1)
    return torch.where(best.isfinite(), ids, NOT_FINITE).to(torch.int32)


def kept_ref(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids a row's next token is drawn from.

    Args:
        row: [V] fp32 logits.

    Returns:
        [kept] int64; best first wherever something is left out.
    """
    x = row / temperature
    weights = torch.exp(x - x.max())
    top_k = min(top_k, len(row)) if top_k > 0 else len(row)
    top_p, min_p = max(top_p, 0.0), min(min_p, 1.0)
    if top_k == len(row) and top_p >= 1 and min_p <= 0:
        return torch.arange(len(row), device=row.device)
    if top_k < len(row):
        candidates = (row >= row.topk(top_k).values[-1]).nonzero().squeeze(1)
    elif top_p < 1:
        # Tokens that are all less likely than this weigh less than 1 - top_p together: the others are enough.
        candidates = (weights >= weights.sum() * ((1 - top_p) / len(row))).nonzero().squeeze(1)
    else:
        candidates = (weights >= min_p).nonzero().squeeze(1)
    order = row[candidates].sort(descending=True, stable=True).indices
    ranked = candidates[order][:top_k]
    ranked_weights = weights[ranked]
    kept = ranked_weights >= min_p
    if top_p < 1:
        total = ranked_weights.sum() if top_k < len(row) else weights.sum()
        kept &= ranked_weights.cumsum(0) - ranked_weights < top_p * total
    kept[0] = True
    return ranked[kept]


def sample_ref(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
    vocab_limit: int,
) -> Tensor:
    ids = greedy_ref(logits, vocab_limit)
    settings = zip(*(x.tolist() for x in (ids, temperature, top_k, top_p, min_p, seeds, steps)), strict=True)
    for index, (best, heat, k, p, least, seed, step) in enumerate(settings):
        if heat < MIN_TEMPERATURE or best == NOT_FINITE:
            continue
        row = logits[index, :vocab_limit]
        kept = kept_ref(row, heat, k, p, least)
        score = row[kept] / heat - exponential_ref(seed, step, kept).log()
        ids[index] = kept[score == score.max()].min()
    return ids


def logprobs_ref(logits: Tensor, ids: Tensor, k: int, vocab_limit: int) -> tuple[Tensor, Tensor, Tensor]:
    lp = logits[:, :vocab_limit].log_softmax(-1)
    own = lp.gather(1, ids.long().clamp_min(0)[:, None]).squeeze(1)
    k = min(k, vocab_limit)
    if k == 0:
        return own, ids.new_empty(len(ids), 0), lp.new_empty(len(ids), 0)
    # torch.topk does not say which of equal ones it takes, so equal ones are made unequal: logit first, lower id next.
    bits = (logits[:, :vocab_limit] + 0.0).view(torch.int32).long()  # + 0: minus zero is no less than zero
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = (ascending << 32) - torch.arange(vocab_limit, device=logits.device)
    top = order.topk(k).indices
    return own, top.to(torch.int32), lp.gather(1, top)


def greedy(logits: Tensor, vocab_limit: int) -> Tensor:
    """The id of each row's largest logit; of equal ones the lowest.

    Args:
        logits: [S, V] fp32.
        vocab_limit: only ids below it count (heads are often padded); at most V.

    Returns:
        [S] int32; NOT_FINITE (-1) for a row with NaN or +inf, or with nothing above -inf.
    """
    return (greedy_triton if runs_triton(logits) else greedy_ref)(logits, vocab_limit)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
    vocab_limit: int,
) -> Tensor:
    """One token a row, drawn as this file's docstring says.

    Args:
        logits: [S, V] fp32; -inf for tokens that may not be drawn.
        temperature: [S] fp32; a row below MIN_TEMPERATURE is greedy.
        top_k: [S] int32; 0 for all.
        top_p, min_p: [S] fp32; 1 and 0 for all.
        seeds: [S] int64; steps: [S] int32: the row's random numbers come from these two.
        vocab_limit: as in `greedy`.

    Returns:
        [S] int32, or NOT_FINITE as in `greedy`.
    """
    rows = temperature, top_k, top_p, min_p, seeds, steps
    if runs_triton(logits):
        return sample_triton(logits, *rows, vocab_limit, MIN_TEMPERATURE)
    return sample_ref(logits, *rows, vocab_limit)


def logprobs(logits: Tensor, ids: Tensor, k: int, vocab_limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural logarithms of the plain softmax of the logits below `vocab_limit`, whatever the temperature.

    Args:
        logits: [S, V] fp32.
        ids: [S] int32, the tokens that were chosen; a negative one is read as 0.
        k: alternatives wanted; 0 for none.

    Returns:
        (of `ids` [S] fp32, the most likely ids [S, k] int32, theirs [S, k] fp32); best first, equal ones by lower id.
    """
    return logprobs_ref(logits, ids, k, vocab_limit)


def warm_up_sampling(vocab_size: int, vocab_limit: int, device: torch.device) -> None:
    """Compile (or load) the kernels behind `greedy` and `sample` and wait for them; nothing to do on a CPU.

    A first drawn token would wait seconds for them otherwise.

    Args:
        vocab_size: columns of the logits. vocab_limit: as in `greedy`.
    """
    if device.type != "cuda":
        return
    logits = torch.zeros(1, vocab_size, device=device)
    zero, one = torch.zeros(1, device=device), torch.ones(1, device=device)
    ints, seeds = zero.to(torch.int32), zero.to(torch.int64)
    greedy(logits, vocab_limit)
    # All ways to draw are in one kernel.
    sample(logits, one, ints, one, zero, seeds, ints, vocab_limit)
    logprobs(logits, ints, 1, vocab_limit)
    torch.cuda.synchronize(device)
