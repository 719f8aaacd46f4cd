"""The model card: what is served and with which limits, for clients, and as a table for whoever starts the server.

Knows descriptions; knows neither weights nor requests.
"""

from __future__ import annotations

from collections.abc import Mapping

import rose
from rose.config import EngineConfig, ModelFolder, ServerConfig
from rose.config.pooling_facts import end_fact
from rose.config.reranker_facts import reranker_facts
from rose.errors import StartupError
from rose.models.base import OutputSpec, ServedModel
from rose.proto import rose_pb2 as pb
from rose.server.validate import Limits

_DTYPES = {"float32": pb.FLOAT32, "int8": pb.INT8, "uint8": pb.UINT8}
# Room for the fields beside the vectors in an answer's frame.
_FRAME_MARGIN = 64 << 10
MIN_PAYLOAD, MAX_PAYLOAD = 1 << 20, 0xFFFFFFFF


def model_card(
    folder: ModelFolder,
    model: ServedModel,
    engine: EngineConfig,
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
    architecture = folder.architecture
    return pb.ModelCard(
        model=served_name,
        architecture=architecture.architecture,
        outputs=output_cards(model.outputs),
        default_output=model.default_output,
        hidden_size=architecture.hidden_size,
        vocab_size=model.vocab_size,
        max_tokens=engine.max_tokens,
        max_batch_tokens=engine.bulk_tokens,
        max_queued_tokens=server.max_queued_tokens,
        max_request_items=server.max_request_items,
        tokenizer_sha256=bytes.fromhex(folder.tokenizer_sha256 or ""),
        prompts=folder.prompts,
        default_prompt_name=folder.default_prompt_name or "",
        pooling="+".join(folder.pooling.modes) if folder.pooling else "",
        causal=architecture.causal,
        dtype=dtype,
        device=device,
        backend=backend,
        version=rose.__version__,
        matryoshka_dimensions=folder.matryoshka_dimensions,
        excludes_prompt=folder.pooling is not None and folder.pooling.excludes_prompt,
    )


def output_cards(outputs: Mapping[str, OutputSpec]) -> list[pb.OutputCard]:
    return [
        pb.OutputCard(
            name=name,
            dtype=_DTYPES[spec.dtype],
            dimension=spec.dimension,
            per_token=spec.per_token,
            normalized=spec.normalized,
            unavailable=spec.unavailable or "",
            kind=spec.kind,
            skip_tokens=spec.skip_tokens,
            labels=spec.labels,
        )
        for name, spec in outputs.items()
    ]


def check_config(config: ServerConfig, max_tokens: int) -> None:
    """Raises StartupError for limits under which not every request the model takes could be answered."""
    least = {"max_queued_tokens": max_tokens, "max_queued_requests": 1, "max_request_items": 1}
    least |= {"max_payload": MIN_PAYLOAD, "drain_seconds": 0, "stuck_seconds": 1}
    for name, smallest in least.items():
        if getattr(config, name) < smallest:
            raise StartupError(f"{name} must be at least {smallest}, not {getattr(config, name)}")
    if config.max_payload > MAX_PAYLOAD:
        raise StartupError(f"max_payload is at most {MAX_PAYLOAD}: a frame's header cannot say more")


def request_limits(
    model: ServedModel,
    engine: EngineConfig,
    server: ServerConfig,
    served_name: str,
    type_vocab_size: int | None = None,
) -> Limits:
    """What the validator holds requests to."""
    return Limits(
        served_name=served_name,
        outputs=model.outputs,
        default_output=model.default_output,
        vocab_size=model.vocab_size,
        max_tokens=engine.max_tokens,
        max_request_items=server.max_request_items,
        max_request_tokens=server.max_queued_tokens,
        max_answer_bytes=server.max_payload - _FRAME_MARGIN,
        type_vocab_size=type_vocab_size,
        spans_unavailable=getattr(model, "spans_unavailable", None),
    )


def table(card: pb.ModelCard, folder: ModelFolder, engine: EngineConfig, address: str) -> str:
    """What is served, one line a fact, with the source of what could be doubted."""
    architecture = folder.architecture
    rows = [
        ("model", f"{card.model}, {card.architecture}, from {folder.path}"),
        ("address", address),
        ("outputs", ", ".join(_describe(output) for output in card.outputs)),
        *(reranker_facts(folder.reranker) if folder.reranker else _embedder_facts(card, folder)),
        ("attention", f"{'causal' if card.causal else 'bidirectional'} ({architecture.causal_source}); {card.backend}"),
        ("runs in", f"{card.dtype} on {card.device}"),
        ("limits", f"{card.max_tokens} tokens an item, {card.max_request_items} items a request"),
        (
            "batches",
            f"{engine.online_tokens} tokens online, {engine.bulk_tokens} bulk, {engine.max_sequences} sequences",
        ),
        ("queue", f"{card.max_queued_tokens} tokens"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _embedder_facts(card: pb.ModelCard, folder: ModelFolder) -> list[tuple[str, str]]:
    prompts = [f"{name}={text!r}" for name, text in sorted(folder.prompts.items())]
    return [
        ("pooling", f"{folder.pooling.told} ({folder.pooling.source})" if folder.pooling else "none"),
        *end_fact(folder),
        ("normalised", "yes" if folder.normalize else "no"),
        ("prompts", "; ".join(prompts) or "none"),
        ("default prompt", card.default_prompt_name or "none"),
    ]


def _describe(output: pb.OutputCard) -> str:
    shape = f"{'tokens × ' if output.per_token else ''}{output.dimension}"
    what = "" if output.kind == "vector" else f" {output.kind}"
    kind = f"{output.name} [{shape}] {pb.DType.Name(output.dtype).lower()}{what}"
    return f"{kind} (unavailable: {output.unavailable})" if output.unavailable else kind
