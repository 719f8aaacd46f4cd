"""SmolLM2's weights behind the engine process, against transformers: the same greedy text, together and alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from rose.client import AsyncClient
from tests.server.generate_process import Process
from tests.support.prompts import PROMPTS

pytestmark = pytest.mark.weights
NEW_TOKENS, COUNT = 24, 6


@pytest.fixture(scope="module")
def prompts(smollm2_folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS[:COUNT]]


@pytest.fixture(scope="module")
def expected(smollm2_folder: Path, prompts) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        whole = [
            model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0]
            for ids in prompts
        ]
    return [ids[len(prompt) :].tolist() for ids, prompt in zip(whole, prompts, strict=True)]


def test_greedy_text_is_that_of_transformers(smollm2_folder, prompts, expected):
    async def one(client: AsyncClient, ids: list[int]) -> list[int]:
        tokens = client.generate(ids, max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        return [token async for some in tokens for token in some.tokens]

    async def main(address: str):
        async with await AsyncClient.connect(address) as client:
            together = await asyncio.gather(*[one(client, ids) for ids in prompts])
            alone = await one(client, prompts[0])
            counters = (await client.stats()).engine_counters
            assert counters["pages_used"] == 0
            return together, alone

    with Process(smollm2_folder, "--kv-cache-bytes", str(256 << 20), "--num-threads", "1") as process:
        together, alone = asyncio.run(main(process.address))
    assert together == expected
    assert alone == expected[0]
