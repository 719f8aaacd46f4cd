"""A LoRA that makes a causal language model a cross-language embedder.

    python -m examples.lora_embedder.train smollm2 --served BASE --data train.jsonl --out ADAPTER

Each step draws articles and three languages, English one of them, and asks each text to find its translation among the
step's other articles (InfoNCE in both directions, over all pairs of languages). The forward is bidirectional and
mean-pooled, and is compared with ROSE's forward of BASE, the converted folder without the LoRA, before anything is
trained. Knows models and losses; what is trained on is the data file's business.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.lora_embedder.model import difference_from_rose, embed, load_bidirectional
from examples.lora_embedder.texts import PIVOT, Text, read
from rose.hub import resolve

MOST_DIFFERENCE = 1e-4
Ids = list[int]


@dataclass(frozen=True, slots=True)
class Recipe:
    """
    Attributes:
        articles: of a step, all different. languages: of a step, English among them.
        tokens: longest text; the rest of it is cut off.
        warmup: share of the steps over which the rate rises; it falls to 0 over the others.
    """

    steps: int = 140
    articles: int = 12
    languages: int = 3
    tokens: int = 64
    rate: float = 1e-3
    warmup: float = 0.1
    temperature: float = 0.05
    rank: int = 16
    alpha: int = 32
    seed: int = 0


def add_lora(model: Any, recipe: Recipe) -> Any:
    """All linear layers of the backbone get one, in fp32; the rest is frozen, in bf16 (four times as fast on a CPU)."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(recipe.seed)
    settings = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules="all-linear", task_type=None)
    return get_peft_model(model.to(torch.bfloat16), settings)


def batches(texts: Sequence[Text], ids: Sequence[Ids], recipe: Recipe) -> Iterator[list[list[Ids]]]:
    """Endless [languages][articles] of token ids.

    An article takes part whole or by one of its paragraphs, never by both: they would be each other's wrong answers.
    """
    draw = random.Random(recipe.seed)
    found: dict[int, dict[int, dict[str, Ids]]] = defaultdict(lambda: defaultdict(dict))
    for text, own in zip(texts, ids, strict=True):
        found[text.group][text.part][text.language] = own[: recipe.tokens]
    others = sorted({text.language for text in texts} - {PIVOT})
    while True:
        languages = [PIVOT, *draw.sample(others, recipe.languages - 1)]
        groups = draw.sample(sorted(found), recipe.articles)
        chosen = [draw.choice([part for part in found[g].values() if part.keys() >= set(languages)]) for g in groups]
        yield [[part[language] for part in chosen] for language in languages]


def info_nce(languages: Sequence[Tensor], temperature: float) -> Tensor:
    """Mean over all pairs of languages and both directions.

    Args:
        languages: of each, unit vectors [articles, D]; row i of all of them says the same.
    """
    answers = torch.arange(len(languages[0]))
    losses = []
    for a, b in combinations(languages, 2):
        scores = a @ b.T / temperature
        losses += [cross_entropy(scores, answers), cross_entropy(scores.T, answers)]
    return torch.stack(losses).mean()


def train(model: Any, texts: Sequence[Text], ids: Sequence[Ids], recipe: Recipe, *, report: int = 10) -> list[float]:
    """-> the loss of every step; `model` is trained in place."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.rate, weight_decay=0.0)
    rising = max(1, round(recipe.warmup * recipe.steps))
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / rising, (recipe.steps - n) / max(1, recipe.steps - rising))
    )
    losses: list[float] = []
    started = time.perf_counter()
    for _, batch in zip(range(recipe.steps), batches(texts, ids, recipe), strict=False):
        vectors = embed(model, [own for language in batch for own in language])
        loss = info_nce(vectors.split(recipe.articles), recipe.temperature)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
        if len(losses) % report == 0:
            recent = sum(losses[-report:]) / report
            print(f"step {len(losses):4d}  loss {recent:.3f}  {time.perf_counter() - started:6.0f} s", flush=True)
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="language model: short name, folder or hub id")
    parser.add_argument("--served", type=Path, required=True, help="the same, converted without a LoRA")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines of examples.lora_embedder.texts")
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapter")
    for name, default in Recipe.__dataclass_fields__.items():
        kind = type(default.default)
        parser.add_argument(f"--{name}", type=kind, default=default.default, help="default: %(default)s")
    options = parser.parse_args(arguments)
    recipe = Recipe(**{name: getattr(options, name) for name in Recipe.__dataclass_fields__})
    folder = resolve(options.model)
    texts = read(options.data)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(text.text).ids for text in texts]
    model = load_bidirectional(folder)
    difference = difference_from_rose(model, options.served, ids[:: max(1, len(ids) // 8)])
    print(f"largest difference from ROSE's forward before training: {difference:.1e}", flush=True)
    if not difference <= MOST_DIFFERENCE:
        raise SystemExit(f"training would fit another model than is served: {difference:.1e} > {MOST_DIFFERENCE}")
    model = add_lora(model, recipe)
    model.train()
    started = time.perf_counter()
    losses = train(model, texts, ids, recipe)
    model.save_pretrained(options.out)
    log = {"recipe": {name: getattr(recipe, name) for name in Recipe.__dataclass_fields__}, "difference": difference}
    log |= {"seconds": round(time.perf_counter() - started, 1), "threads": torch.get_num_threads()}
    log["losses"] = [round(loss, 4) for loss in losses]
    (options.out / "training.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
    print(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
