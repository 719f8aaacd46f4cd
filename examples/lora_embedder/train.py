"""A LoRA that makes a causal language model a cross-language embedder.

    python -m examples.lora_embedder.train smollm2 --served BASE --data train.jsonl --out ADAPTER

Each step draws articles, or passages of them, and three languages, English one of them, and asks each text to find its
translation among the step's others (InfoNCE in both directions, over all pairs of languages). The forward is
bidirectional and mean-pooled, and is compared with ROSE's forward of BASE, the converted folder without the LoRA,
before anything is trained. Knows models and losses; what is trained on is the data file's business.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
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
        texts: of a step in each language. languages: of a step, English among them.
        first_languages: from which the first steps draw; the others join one after another.
        whole: share of the steps that keep to whole articles, once the other steps have set in.
        shortest, longest: passage of the other steps, in English tokens, about.
        tokens: longest text; the rest of it is cut off.
        warmup: share of the steps over which the rate rises; it falls to 0 over the others.
    """

    steps: int = 110
    texts: int = 14
    languages: int = 3
    first_languages: int = 8
    whole: float = 0.4
    shortest: int = 18
    longest: int = 32
    tokens: int = 72
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
    """For every step, [languages][texts] of token ids; row i of all languages says the same, and no two rows do.

    English is always one of the languages. The others join in the order in which `texts` has them.

    Raises:
        ValueError: the languages of a step have fewer than two groups in common.
    """
    draw = random.Random(recipe.seed)
    found: dict[int, dict[str, Ids]] = defaultdict(dict)
    for text, own in zip(texts, ids, strict=True):
        found[text.group][text.language] = own
    others = list(dict.fromkeys(text.language for text in texts if text.language != PIVOT))
    for step in range(recipe.steps):
        done = step / recipe.steps
        languages = [PIVOT, *draw.sample(others[: joined(len(others), done, recipe)], recipe.languages - 1)]
        shared = [found[group] for group in sorted(found) if found[group].keys() >= set(languages)]
        if len(shared) < 2:
            raise ValueError(f"{', '.join(languages)}: two groups in all of them are needed, not {len(shared)}")
        rows = [[texts_of[language] for language in languages] for texts_of in shared]
        if draw.random() < (1 - recipe.whole) * min(1, done / 0.4):
            length = draw.uniform(recipe.shortest, recipe.longest)
            rows = [passage for row in rows for passage in passages(row, length, draw)]
        chosen = draw.sample(rows, min(recipe.texts, len(rows)))
        yield [[row[i][: recipe.tokens] for row in chosen] for i in range(recipe.languages)]


def joined(languages: int, done: float, recipe: Recipe) -> int:
    """How many languages take part after the share `done` of the steps: the first ones for 15%, all from 65%."""
    share = min(1.0, max(0.0, done - 0.15) / 0.5)
    return max(recipe.languages - 1, round(recipe.first_languages + share * (languages - recipe.first_languages)))


def passages(row: Sequence[Ids], length: float, draw: random.Random) -> list[list[Ids]]:
    """An article in some languages -> its consecutive passages, each with the same share of the article in all of them.

    Word order differs little enough between most languages that the same share says nearly the same.

    Args:
        length: of a passage in the first language, about, in tokens.
    """
    count = max(1, round(len(row[0]) / length))
    cuts = [0.0, *((i + draw.uniform(-0.3, 0.3)) / count for i in range(1, count)), 1.0]
    found = [[own[round(a * len(own)) : round(b * len(own))] for own in row] for a, b in pairwise(cuts)]
    return [passage for passage in found if all(passage)]


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
    for batch in batches(texts, ids, recipe):
        vectors = embed(model, [own for language in batch for own in language], chunk_tokens=512)
        loss = info_nce(vectors.split(len(batch[0])), recipe.temperature)
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
    log["languages"] = len({text.language for text in texts})
    log["losses"] = [round(loss, 4) for loss in losses]
    (options.out / "training.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
    print(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
