"""The model card of a language model, for clients, and as a table for whoever starts the server.

Knows descriptions; knows neither weights nor requests.
"""

from __future__ import annotations

import rose
from rose.config import ModelFolder, ServerConfig
from rose.engine.generation.limits import GenerationLimits
from rose.proto import rose_pb2 as pb

# Of a table's line: some models have dozens of end tokens.
_SHOWN = 8


def generation_card(
    folder: ModelFolder,
    limits: GenerationLimits,
    server: ServerConfig,
    *,
    served_name: str,
    dtype: str,
    device: str,
    backend: str,
) -> pb.ModelCard:
    """
    Args:
        dtype, device, backend: what the model runs in, on and with, as they are printed.
    """
    architecture, generation = folder.architecture, folder.generation
    return pb.ModelCard(
        model=served_name,
        architecture=architecture.architecture,
        hidden_size=architecture.hidden_size,
        vocab_size=limits.vocab_size,
        max_tokens=limits.longest,
        max_batch_tokens=limits.batch_tokens,
        max_queued_tokens=server.max_queued_tokens,
        max_request_items=1,
        tokenizer_sha256=bytes.fromhex(folder.tokenizer_sha256 or ""),
        causal=architecture.causal,
        dtype=dtype,
        device=device,
        backend=backend,
        version=rose.__version__,
        generates=True,
        end_ids=generation.end_ids if generation is not None else (),
        max_running=limits.max_running,
    )


def generation_table(card: pb.ModelCard, folder: ModelFolder, limits: GenerationLimits, address: str) -> str:
    """What is served, one line a fact, with the source of what could be doubted."""
    generation = folder.generation
    assert generation is not None
    room = (limits.num_pages - 1) * limits.page_size
    reuse = "prompts that start alike share pages" if limits.prefix_cache else "no pages are shared"
    if limits.saved_states:
        reuse += f", as far as one of {limits.saved_states} states is kept behind them"
    rows = [
        ("model", f"{card.model}, {card.architecture}, from {folder.path}"),
        ("address", address),
        ("generates", generation.source),
        ("end tokens", f"{_listed(generation.end_ids)} ({generation.end_source})"),
        ("attention", f"causal ({folder.architecture.causal_source}); {card.backend}"),
        ("runs in", f"{card.dtype} on {card.device}"),
        ("limits", f"{card.max_tokens} tokens, prompt and new ones together"),
        ("cache", f"{room} tokens in {limits.num_pages - 1} pages of {limits.page_size}; {reuse}"),
        ("batches", f"{limits.batch_tokens} tokens, {limits.max_running} sequences running"),
        ("queue", f"{card.max_queued_tokens} tokens"),
    ]
    if generation.passed_over:
        rows.append(("no effect", f"{', '.join(generation.passed_over)} of generation_config.json"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _listed(ids: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ids[:_SHOWN])) or "none"
    return f"{shown} and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else shown
