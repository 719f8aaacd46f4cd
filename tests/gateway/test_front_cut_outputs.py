"""`dimensions` beside several outputs: one rule on both carriers, and the engine's own arithmetic."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from rose.errors import NonFinite
from rose.gateway.vectors import cut_vectors
from rose.proto import rose_pb2 as pb
from rose.proto import rose_pb2_grpc
from rose.proto.convert import tensor_from_proto
from rose.server.answers import renormalize
from tests.gateway.cards import m3_card, pplx_card
from tests.gateway.conftest import DIMENSION, live_front
from tests.gateway.expected import vector_of
from tests.gateway.test_front_grpc import channel_to
from tests.support import tiny_tokenizers

TEXTS = ["the river the sea the river", "salt"]
CUT = 24


@pytest.fixture(scope="module")
def m3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m3")
    tiny_tokenizers.save(tiny_tokenizers.unigram(), folder)
    with live_front(folder, m3_card(folder)) as live:
        yield live


def over_grpc(live, **fields):
    with channel_to(live) as channel:
        answer = rose_pb2_grpc.RoseStub(channel).Embed(pb.EmbedRequest(texts=pb.Texts(items=TEXTS), **fields))
    return {output.name: tensor_from_proto(output.values) for output in answer.outputs}


def refusal(live, **fields):
    with pytest.raises(grpc.RpcError) as refused:
        over_grpc(live, **fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return refused.value.details()


@pytest.mark.parametrize("others", [["sparse"], ["colbert"], ["sparse", "colbert"]])
def test_both_carriers_cut_the_dense_vector_and_leave_the_others_whole(m3, others):
    whole = over_grpc(m3, outputs=["dense", *others])
    found = over_grpc(m3, outputs=["dense", *others], dimensions=CUT)
    assert found["dense"].shape == (len(TEXTS), CUT)
    expected = whole["dense"][:, :CUT] / np.linalg.norm(whole["dense"][:, :CUT], axis=1, keepdims=True)
    assert np.abs(found["dense"] - expected).max() < 1e-6
    for name in whole.keys() - {"dense"}:
        assert np.array_equal(found[name], whole[name]), name
    body = {"input": TEXTS, "outputs": ["dense", *others], "dimensions": CUT}
    data = m3.client.post("/v1/embeddings", json=body).json()["data"]
    assert np.array_equal(np.array([item["embedding"] for item in data], dtype=np.float32), found["dense"])


def test_the_engine_cuts_where_there_is_nothing_else(m3):
    found = over_grpc(m3, outputs=["dense"], dimensions=CUT)
    assert m3.engines[0].seen[-1].dimensions == CUT
    assert found["dense"].shape == (len(TEXTS), CUT)


def test_dimensions_without_a_vector_to_cut_are_refused(m3):
    for names in (["sparse"], ["colbert", "sparse"]):
        assert f"only a float vector a text is cut, and {', '.join(names)} is none" in refusal(
            m3, outputs=names, dimensions=8
        )
    assert f"1..{DIMENSION} for dense" in refusal(m3, outputs=["dense", "sparse"], dimensions=DIMENSION + 1)


def test_quantised_rows_stay_whole_beside_a_cut_vector(text_folder):
    with live_front(text_folder, pplx_card(text_folder)) as live:
        found = over_grpc(live, outputs=["dense", "int8"], dimensions=CUT)
        assert (found["dense"].shape[1], found["int8"].shape[1]) == (CUT, DIMENSION)
        assert "only a float vector" in refusal(live, outputs=["int8"], dimensions=CUT)


def test_a_front_cuts_by_the_engines_rule():
    """The same numbers, and the same refusal of a vector without a direction: no zeros with a friendly status."""
    rows = np.stack([vector_of([i, i + 1], DIMENSION) for i in range(20)])
    for cut in (1, 7, DIMENSION):
        assert (
            np.abs(cut_vectors(rows, cut, "dense", normalized=True) - renormalize(rows[:, :cut], "dense")).max() < 1e-6
        )
    assert np.array_equal(cut_vectors(rows, 7, "dense", normalized=False), rows[:, :7])
    rows[3, :7] = 0
    told = []
    for work in (
        lambda: cut_vectors(rows, 7, "dense", normalized=True),
        lambda: renormalize(rows[:, :7], "dense"),
    ):
        with pytest.raises(NonFinite) as refused:
            work()
        told.append((refused.value.message, refused.value.index))
    assert told[0] == told[1]
    assert told[0][1] == 3
    with pytest.raises(NonFinite) as refused:
        cut_vectors(rows, 7, "dense", normalized=True, splits=(0, 2, 2, 6, 20))
    assert refused.value.index == 2


def test_a_row_with_nothing_to_show_stays_zero_as_in_the_engine():
    rows = np.array([[3, 4, 0], [0, 0, 0]], dtype=np.float32)
    found = cut_vectors(rows, 2, "dense", normalized=True)
    assert np.array_equal(found, renormalize(rows[:, :2].copy(), "dense", np.array([False, True])))
    assert np.allclose(found, [[0.6, 0.8], [0, 0]])
