"""The worked example's steps on a tiny random model, its arithmetic on known numbers, and its page."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from examples.lora_embedder import golden, measure, report, train
from examples.lora_embedder.model import difference_from_rose, embed, load_bidirectional
from examples.lora_embedder.texts import MEASURED, PIVOT, TRAINED, UNSEEN, Text, training_texts, write
from rose import cli
from rose.bench.systems import RoseInProcess
from tests.support import corpora
from tests.support.tiny_checkpoints import read_json
from tests.support.tiny_language_models import tiny_lm

ROOT = Path(__file__).parent.parent
WORDS = {PIVOT: "the harbour ferry", "aaa": "le port bac", "bbb": "der hafen kahn"}
CONVERT = ("--to", "embedder", "--bidirectional", "--pooling", "mean")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def made_texts(groups: int) -> list[Text]:
    """Articles that are told apart by numbers, in three languages."""
    return [
        Text(group, language, f"{words} {group} {group * 37} {words}")
        for group in range(1, groups + 1)
        for language, words in WORDS.items()
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_lm(tmp_path_factory.mktemp("base") / "lm", tied=True)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_from_language_model_to_served_embedder(base, tmp_path, capsys):
    """Convert, train, merge, verify against PEFT, measure: the commands of the example, on a model of 0.1 M weights."""
    untrained, adapter, embedder, answers = (tmp_path / name for name in ("untrained", "adapter", "out", "peft.npz"))
    data, texts = tmp_path / "train.jsonl", tmp_path / "texts.txt"
    trained_on = made_texts(20)
    write(data, trained_on)
    texts.write_text("\n".join(text.text for text in trained_on[:12]) + "\n")
    assert cli.main(["convert", str(base), *CONVERT, "-o", str(untrained)]) == 0
    settings = {"steps": 12, "texts": 8, "rank": 4, "rate": 0.01}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    train.main([str(base), "--served", str(untrained), "--data", str(data), "--out", str(adapter), *options])
    log = read_json(adapter / "training.json")
    assert log["difference"] <= 1e-4
    assert len(log["losses"]) == 12
    assert sum(log["losses"][-3:]) < 0.8 * sum(log["losses"][:3])

    assert cli.main(["convert", str(adapter), "--base", str(base), *CONVERT, "-o", str(embedder)]) == 0
    golden.main([str(base), "--adapter", str(adapter), "--data", str(texts), "--out", str(answers)])
    capsys.readouterr()
    assert cli.main(["verify", str(embedder), str(answers), "--data", str(texts), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measures"]["min_cosine"] > 0.99999
    assert cli.main(["verify", str(untrained), str(answers), "--data", str(texts), "--json"]) == 1

    found = {name: recalls_of(folder) for name, folder in (("untrained", untrained), ("trained", embedder))}
    assert found["trained"] > found["untrained"]


def recalls_of(folder: Path) -> float:
    """The example's measure, without a server's processes between."""
    system = RoseInProcess(folder, 1)
    try:
        found = measure.measure(system, made_texts(30))
    finally:
        system.close()
    assert set(found) == {"aaa", "bbb"}
    return measure.means(found, ["aaa", "bbb"])["articles_trained_on"]


def test_another_attention_than_the_served_one_is_not_trained(base, tmp_path):
    causal = tmp_path / "causal"
    cli.main(["convert", str(base), "--to", "embedder", "--causal", "--pooling", "mean", "-o", str(causal)])
    data = tmp_path / "train.jsonl"
    write(data, made_texts(9))
    with pytest.raises(SystemExit, match="another model than is served"):
        train.main([str(base), "--served", str(causal), "--data", str(data), "--out", str(tmp_path / "adapter")])
    assert not (tmp_path / "adapter").exists()


def test_each_text_is_embedded_alike_in_any_chunk(base, tmp_path):
    """Padded or alone, in whatever order: the vectors come back in the order of the texts."""
    model = load_bidirectional(base)
    sequences = [list(range(5, 5 + n)) for n in (9, 2, 30, 2, 17)]
    with torch.inference_mode():
        alone = torch.cat([embed(model, [own]) for own in sequences])
        torch.testing.assert_close(embed(model, sequences), alone, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(embed(model, sequences, chunk_tokens=40), alone, rtol=1e-5, atol=1e-6)
        hidden = model(torch.tensor(sequences[:1])).last_hidden_state[0].mean(0)
    torch.testing.assert_close(alone[0], hidden / hidden.norm(), rtol=1e-5, atol=1e-6)
    served = tmp_path / "served"
    cli.main(["convert", str(base), *CONVERT, "-o", str(served)])
    assert difference_from_rose(model, served, sequences) <= 1e-5


def test_info_nce_by_hand():
    draw = torch.Generator().manual_seed(1)
    languages = [torch.nn.functional.normalize(torch.randn(4, 6, generator=draw), dim=1) for _ in range(3)]
    expected = []
    for a, b in ((0, 1), (0, 2), (1, 2)):
        for left, right in ((languages[a], languages[b]), (languages[b], languages[a])):
            for i in range(4):
                weights = [math.exp(float(left[i] @ row) / 0.1) for row in right]
                expected.append(-math.log(weights[i] / sum(weights)))
    assert train.info_nce(languages, 0.1).item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_batches_never_hold_a_passage_twice():
    """Tokens name their group, language and place, so that what a step holds can be read off it."""
    texts = made_texts(20)
    names = sorted(WORDS)
    ids = [[(text.group * 3 + names.index(text.language)) * 100 + n for n in range(40)] for text in texts]
    recipe = train.Recipe(steps=60, texts=12, languages=3, first_languages=2, shortest=10, longest=14)
    sizes = []
    for batch in train.batches(texts, ids, recipe):
        assert len(batch) == 3
        assert all(own[0] // 100 % 3 == names.index(PIVOT) for own in batch[0])
        for language in batch:
            assert len({own[0] // 100 % 3 for own in language}) == 1
            assert [own[0] // 300 for own in language] == [own[0] // 300 for own in batch[0]]
            assert len({own[0] for own in language}) == 12
            tokens = [token for own in language for token in own]
            assert len(set(tokens)) == len(tokens)
        sizes.append(len(batch[0][0]))
    assert set(sizes[:3]) == {40}
    assert 0.3 < sum(size == 40 for size in sizes[24:]) / 36 < 0.6
    first, again = (next(train.batches(texts, ids, recipe)) for _ in range(2))
    assert first == again


def test_a_missing_translation_is_left_out():
    texts = [text for text in made_texts(6) if (text.group, text.language) != (4, "aaa")]
    ids = [[text.group] * 5 for text in texts]
    recipe = train.Recipe(steps=10, texts=6, languages=3, first_languages=2)
    for batch in train.batches(texts, ids, recipe):
        assert {own[0] for own in batch[0]} == {1, 2, 3, 5, 6}
    few = [text for text in texts if text.group in {1, 4}]
    with pytest.raises(ValueError, match="two groups in all of them are needed, not 1"):
        next(train.batches(few, [[1]] * len(few), recipe))


def test_passages_are_the_same_share_of_each_language():
    row = [list(range(60)), list(range(100, 220)), list(range(300, 320))]
    found = train.passages(row, 20, random.Random(1))
    assert len(found) == 3
    for i, own in enumerate(row):
        assert [token for passage in found for token in passage[i]] == own
    for english, longer, shorter in found:
        assert 8 <= len(english) <= 32
        assert len(longer) == pytest.approx(2 * len(english), abs=1)
        assert len(shorter) == pytest.approx(len(english) / 3, abs=1)
    assert train.passages(row, 1000, random.Random(1)) == [row]
    assert all(all(passage) for passage in train.passages([list(range(60)), [1, 2, 3]], 5, random.Random(1)))


def test_languages_join_one_after_another():
    recipe = train.Recipe(first_languages=8)
    assert [train.joined(40, done, recipe) for done in (0, 0.15, 0.4, 0.65, 1)] == [8, 8, 24, 40, 40]
    assert [train.joined(2, done, recipe) for done in (0, 1)] == [8, 2]


def test_recall_at_1():
    eye = np.eye(4, dtype=np.float32)
    assert measure.recall_at_1(eye, eye, range(4)) == 1
    swapped = eye[[1, 0, 2, 3]]
    assert measure.recall_at_1(eye, swapped, range(4)) == 0.5
    assert measure.recall_at_1(eye, swapped, (2, 3)) == 1
    assert measure.recall_at_1(eye, swapped, (0, 2)) == 0.5


def test_recalls_of_both_directions():
    """Article 0 is trained on; the other language's articles 1 and 2 both lie where the English article 1 does."""
    english = np.eye(4, dtype=np.float32)
    other = english.copy()
    other[2] = english[1]
    found = measure.recalls(english, other, 1)
    # From English: 1 -> 1 (the first of two equal ones), 2 -> none is near, so the first row; 3 -> 3.
    assert found["from_english"] == pytest.approx(2 / 3, abs=1e-4)
    # Back: 1 -> 1, 2 -> 1, 3 -> 3.
    assert found["to_english"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["r_at_1"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["articles_trained_on"] == 1
    assert measure.means({"x": found, "y": dict.fromkeys(found, 0.0)}, ["x", "y"])["articles_trained_on"] == 0.5


def test_measured_over_http(base, tmp_path):
    """`rose serve` in processes of its own gives what the same folder gives in process."""
    served, data, out = tmp_path / "served", tmp_path / "eval.jsonl", tmp_path / "results.json"
    cli.main(["convert", str(base), *CONVERT, "-o", str(served)])
    languages = (PIVOT, *MEASURED, *UNSEEN)
    texts = [Text(group, name, f"{name} {group} {group * 37}") for group in range(1, 31) for name in languages]
    write(data, texts)
    measure.main([f"tiny={served}", "--data", str(data), "--out", str(out)])
    system = RoseInProcess(served, 1)
    try:
        expected = measure.measure(system, texts)
    finally:
        system.close()
    results = read_json(out)
    assert results["systems"]["tiny"]["by_language"] == expected
    assert results["systems"]["tiny"]["means"]["unseen"] == measure.means(expected, UNSEEN)
    assert expected["fra"]["articles_trained_on"] > 0.1


def test_what_is_measured_was_not_trained_on():
    try:
        texts = training_texts()
    except corpora.CannotBeHadError as error:
        pytest.skip(str(error))
    assert {text.group for text in texts} == set(range(1, 21))
    assert {text.language for text in texts} == {PIVOT, *TRAINED}
    assert len(set(TRAINED)) == len(TRAINED)
    # "ron_2006" is Romanian, and so are "ron_1953" and "ron_1993".
    assert not {name[:3] for name in UNSEEN} & {name[:3] for name in (PIVOT, *TRAINED)}
    whole = {(text.language, text.group): text.text for text in texts}
    assert len(whole) == len(texts) == 20 * (1 + len(TRAINED))
    assert whole["fra", 1] == corpora.udhr_articles("fra")[0]
    later = {text for language in (PIVOT, *TRAINED) for text in corpora.udhr_articles(language)[20:]}
    assert not later & {text.text for text in texts}


def test_the_page_is_made_of_the_results():
    results = read_json(report.RESULTS)
    text = report.PAGE.read_text(encoding="utf-8")
    assert report.page(text, results) == text
    assert f"{results['systems']['trained']['means']['unseen']['r_at_1']:.2f}" in text


def test_the_page_has_the_commands_that_are_run():
    script = ROOT / "scripts" / "example_lora_embedder.py"
    done = subprocess.run([sys.executable, script, "--dry-run"], capture_output=True, text=True, check=True, cwd="/")
    page = " ".join(report.PAGE.read_text(encoding="utf-8").replace("\\\n", " ").split())
    commands = done.stdout.splitlines()
    assert len(commands) >= 9
    for command in commands:
        assert command.removeprefix("$ ") in page
