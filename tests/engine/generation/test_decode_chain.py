"""What one batch of a generating engine launches on a GPU, counted without one: a step of decoding is a chain of small
kernels, and each that is one too many costs the whole step a microsecond or two.

The launches of ROSE's own kernels are recorded instead of done; of torch's operators, those that launch something.
"""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rose.kernels
from rose.attention_backends.kv_cache import KVCache
from rose.attention_backends.triton_paged import TritonPaged
from rose.config import read_model_folder
from rose.engine.generation.buckets import GREEDY, Draw, GenerationBuckets
from rose.engine.generation.forward import DeviceSide, GenerationForward
from rose.engine.generation.lanes import Lanes
from rose.engine.generation.staging import GenerationStaging
from rose.engine.generation.states import StatePools
from rose.kernels.launch import triton
from rose.models.causal_lm import build_causal_lm
from tests.support.tiny_language_models import tiny_lm

pytestmark = pytest.mark.skipif(triton is None, reason="needs Triton's decorators")

# Qwen3-0.6B but for its vocabulary.
SHAPE = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 3072}
LAYERS, PAGE, RUNNING = 3, 16, 64
# Operators that only look at memory, or take some.
FREE = {
    "view",
    "_unsafe_view",
    "select",
    "slice",
    "split_with_sizes",
    "split",
    "unsqueeze",
    "squeeze",
    "t",
    "transpose",
}
FREE |= {
    "expand",
    "as_strided",
    "alias",
    "detach",
    "flatten",
    "unbind",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "permute",
}


class Chain(TorchDispatchMode):
    """Names of what is launched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def launch(self, kernel, grid, *args, **rest) -> None:
        assert 0 not in grid
        self.names.append(getattr(kernel, "__name__", None) or kernel.fn.__name__)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.names.append(f"torch.{name}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def chain(monkeypatch) -> Chain:
    found = Chain()
    for info in pkgutil.iter_modules(rose.kernels.__path__):
        module = importlib.import_module(f"rose.kernels.{info.name}")
        for name, stand_in in (
            ("launch", found.launch),
            ("runs_triton", lambda x: True),
            ("runs_sm90", lambda device: True),
            ("has_dependent_launch", lambda device: True),
        ):
            if hasattr(module, name) and info.name != "launch":
                monkeypatch.setattr(module, name, stand_in)

    def head(x, weight):
        found.names.append("head")
        return torch.empty(x.shape[0], weight.shape[0])

    monkeypatch.setattr("rose.layers.lm_head.logits", head)
    return found


@pytest.fixture(scope="module")
def side(tmp_path_factory) -> DeviceSide:
    folder = read_model_folder(
        tiny_lm(
            tmp_path_factory.mktemp("lm"), "qwen3", num_layers=LAYERS, max_positions=4096, dtype=torch.bfloat16, **SHAPE
        )
    )
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_causal_lm(folder)
    finally:
        torch.set_default_dtype(dtype)
    spec = model.attention_spec(torch.device("cpu"), torch.bfloat16)
    backend = TritonPaged(spec)
    backend.bind(KVCache(model.kv_layers, 4, PAGE, 8, 128, torch.bfloat16, "cpu"))
    return DeviceSide(
        model=model,
        backend=backend,
        latest=torch.zeros(RUNNING + 1, dtype=torch.int32),
        states=None if model.recurrent is None else StatePools(model.recurrent, RUNNING + 1, torch.bfloat16, "cpu"),
        page_size=PAGE,
        vocab_limit=model.vocab_size,
    )


def launched(chain: Chain, side: DeviceSide, key) -> list[str]:
    """By a batch of `key`, in order."""
    staging = GenerationStaging(Lanes(RUNNING + 1, 4096 // PAGE), buckets(), PAGE, pin=False)
    staged = staging.write_dummies(0, key)
    forward = GenerationForward(side, staged)
    forward.load(staged.packed, key)
    with torch.inference_mode(), chain:
        forward.run()
    return chain.names


def buckets() -> GenerationBuckets:
    return GenerationBuckets(captures=True, max_running=RUNNING, max_tokens=4096, prompts=True)


def layer(decode: list[str], gemm: str) -> list[str]:
    return [gemm, *decode, gemm, "_add_rms_norm", gemm, gemm, "_add_rms_norm"]


@pytest.mark.parametrize("sequences", [1, 2, 4, 8, 16, 64])
def test_a_greedy_step(chain, side, sequences):
    """Eight kernels a layer where keys are shared out, else seven, and six beside the layers. Of a layer's two norms
    the second is the next one's first; the last is the model's own."""
    names = launched(chain, side, buckets().decode_key(sequences, 1024))
    attention = ["_paged_decode"] if sequences >= 8 else ["_paged_decode", "_merge"]
    gemm = names[2]
    assert "gemm" in gemm
    before, behind = ["_take_latest", "_embed_rms_norm"], ["head", "_greedy_blocks", "_greedy_merge", "_keep_latest"]
    products = {name for name in names if "gemm" in name}
    unified = [gemm if name in products else name for name in names]
    assert unified == [*before, *(LAYERS * layer(attention, gemm)), *behind]


def test_longer_bounds_share_out_more(chain, side):
    names = launched(chain, side, buckets().decode_key(8, 4000))
    assert names.count("_merge") == LAYERS


def test_a_prompt_alone(chain, side):
    """Rotation and storing are one kernel, attention the other; of the rows the last is picked for the head."""
    names = launched(chain, side, buckets().key(0, 1, 128, 128, GREEDY))
    counts = {name: names.count(name) for name in set(names)}
    assert counts["_qk_norm_rope_store"] == counts["_paged_prefill"] == LAYERS
    assert counts["_add_rms_norm"] == 2 * LAYERS
    assert "_paged_decode" not in counts
    assert [name for name in names if name.startswith("torch.")] == ["torch.index_select"]
    assert names[:2] == ["_take_latest", "_embed_rms_norm"]
    assert names[-5:] == ["torch.index_select", "head", "_greedy_blocks", "_greedy_merge", "_keep_latest"]
    assert len(names) == 7 + LAYERS * 8


def test_prompts_beside_decoding_sequences(chain, side):
    names = launched(chain, side, buckets().key(5, 1, 133, 128, GREEDY))
    assert names.count("_paged_decode") == names.count("_paged_prefill") == LAYERS
    # Two kernels of attention; beyond 128 tokens products are the library's, and the gated pair takes another kernel.
    assert len(names) == 7 + LAYERS * 10


def test_a_drawn_step_asks_torch_for_nothing(chain, side):
    names = launched(chain, side, buckets().decode_key(1, 1024, Draw(sampled=True)))
    assert not [name for name in names if name.startswith("torch.")]
    assert len(names) - LAYERS * 8 <= 8


def test_the_recorder_sees_what_torch_launches(chain):
    with chain:
        torch.ones(3)[None].add(1).view(3)
    assert np.array_equal(chain.names, ["torch.ones", "torch.add"])
