"""Texts and chats in, texts out, through real processes: front and engine as `rose serve` starts them.

What is said greedily is what transformers says with the same weights.
"""

from __future__ import annotations

import concurrent.futures

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose.proto import rose_pb2 as pb
from tests.conftest import pulled
from tests.gateway.generating import chat_text, events
from tests.gateway.test_front_end_to_end import served
from tests.support.tiny_language_models import tiny_lm

PROMPTS = ["The river meets the sea", "猫", "query: where does"]
QUESTIONS = ["What is the capital of France?", "What is two plus two?"]


class Reference:
    """transformers on one folder, fp32 on the CPU."""

    def __init__(self, folder) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def greedy(self, ids: list[int], count: int) -> str:
        """Text of up to `count` tokens, ended by the model's own end tokens."""
        prompt = torch.tensor([ids])
        new = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False,
            temperature=None, top_p=None, top_k=None,
        )[0, len(ids) :].tolist()  # fmt: skip
        return self.tokenizer.decode(new, skip_special_tokens=True)


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tiny_lm(tmp_path_factory.mktemp("lm") / "tiny", "qwen3")
    with served(folder) as (client, stub):
        yield client, stub, Reference(str(folder))


def test_greedy_completions_are_the_reference_librarys(live):
    client, stub, reference = live
    expected = [reference.greedy(reference.tokenizer(text)["input_ids"], 24) for text in PROMPTS]
    fields = {"max_tokens": 24, "temperature": 0}
    found = client.post("/v1/completions", json={"prompt": PROMPTS, **fields}).json()
    assert [choice["text"] for choice in found["choices"]] == expected
    ids = [reference.tokenizer(text)["input_ids"] for text in PROMPTS]
    assert [
        c["text"] for c in client.post("/v1/completions", json={"prompt": ids, **fields}).json()["choices"]
    ] == expected
    assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    chunks = events(client.post("/v1/completions", json={"prompt": PROMPTS[0], "stream": True, **fields}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[0]
    request = pb.GenerateRequest(text=PROMPTS[0], sampling=pb.Sampling(max_new_tokens=24, temperature=0))
    assert "".join(chunk.text for chunk in stub.Generate(request)) == expected[0]


def test_log_probabilities_are_the_reference_librarys(live):
    client, _, reference = live
    ids = reference.tokenizer(PROMPTS[0])["input_ids"]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 5}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    with torch.inference_mode():
        logits = reference.model(torch.tensor([ids])).logits[0, -1, : len(reference.tokenizer)]
    best = torch.log_softmax(logits.double(), 0).topk(5)
    assert sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True) == pytest.approx(
        best.values.tolist(), abs=1e-4
    )


def test_seeds_draw_the_same_and_choices_do_not(live):
    client, _, _ = live
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "seed": 5, "n": 3, "temperature": 1.5}
    first, second = (client.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert first == second
    assert len({choice["text"] for choice in first}) == 3
    alone = client.post("/v1/completions", json={**body, "seed": 6, "n": 1}).json()["choices"]
    assert alone[0]["text"] == first[1]["text"]


def test_company_changes_nothing(live):
    """Report C12: many at a time, in any order, greedy and drawn, get what each gets alone."""
    client, _, _ = live
    bodies = [
        {"prompt": [5 + i, 7, 9 + i], "max_tokens": 5 + i % 7, "temperature": 0 if i % 2 else 1, "seed": i}
        for i in range(24)
    ]
    alone = [client.post("/v1/completions", json=body).json()["choices"] for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda body: client.post("/v1/completions", json=body).json()["choices"], bodies))
    assert together == alone


def test_a_stop_string_frees_the_engine(live):
    client, _, reference = live
    text = reference.greedy(reference.tokenizer(PROMPTS[0])["input_ids"], 24)
    stop = text[8:12]
    body = {"prompt": PROMPTS[0], "max_tokens": 200, "temperature": 0, "stop": [stop]}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["stop_reason"] == stop
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}).status_code == 200


def test_refusals_of_the_engine_carry_the_callers_names(live):
    client, _, _ = live
    error = client.post("/v1/completions", json={"prompt": [5] * 300}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "invalid_input")
    error = client.post("/v1/completions", json={"prompt": [5] * 250, "max_tokens": 50}).json()["error"]
    assert error["param"] == "max_tokens"
    assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 400


@pytest.mark.weights
@pytest.mark.slow
def test_a_model_with_trained_weights():
    """SmolLM2 answers questions as it does in transformers, over HTTP, as OpenAI's client reads it."""
    folder = pulled("smollm2")
    reference = Reference(str(folder))
    with served(folder) as (client, _):
        api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        model = api.models.list().data[0].id
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            ids = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            expected = reference.greedy(ids, 24)
            done = api.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=24)
            assert done.choices[0].message.content == expected
            assert done.usage.prompt_tokens == len(ids)
            body = {"messages": messages, "temperature": 0, "max_tokens": 24, "stream": True}
            assert chat_text(events(client.post("/v1/chat/completions", json=body).text)) == expected
        assert (
            "Paris"
            in client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0, "max_tokens": 24},
            ).json()["choices"][0]["message"]["content"]
        )
