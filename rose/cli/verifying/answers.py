"""What a folder answers to a list of texts, run here or stored earlier (a golden file).

An embedder's answers are vectors; a reranker's are the scores of some texts, as queries, with others as documents; a
language model's are what each token of the texts cost it. The model runs as the engine loads it, with plain torch
attention, so that no kernel of ours is trusted by both sides.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rose.cli.verifying.tokens import tokens_of
from rose.config import ModelFolder
from rose.errors import CheckpointError, InvalidInput

if TYPE_CHECKING:
    import torch

    from rose.models.base import ServedModel

# Called with the texts (or pairs) that are done, and with all of them.
Progress = Callable[[int, int], None]
_TOKENS = 4096  # of one batch
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """
    Attributes:
        kind: "vectors", "scores" or "tokens".
        texts: sha256 of the texts, in order.
        dtypes: that the weights are stored in, and that the model ran in.
        ids: token ids of each text, or of each pair.
        values: [texts, dimension]; [queries, documents] of shown scores (of the first label); or [tokens, 2] in nats,
            and the likeliest id.
    """

    name: str
    kind: str
    texts: str
    stored: str
    ran: str
    ids: list[list[int]]
    values: NDArray[np.float64]


def digest(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts), ensure_ascii=False).encode()).hexdigest()


def kind_of(folder: ModelFolder) -> str:
    """What the folder's answers are, as in `Answers`, before any is made.

    Raises:
        CheckpointError: of a kind that is not compared.
    """
    if folder.contextual:
        raise CheckpointError(f"{folder.path} embeds chunks of documents, which is not compared here")
    if folder.generation is not None:
        return "tokens"
    return "vectors" if folder.reranker is None else "scores"


def answers_of(
    folder: ModelFolder,
    texts: Sequence[str],
    *,
    device: str = "cpu",
    dtype: str | None = None,
    prompt: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Answers:
    """Run a folder.

    Args:
        prompt: name of the one that an embedder's texts are put behind; None: the default one.
        progress: told before the first batch, and after each.

    Raises:
        CheckpointError: a folder that cannot be loaded, has no tokenizer.json, or is of a kind that is not compared.
    """
    import torch

    from rose.convert import load_model

    kind = kind_of(folder)
    if kind == "tokens":
        return _language(folder, texts, device, dtype, progress)
    model = load_model(folder, device, None if dtype is None else getattr(torch, dtype))
    ran = next(iter(model.backbone.parameters())).dtype  # type: ignore[attr-defined]
    tokens = tokens_of(folder, texts, prompt)
    values = np.concatenate(list(_run(model, tokens.ids, tokens.types, torch.device(device), ran, progress)))
    if kind == "scores":
        values = values[:, 0]
        if folder.reranker is not None and folder.reranker.activation == "sigmoid":
            values = 1 / (1 + np.exp(-values))
    return Answers(
        name=str(folder.path),
        kind=kind,
        texts=digest(texts),
        stored=_stored(folder),
        ran=str(ran).removeprefix("torch."),
        ids=tokens.ids,
        values=values.reshape(tokens.shape),
    )


def _language(folder: ModelFolder, texts: Sequence[str], device: str, dtype: str | None, progress: Progress) -> Answers:
    """What each token of the texts costs the language model, given those before it."""
    import torch

    from rose.convert.calibrate import open_subject

    ids = tokens_of(folder, texts).ids
    own = torch.float32 if dtype is None and device == "cpu" else getattr(torch, dtype or "bfloat16")
    subject = open_subject(folder, ids, device=device, dtype=own)
    rows = [subject.answers(range(start, stop)) for start, stop in _batches(ids, progress)]
    return Answers(
        name=str(folder.path),
        kind="tokens",
        texts=digest(texts),
        stored=_stored(folder),
        ran=str(own).removeprefix("torch."),
        ids=ids,
        values=np.concatenate(rows),
    )


def _stored(folder: ModelFolder) -> str:
    from rose.convert.quantized import read_quantization

    return folder.architecture.dtype if read_quantization(folder.backbone_path) is None else "float8_e4m3fn"


def save_golden(answers: Answers, path: Path) -> None:
    """An .npz that `load_golden` reads, without pickled objects in it: whole or not at all.

    Raises:
        InvalidInput: it cannot be written.
    """
    about = {name: getattr(answers, name) for name in ("name", "kind", "texts", "stored", "ran")} | {"format": _VERSION}
    flat = np.array([i for own in answers.ids for i in own], dtype=np.int64)
    lengths = np.array([len(own) for own in answers.ids], dtype=np.int64)
    made = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with made.open("wb") as file:
            np.savez(file, about=np.array(json.dumps(about)), ids=flat, lengths=lengths, values=answers.values)
        made.replace(path)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        made.unlink(missing_ok=True)


def load_golden(path: Path) -> Answers:
    """
    Raises:
        InvalidInput: no golden file, or a damaged one.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about.pop("format") != _VERSION:
                raise InvalidInput(f"{path} is a golden file of another format")
            ids = [own.tolist() for own in np.split(file["ids"], np.cumsum(file["lengths"])[:-1])]
            return Answers(**about, ids=ids, values=file["values"])
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{path} is no golden file: {error}") from error


def _run(
    model: ServedModel,
    ids: list[list[int]],
    types: list[list[int]] | None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> Iterator[NDArray[np.float64]]:
    """The default output of each batch, in the order of the texts."""
    import torch

    from rose.attention_backends import load_backend
    from rose.batch import Batch

    backend = load_backend("torch_sdpa", model.attention_spec(device, dtype))
    for start, stop in _batches(ids, progress):
        batch = Batch.pack(ids[start:stop], device)
        if types is not None:
            flat = [i for own in types[start:stop] for i in own]
            batch.type_ids = torch.tensor(flat, dtype=torch.int32, device=device)
        batch.attention = backend.plan(batch)
        yield model(batch, [model.default_output])[model.default_output].double().cpu().numpy()


def _batches(ids: Sequence[Sequence[int]], progress: Progress) -> Iterator[tuple[int, int]]:
    """Where each batch begins and ends."""
    start, tokens = 0, 0
    progress(0, len(ids))
    for at, own in enumerate(ids):
        if at > start and tokens + len(own) > _TOKENS:
            yield start, at
            progress(at, len(ids))
            start, tokens = at, 0
        tokens += len(own)
    yield start, len(ids)
    progress(len(ids), len(ids))
