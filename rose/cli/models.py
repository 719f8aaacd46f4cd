"""`rose pull` and `rose info`: what a model is called, where it lies, what it says about itself.

Knows options and how to print; the hub and the config room do the work.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rose.cli.shared import Commands, add_command, add_model, add_reading, find_model, reading, resolve_model
from rose.config.pooling_facts import end_fact

if TYPE_CHECKING:
    from rose.config import ModelFolder
    from rose.proto.rose_pb2 import ModelCard, OutputCard


def add_pull(commands: Commands) -> None:
    examples = ("rose pull", "rose pull --list", "rose pull e5-small --verify", "rose pull owner/model")
    parser = add_command(commands, "pull", _pull, "fetch a model and print the folder it lies in", examples)
    add_model(parser)
    parser.add_argument("--list", action="store_true", help="list the short names")
    parser.add_argument("--verify", action="store_true", help="also read every pinned file and compare its sha256")


def _pull(options: argparse.Namespace) -> int:
    from rose.hub import CATALOG, verify_package

    if options.list:
        width = max(map(len, CATALOG))
        for known in CATALOG.values():
            print(f"{known.name:<{width}}  {known.summary} ({known.licence}; {known.requirement})")
        return 0
    folder = resolve_model(options)
    if options.verify:
        if options.model not in CATALOG:
            print(f"rose: --verify knows the short names only ({', '.join(CATALOG)})", file=sys.stderr)
            return 2
        verify_package(CATALOG[options.model], folder)
    print(folder)
    return 0


def add_info(commands: Commands) -> None:
    examples = ("rose info minilm", "rose info ./my-model --pooling last", "rose info --replica 127.0.0.1:7000")
    parser = add_command(
        commands, "info", _info, "say what a model folder, or a running engine process, serves", examples
    )
    add_model(parser)
    add_reading(parser)
    parser.add_argument(
        "--replica", metavar="ADDRESS", help="ask the engine process at host:port or unix:/path instead"
    )


def _info(options: argparse.Namespace) -> int:
    if options.replica:
        from rose.client import Client

        with Client(options.replica) as client:
            _print_facts(_card_facts(client.info()))
        return 0
    from rose.config import read_model_folder

    _print_facts(_folder_facts(read_model_folder(find_model(options.model, options.cache), **reading(options))))
    return 0


def _print_facts(facts: list[tuple[str, object]]) -> None:
    width = max(13, *(len(name) for name, _ in facts))
    for name, value in facts:
        print(f"{name:<{width}} {value}")


def _folder_facts(folder: ModelFolder) -> list[tuple[str, object]]:
    from rose.config.generation_facts import generation_facts
    from rose.config.reranker_facts import reranker_facts

    shape = folder.architecture
    if folder.generation is not None:
        served = generation_facts(folder.generation, shape.vocab_size)
    else:
        served = reranker_facts(folder.reranker) if folder.reranker else _embedder_facts(folder)
    attention = "causal" if shape.causal else "bidirectional"
    heads = f"{shape.num_heads} query and {shape.num_kv_heads} key/value heads of {shape.head_dim}"
    return [
        ("folder", folder.path),
        ("architecture", f"{shape.architecture}: {shape.num_layers} layers of {shape.hidden_size}, {heads}"),
        ("attention", f"{attention} ({shape.causal_source})"),
        ("vocabulary", shape.vocab_size),
        ("max tokens", folder.max_tokens),
        *served,
        ("stored dtype", shape.dtype),
        *([("quantised", f"8-bit codes ({folder.quantized_by})")] if folder.quantized_by else []),
        ("tokenizer", f"sha256 {folder.tokenizer_sha256}" if folder.tokenizer_sha256 else "none"),
    ]


def _embedder_facts(folder: ModelFolder) -> list[tuple[str, str]]:
    pooling = folder.pooling
    return [
        ("pooling", f"{pooling.told} ({pooling.source})" if pooling else "not stated"),
        *end_fact(folder),
        *(("dense", f"{d.in_features} to {d.out_features}, {d.activation or 'linear'}") for d in folder.dense),
        ("normalised", "yes" if folder.normalize else "no"),
        ("dimensions", str(folder.dimension)),
        ("similarity", folder.similarity or "not stated"),
        *(("prompt", f"{name}: {text!r}") for name, text in folder.prompts.items()),
    ]


def _card_facts(card: ModelCard) -> list[tuple[str, object]]:
    scores = any(output.kind == "score" for output in card.outputs)
    excluded = ", without the prompt" if card.excludes_prompt else ""
    queue = f"{card.max_queued_tokens} tokens; one request: {card.max_request_items} items"
    return [
        ("model", f"{card.model}, {card.architecture}"),
        ("runs", f"{card.dtype} on {card.device}, attention {card.backend}, rose {card.version}"),
        ("attention", "causal" if card.causal else "bidirectional"),
        *(() if scores else (("pooling", (card.pooling or "none") + excluded),)),
        *(("output", _output(output)) for output in card.outputs),
        ("max tokens", card.max_tokens),
        ("batch", f"{card.max_batch_tokens} tokens at most"),
        ("queue", queue),
        *(() if scores else (("prompt", f"{name}: {text!r}") for name, text in sorted(card.prompts.items()))),
        ("tokenizer", f"sha256 {card.tokenizer_sha256.hex()}" if card.tokenizer_sha256 else "none"),
    ]


def _output(output: OutputCard) -> str:
    if output.kind == "score":
        shape = f"a score of each of {output.dimension} labels: {', '.join(output.labels) or 'without names'}"
    else:
        shape = f"{output.dimension} dimensions{' a token' if output.per_token else ''}"
    return f"{output.name}: {shape}" + (f", cannot be had: {output.unavailable}" if output.unavailable else "")
