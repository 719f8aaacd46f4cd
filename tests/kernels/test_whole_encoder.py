"""The engine over this project's own kernels, in Triton's interpreter: buckets, dummies, replays, company.

What the GPU runs but for the libraries: graph keys and padding, `triton_short`, products by tiles, norms, heads. Memory
that nobody has written yet holds NaN, a capture launches nothing, and a replay finds nothing but its inputs.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rose.attention_backends import load_backend
from rose.attention_backends.triton_short import TritonShort
from rose.batch import Batch
from rose.bench.shapes import build_checkpoint
from rose.config import EngineConfig, read_model_folder
from rose.convert import load_model
from rose.engine import Engine, Request
from rose.engine.execution import CpuExecutor
from rose.engine.graphs import LazyGraphs
from rose.kernels import launch as launch_module
from tests.kernels.conftest import INTERPRETED, MODULES

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1, in a process of its own")
CPU = torch.device("cpu")
LIMITS = EngineConfig(max_tokens=128, online_tokens=256, bulk_tokens=256, max_sequences=8)


class Replayed:
    """A captured forward: a replay runs it on what lies in its buffers, into outputs that hold NaN until then."""

    bytes = 1000

    def __init__(self, fn) -> None:
        self._fn = fn
        self.outputs = {name: torch.empty_like(value) for name, value in fn().items()}

    def replay(self) -> None:
        for name, value in self._fn().items():
            self.outputs[name].fill_(torch.nan).copy_(value)

    def release(self) -> None:
        pass


class Capturer:
    """As on a device, what is launched meanwhile is recorded and does not run."""

    capturing = False

    def capture(self, key, fn) -> Replayed:
        Capturer.capturing = True
        try:
            return Replayed(fn)
        finally:
            Capturer.capturing = False


@contextlib.contextmanager
def kernels_everywhere() -> Iterator[set[str]]:
    """Inside, this project's kernels serve wherever they would on a GPU. Gives the names of those launched."""
    launched: set[str] = set()

    def launch(kernel, *args, **options):
        launched.add(kernel.__name__.removeprefix("_"))
        if not Capturer.capturing:
            launch_module.launch(kernel, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in (*MODULES, "linear"):
            module = importlib.import_module(f"rose.kernels.{name}")
            if hasattr(module, "runs_triton"):
                patch.setattr(module, "runs_triton", lambda x: True)
            if hasattr(module, "launch"):
                patch.setattr(module, "launch", launch)
        # Deterministic mode fills torch.empty with NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield launched
        finally:
            torch.use_deterministic_algorithms(False)


class Served:
    """A model behind the engine, in a dtype that its family and the interpreter have in common."""

    def __init__(self, name: str, dtype: torch.dtype, folder) -> None:
        read = read_model_folder(build_checkpoint(name, folder / name))
        self.model = load_model(read, CPU, dtype)
        self.exact = load_model(read, CPU, torch.float32)
        self.vocab = read.architecture.vocab_size
        self.kernels: set[str] = set()
        self._next = itertools.count(1)
        backend = TritonShort(self.model.attention_spec(CPU, dtype))
        self.graphs = LazyGraphs(CPU, capturer=Capturer(), max_bytes=1 << 20)
        executor = CpuExecutor(num_threads=1)
        self.engine = Engine(self.model, LIMITS, executor, backend, graphs=self.graphs, inflection_tokens=1024)

    def ids(self, *lengths: int, seed: int = 0) -> list[np.ndarray]:
        generator = np.random.default_rng([seed, *lengths])
        return [generator.integers(5, self.vocab, n, dtype=np.int32) for n in lengths]

    def embed(self, sequences: list[np.ndarray]) -> np.ndarray:
        self.engine.add(Request(next(self._next), sequences))
        found: dict[int, np.ndarray] = {}
        while not self.engine.idle:
            for result in self.engine.step():
                rows = result.outputs["dense"].result()
                found.update(zip((item.index for item in result.items), rows, strict=True))
        out = np.stack([found[i] for i in range(len(sequences))])
        assert np.isfinite(out).all()
        return out

    def by_reference(self, sequences: list[np.ndarray]) -> np.ndarray:
        batch = Batch.pack([ids.tolist() for ids in sequences])
        batch.attention = load_backend("torch_sdpa", self.exact.attention_spec(CPU, torch.float32)).plan(batch)
        with torch.inference_mode():
            return self.exact(batch, ["dense"])["dense"].numpy()


# Products by tiles are of half precision only; in fp32 the library has them.
BERT = {"embed_layer_norm", "gemm", "short_attention", "add_layer_norm", "pool_finish"}
QWEN = {"embed_rms_norm", "qk_norm_rope", "short_attention", "add_rms_norm", "gated_activation", "pool_finish"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("tiny-bge-m3", torch.float16, BERT), id="bge-m3-float16"),
        pytest.param(("tiny-pplx-embed", torch.float32, QWEN), id="pplx-embed-float32"),
    ],
)
def served(request, tmp_path_factory):
    name, dtype, kernels = request.param
    found = Served(name, dtype, tmp_path_factory.mktemp("encoder"))
    found.kernels = kernels
    yield found
    found.engine.close()


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


SIZES = {"small": (21,), "middle": (37, 1, 20), "large": (90, 37, 1)}
# Every size comes once after every other.
ORDER = ("large", "small", "middle", "small", "large", "middle", "large")


def test_every_order_of_sizes_plain_captured_and_replayed(served):
    """Report C17 (vllm#57136), Report C15 (sglang#15757), Report C16 (flash-attention#1228): small, large, small over
    stale memory; the answers are those of the model called by hand, and of one key always the same bits."""
    with kernels_everywhere():
        asked = {size: served.ids(*lengths) for size, lengths in SIZES.items()}
        first = {size: served.embed(sequences) for size, sequences in asked.items()}
        for size in ORDER:
            np.testing.assert_array_equal(served.embed(asked[size]), first[size], err_msg=size)
    assert served.graphs.metrics.captures == len(SIZES)
    assert served.graphs.metrics.hits == len(ORDER) - len(SIZES)
    for size, sequences in asked.items():
        assert cosine(first[size], served.by_reference(sequences)).min() >= 0.9999, size


def test_company_of_one_key_changes_no_bit(served):
    """Report C03 (tei#649): two clusters of answers, by who else was in the batch."""
    mine = served.ids(30, seed=1)[0]
    rows = []
    with kernels_everywhere():
        for place, lengths in enumerate([(20, 14), (33, 1), (1, 33), (17, 17)]):
            batch = served.ids(*lengths, seed=place)
            batch.insert(place % 3, mine)
            assert served.engine.key_for([len(ids) for ids in batch]) == served.engine.key_for([20, 30, 14])
            rows.append(served.embed(batch)[place % 3])
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


def test_twins_in_one_batch_have_equal_rows(served):
    """Report C123 (flashinfer#725): the second short sequence was all zeros."""
    twin = served.ids(5, seed=2)[0]
    with kernels_everywhere() as launched:
        found = served.embed([twin, *served.ids(40, 3, seed=3), twin, twin])
    for row in (3, 4):
        np.testing.assert_array_equal(found[row], found[0])
    assert found[0].any()
    assert launched == served.kernels, "or something else served"


def test_across_keys_answers_agree(served):
    """Report C08 (vllm#15393): texts of mixed lengths together and each alone; and their ranking."""
    texts = served.ids(50, 3, 17, 1, 40, seed=4)
    with kernels_everywhere():
        together = served.embed(texts)
        alone = np.concatenate([served.embed([ids]) for ids in texts])
    exact = served.by_reference(texts)
    assert cosine(together, alone).min() >= 0.9999
    assert cosine(together, exact).min() >= 0.999
    assert ((together @ together[0]).argsort() == (exact @ exact[0]).argsort()).all()
