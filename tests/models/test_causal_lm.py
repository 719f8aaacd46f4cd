"""Logits of language models against transformers on the same random weights, in fp32 to 1e-4 of their largest value,
and greedy continuations token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from rose.batch import Batch
from rose.config import read_model_folder
from rose.convert import load_generative
from rose.kernels.logits import logits
from rose.models.base import GenerativeModel
from tests.support.running import logits_of, random_sequences
from tests.support.tiny_language_models import LLAMA3_ROPE, PADDING, tiny_lm

LENGTHS = [11, 1, 90, 11, 11, 2]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tied": True}),
    "llama_tied_and_stored_twice": ("llama", {"tied": True, "head": True}),
    "llama_in_shards": ("llama", {"shards": 3}),
    "llama_biases": ("llama", {"config": {"attention_bias": True, "mlp_bias": True}}),
    "llama_linear": ("llama", {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}}),
    "llama_dynamic": ("llama", {"config": {"rope_scaling": {"type": "dynamic", "factor": 4.0}}}),
    "llama3": ("llama", {"config": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5}}),
    "llama_yarn": ("llama", {"config": {"rope_scaling": YARN}}),
    "smollm2": ("llama", {"tied": True, "num_heads": 9, "num_kv_heads": 3, "hidden_size": 144, "prefix": "model."}),
    "mistral": ("mistral", {"config": {"sliding_window": 16}}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tied": True}),
    "qwen3_0.6b": ("qwen3", {"tied": True}),
    "qwen3_8b": ("qwen3", {"tied": False, "shards": 2}),
    "qwen3_yarn": ("qwen3", {"config": {"rope_scaling": YARN}}),
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def reference(path: Path):
    lm = transformers.AutoModelForCausalLM
    return lm.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def load(path: Path, dtype: torch.dtype = torch.float32):
    return load_generative(read_model_folder(path), dtype=dtype)


@torch.inference_mode()
def expected_logits(model, sequences: list[list[int]]) -> torch.Tensor:
    """After every token, each sequence alone and unpadded: [T, V]."""
    return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences])


@pytest.mark.parametrize(("model_type", "arguments"), MODELS.values(), ids=MODELS)
def test_logits(tmp_path, model_type, arguments):
    path = tiny_lm(tmp_path / "m", model_type, **arguments)
    ours, theirs = load(path), reference(path)
    sequences = random_sequences(LENGTHS, 400)
    expected = expected_logits(theirs, sequences)
    found = logits_of(ours, sequences, every_row=True)
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", ["llama_tied", "llama3", "mistral", "qwen3_8b"])
def test_greedy_text_is_the_references(tmp_path, name):
    """Forty tokens, one full forward each; random logits lie far apart, so that the first difference would show."""
    model_type, arguments = MODELS[name]
    path = tiny_lm(tmp_path / "m", model_type, **arguments)
    ours, theirs = load(path), reference(path)
    prompts = random_sequences([7, 1, 30], 400)
    settings = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    for prompt in prompts:
        expected = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)[0]
        ids = list(prompt)
        for _ in range(40):
            ids.append(int(logits_of(ours, [ids])[0].argmax()))
        assert ids == expected.tolist()


def test_as_transformers_saves_it(tmp_path):
    """config.json in the newest spelling and the names that save_pretrained writes, tied and not."""
    for tied in (True, False):
        theirs = reference(tiny_lm(tmp_path / f"ours{tied}", "qwen3", tied=tied))
        theirs.save_pretrained(tmp_path / f"saved{tied}", max_shard_size="60KB")
        sequences = random_sequences(LENGTHS, 400)
        ours = load(tmp_path / f"saved{tied}")
        torch.testing.assert_close(
            logits_of(ours, sequences, every_row=True), expected_logits(theirs, sequences), rtol=1e-4, atol=1e-4
        )


def test_only_the_wanted_rows(tmp_path):
    """Any rows, in any order and more than once."""
    model = load(tiny_lm(tmp_path / "m"))
    sequences = random_sequences([5, 3], 400)
    every = logits_of(model, sequences, every_row=True)
    torch.testing.assert_close(logits_of(model, sequences), every[[4, 7]], rtol=1e-5, atol=1e-5)
    batch = Batch.pack(sequences)
    seen: list[torch.Tensor] = []
    model.backbone.forward = lambda batch: torch.arange(8.0)[:, None].expand(8, 64)
    model.lm_head.forward = lambda x: seen.append(x) or x
    model(batch, torch.tensor([7, 0, 7], dtype=torch.int32))
    assert seen[0][:, 0].tolist() == [7.0, 0.0, 7.0]


def test_company_and_order_do_not_matter(tmp_path):
    model = load(tiny_lm(tmp_path / "m"))
    sequences = random_sequences([20, 4, 20, 1], 400)
    together = logits_of(model, sequences)
    for index, own in enumerate(sequences):
        torch.testing.assert_close(logits_of(model, [own])[0], together[index], rtol=1e-5, atol=1e-5)


def test_what_the_engine_is_told(tmp_path):
    path = tiny_lm(tmp_path / "m", num_layers=3, max_positions=128)
    model: GenerativeModel = load(path)
    assert (model.num_layers, model.kv_layers, model.recurrent, model.max_tokens) == (3, (0, 1, 2), None, 128)
    spec = model.attention_spec(torch.device("cpu"), torch.float32)
    assert (spec.layout, spec.causal, spec.num_heads, spec.num_kv_heads, spec.head_dim) == ("paged", True, 4, 2, 16)
    assert spec.window is None
    windowed = load(tiny_lm(tmp_path / "w", "mistral", config={"sliding_window": 16}))
    assert windowed.attention_spec(torch.device("cpu"), torch.float32).window == 15


def test_rows_past_the_tokenizers_vocabulary_are_told_apart(tmp_path):
    """Report C63 (vllm#13175): models with a padded vocabulary gave ids that their tokenizer does not have."""
    model = load(tiny_lm(tmp_path / "m"))
    assert model.vocab_size - model.vocab_limit == PADDING
    assert logits_of(model, [[5, 6]]).shape == (1, model.vocab_size)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_bfloat16_runs(tmp_path, model_type):
    path = tiny_lm(tmp_path / "m", model_type)
    half, full = load(path, torch.bfloat16), load(path)
    sequences = random_sequences(LENGTHS, 400)
    found = logits_of(half, sequences, torch.bfloat16)
    assert found.dtype == torch.float32
    assert torch.cosine_similarity(found, logits_of(full, sequences)).min() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_heads_product_is_right_to_fp32(dtype):
    """bf16 in, but no bf16 out: near 20 its steps are an eighth, and tokens that differ would tie."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 96, generator=draw).to(dtype)
    weight = torch.randn(20_000, 96, generator=draw).to(dtype)
    found = logits(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_heads_product_on_the_gpu(dtype, rows):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 576, generator=draw).to(dtype)
    weight = torch.randn(49_152, 576, generator=draw).to(dtype)
    found = logits(x.cuda(), weight.cuda())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), x.double() @ weight.double().T, rtol=1e-5, atol=2e-3)
