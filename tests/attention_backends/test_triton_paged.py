"""ROSE's paged attention as a backend: what it hands to its kernels, on the CPU by their references, and with the
kernels themselves on a GPU, in graphs too."""

from __future__ import annotations

import pytest
import torch

from rose.attention_backends import AttentionSpec, KeepsPlans, KVCache, Paged, WarmsUp, can_capture, load_backend
from rose.attention_backends.base import captures_prompts
from rose.attention_backends.reference import TOLERANCE, row_error
from rose.attention_backends.triton_paged import TritonPaged
from rose.batch import Batch, HeadRotation, PackedAttentionPlan
from rose.errors import InternalError, StartupError
from rose.kernels.qk_norm_rope import rope_table
from tests.support import served_pages
from tests.support.served_pages import check, spec_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def serve(spec: AttentionSpec, lengths: list[int]) -> served_pages.Served:
    return served_pages.Served(spec, lengths, TritonPaged)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (2, 1, 128), (4, 1, 256), (3, 3, 64)])
def test_prompts_chunks_and_tokens_in_any_company(device, window, heads, kv_heads, head_dim):
    spec = spec_of(device, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window)
    served = serve(spec, [129, 17, 60, 16, 1])
    parts: dict[int, list[torch.Tensor]] = {i: [] for i in range(5)}
    for chunks in (
        [(0, 100), (1, 15), (3, 15)],
        [(1, 1), (3, 1), (0, 28), (2, 33)],
        [(1, 1), (2, 1), (0, 1)],
        [(4, 1), (2, 1)],
        [(2, 25)],
    ):
        for (i, _), out in zip(chunks, served.run(chunks), strict=True):
            parts[i].append(out)
    check(served, parts)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_with_dummies_up_to_a_bound(device):
    """What a graph's bucket adds: dummy sequences in page 0, and a bound that no sequence reaches."""
    served = serve(spec_of(device), [40, 9, 2])
    parts = {i: [out] for i, out in enumerate(served.run([(0, 30), (1, 2), (2, 1)]))}
    parts[2] += served.run([(2, 1)])
    for number in range(7):
        options = {"bound": 1024 if number % 2 else 4096, "dummies": number % 3, "key": None if number < 4 else number}
        for i, out in enumerate(served.run([(0, 1), (1, 1)], **options)):
            parts[i].append(out)
    check(served, parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [True, False])
def test_packed_is_the_rotation_and_then_the_attention(device, norm):
    """For tokens and chunks in one batch; the two ways must leave the same cache behind."""
    spec = spec_of(device)
    weight = torch.linspace(0.5, 2, 64).to(device, spec.dtype) if norm else None
    table = rope_table(200, 64, 1e4, device)
    outs = []
    for packed_way in (True, False):
        served = serve(spec, [90, 40, 20])
        found = []
        for chunks in ([(0, 50), (1, 20)], [(1, 1), (0, 30), (2, 15)], [(1, 1), (2, 1), (0, 1)]):
            batch, packed = served.batch(chunks)
            plan = served.backend.plan(batch)
            assert isinstance(plan, PackedAttentionPlan)
            rotation = HeadRotation(batch.positions, table, weight, weight, 1e-6)
            qkv = packed.clone().flatten(1)
            if packed_way:
                found.append(plan.run_packed(qkv, rotation, 1))
            else:
                from rose.kernels.qk_norm_rope import qk_norm_rope

                qk_norm_rope(qkv, batch.positions, table, weight, weight, 1e-6, 4, 2)
                found.append(plan.run(*qkv.view(len(qkv), 8, 64).split([4, 2, 2], dim=1), 1))
        outs.append((torch.cat(found), *served.cache.layer(1)))
    assert row_error(outs[0][0], outs[1][0].double()) <= TOLERANCE[spec.dtype]
    for mine, theirs in zip(outs[0][1:], outs[1][1:], strict=True):
        stored = ~theirs.isnan()
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert row_error(mine[stored][None], theirs[stored][None].double()) <= TOLERANCE[spec.dtype]


def test_every_batch_may_be_captured():
    served = serve(spec_of(), [40, 20])
    for chunks in ([(0, 10), (1, 10)], [(0, 1), (1, 5)], [(0, 1), (1, 1)]):
        assert can_capture(served.backend.plan(served.batch(chunks)[0]))
    assert captures_prompts(served.backend)


def test_scratch_belongs_to_a_key_and_comes_back():
    served = serve(spec_of(), [300, 20])
    served.run([(0, 200), (1, 3)])
    backend = served.backend
    assert isinstance(backend, KeepsPlans)
    assert backend.workspace().used_bytes == 0
    for _ in range(2):
        served.run([(0, 1), (1, 1)], bound=4096, key="large")
    used = backend.workspace().used_bytes
    assert used >= 2 * 4 * 64 * 4 * 2
    served.run([(1, 1)], bound=32, key="one share")
    assert backend.workspace().used_bytes == used
    assert backend.workspace().keys == 2
    with pytest.raises(InternalError, match="was planned for smaller steps"):
        served.run([(0, 1), (1, 1)], bound=4096, key="one share")
    for key in ("large", "one share", "never planned"):
        backend.release(key)
    assert (backend.workspace().used_bytes, backend.workspace().keys) == (0, 0)


def test_reasons_and_refusals():
    assert "needs a CUDA device" in TritonPaged(spec_of()).supports(spec_of(dtype=torch.float32))
    for changes, reason in (
        ({"layout": "ragged"}, "over pages, not over ragged"),
        ({"causal": False}, "causally only"),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"head_dim": 96}, "head dims 16, 32, 64, 128, 256, not 96"),
        ({"num_heads": 5}, "cannot share 2 key/value heads evenly"),
    ):
        assert reason in TritonPaged(spec_of()).supports(spec_of("cuda", **changes))
    backend = TritonPaged(spec_of())
    assert isinstance(backend, Paged)
    assert isinstance(backend, WarmsUp)
    with pytest.raises(InternalError, match="needs a cache"):
        backend.plan(Batch.pack([[1]]))
    with pytest.raises(StartupError, match="has no cache"):
        backend.warm_up(4)
    with pytest.raises(StartupError, match="this one holds"):
        backend.bind(KVCache((0,), 2, 16, 2, 64, torch.float32, "cpu"))
    served = serve(spec_of(), [40, 20])
    batch, _ = served.batch([(0, 10), (1, 1)])
    batch.paged.decodes = 1
    with pytest.raises(InternalError, match="should have one token each"):
        served.backend.plan(batch)


def test_warm_up_reaches_every_kernel_of_its_sizes(monkeypatch):
    """On the CPU the references run; what is checked is that dummies in page 0 get through all of them."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    served = serve(spec_of(), [1])
    for layer in served.layers:
        for part in served.cache.layer(layer):
            part.zero_()
    served.backend.warm_up(8)
    for layer in served.layers:
        for part in served.cache.layer(layer):
            assert not part[1:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("packed_way", [True, False])
def test_a_captured_step_replays_for_other_lengths(packed_way):
    """One graph of a bucket of four, its buffers overwritten from step to step, against the plain run of each step."""
    spec = spec_of("cuda", num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    served, plain = (serve(spec, [2060, 100, 17, 40]) for _ in range(2))
    start = [(0, 2040), (1, 5), (2, 2), (3, 20)]
    served.run(start)
    plain.run(start)
    table, weight = rope_table(4096, 128, 1e6, "cuda"), torch.ones(128, dtype=spec.dtype, device="cuda")

    def attend(plan, batch, packed):
        if packed_way:
            rotation = HeadRotation(batch.positions, table, weight, weight, 1e-6)
            return plan.run_packed(packed.clone().flatten(1), rotation, 1)
        return plan.run(*packed.split([16, 8, 8], dim=1), 1)

    steps = [[(0, 1), (1, 1), (2, 1), (3, 1)], [(0, 1), (1, 1), (2, 1)], [(1, 1)], [(3, 1), (0, 1)]]
    batch, packed = served.batch(steps[0], bound=4096, key="k")
    plan = served.backend.plan(batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(plan, batch, packed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(plan, batch, packed)
    for number, chunks in enumerate(steps):
        other, expected_packed = plain.batch(chunks, bound=4096, key="k", dummies=4 - len(chunks))
        expected = attend(plain.backend.plan(other), other, expected_packed)
        if number:
            fresh, fresh_packed = served.batch(chunks, bound=4096, key="k", dummies=4 - len(chunks))
            served.backend.plan(fresh)
            packed.copy_(fresh_packed)
            batch.positions.copy_(fresh.positions)
            for name in ("page_table", "kv_lengths", "slots"):
                getattr(batch.paged, name).copy_(getattr(fresh.paged, name))
        served.backend._arena.poison()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out[: len(chunks)], expected[: len(chunks)])


@pytest.mark.gpu
def test_it_loads_by_name_and_warms_up():
    spec = spec_of("cuda")
    backend = load_backend("triton_paged", spec)
    assert isinstance(backend, TritonPaged)
    backend.bind(KVCache((0,), 4, 16, 2, 64, spec.dtype, spec.device))
    backend.warm_up(64)
