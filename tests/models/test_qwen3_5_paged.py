"""Qwen3.5 batch by batch: prompts in any chunks, tokens one at a time, sequences in mixed company, all over pages and
rows of state that hold NaN where nobody wrote."""

from __future__ import annotations

import pytest
import torch
import transformers

from rose.config import read_model_folder
from rose.convert import load_generative
from rose.models.causal_lm import CausalLM
from tests.support.paged_session import PagedSession
from tests.support.running import logits_of, random_sequences
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

CHUNKINGS = {
    "whole": [140],
    "by_the_token": [1] * 140,
    "uneven": [3, 64, 1, 1, 65, 6],
    "chunks": [64, 64, 12],
    "one_then_rest": [1, 139],
    "rest_then_one": [139, 1],
    "below_the_reach": [2, 2, 1, 135],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> CausalLM:
    path = tiny_qwen3_5(tmp_path_factory.mktemp("models") / "m")
    return load_generative(read_model_folder(path))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", CHUNKINGS.values(), ids=CHUNKINGS)
def test_any_chunking_is_the_whole(model, cuts):
    """Every row of every chunk is that of one full forward, and so are ten tokens after it."""
    ids = random_sequences([150], 400)[0]
    expected = logits_of(model, [ids], every_row=True)
    session = PagedSession(model)
    done = 0
    for cut in [*cuts, *[1] * 10]:
        close(session.every_row([(5, ids[done : done + cut])])[0], expected[done : done + cut])
        done += cut
    assert done == 150


def test_greedy_text_over_pages_is_the_references(tmp_path):
    """Four prompts in uneven chunks and then together, a token at a time: each text is transformers' own."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = tiny_qwen3_5(tmp_path / "m", "multimodal", tied=False)
    ours = load_generative(read_model_folder(path))
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = random_sequences([70, 1, 5, 64], 400, seed=3)
    settings = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
    expected = [
        theirs.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **settings)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    session = PagedSession(ours)
    session.run([(0, prompts[0][:33]), (3, prompts[3][:2])])
    # A prompt of one token stands among the decoding ones, and starts there.
    order = [1, 0, 2, 3]
    logits = session.run([(1, prompts[1]), (0, prompts[0][33:]), (2, prompts[2]), (3, prompts[3][2:])])
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(30):
        for sequence, token in zip(order, logits.argmax(-1).tolist(), strict=True):
            texts[sequence].append(token)
        order = order[1:] + order[:1]
        logits = session.run([(sequence, [texts[sequence][-1]]) for sequence in order])
    assert texts == expected
    assert min(len(set(text)) for text in texts) > 10


def test_mixed_batches(model):
    """Steps beside chunks that start, go on and end, in every order; each row is its sequence's own."""
    sequences = random_sequences([90, 30, 75, 8, 1, 66], 400, seed=7)
    expected = [logits_of(model, [ids], every_row=True) for ids in sequences]
    session = PagedSession(model)
    done = [0] * len(sequences)
    # (sequence, tokens) of each batch; those of one token first.
    plan = [
        [(4, 1), (0, 40)],
        [(1, 29), (2, 2), (0, 3)],
        [(1, 1), (2, 70), (3, 7), (5, 64)],
        [(2, 1), (3, 1), (0, 46)],
        [(5, 1), (2, 1), (0, 1)],
        [(5, 1), (2, 1)],
    ]
    for chunks in plan:
        found = session.every_row([(s, sequences[s][done[s] : done[s] + n]) for s, n in chunks])
        for (s, n), rows in zip(chunks, found, strict=True):
            close(rows, expected[s][done[s] : done[s] + n])
            done[s] += n
    assert done == [len(ids) for ids in sequences]


def test_alone_and_in_company_leave_the_same_state(model):
    """The row of a sequence after a mixed batch is what it is after the sequence's own."""
    long, short, other = random_sequences([80, 5, 33], 400)
    alone, mixed = PagedSession(model), PagedSession(model)
    for session in (alone, mixed):
        session.run([(1, long[:20])])
        session.run([(2, short)])
    mixed.run([(2, [9]), (0, other), (1, long[20:])])
    alone.run([(1, long[20:])])
    alone.run([(2, [9])])
    for layer in model.recurrent.layers:
        for sequence in (1, 2):
            rows = [s.rows[sequence].item() for s in (alone, mixed)]
            for pool in ("conv", "recurrent"):
                a, b = (getattr(s.states, pool)(layer)[row] for s, row in zip((alone, mixed), rows, strict=True))
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_row_that_another_sequence_had(model):
    """A sequence that starts takes nothing from what its row holds, in a chunk or in a step."""
    first, second = random_sequences([70, 40], 400)
    session = PagedSession(model)
    session.run([(2, first)])
    session.forget(2)
    close(session.run([(2, second)]), logits_of(model, [second]))
    session.forget(2)
    close(session.run([(2, second[:1])]), logits_of(model, [second[:1]]))
    close(session.run([(2, second[1:2])]), logits_of(model, [second[:2]]))


def test_rows_of_others_are_left_alone(model):
    session = PagedSession(model)
    session.run([(0, [5, 6, 7]), (3, [8, 9])])
    session.run([(0, [5]), (3, [6])])
    others = [row for row in range(9) if row not in session.rows[[0, 3]].tolist()]
    for layer in model.recurrent.layers:
        assert session.states.conv(layer)[others].isnan().all()
        assert session.states.recurrent(layer)[others].isnan().all()


def test_a_batch_without_rows_of_state_is_refused(model):
    session = PagedSession(model)
    batch = session.batch([(0, [5, 6])])
    batch.states = None
    with pytest.raises(RuntimeError, match="pages and no recurrent states"):
        model(batch, batch.cu_seqlens[1:] - 1)
