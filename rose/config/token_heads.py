"""BGE-M3's heads over token rows: lexical weights and ColBERT vectors, each in a file of its own beside the backbone.

Knows which files there are; knows neither what is in them nor how they compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rose.config.architecture import ArchitectureConfig
from rose.config.sentence_transformers import PoolingConfig
from rose.config.tokenizer_files import TokenizerFiles

# Tokens that carry no lexical weight, whatever the head says of them: those BGE-M3's own code leaves out.
_UNWEIGHTED_ROLES = ("cls", "eos", "pad", "unk")
_SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeadConfig:
    """One head over token rows.

    Attributes:
        name: the output it gives.
        file: its weights, relative to the folder; "" where there are none.
        unavailable: why the output cannot be had, or None.
        unweighted_ids: sparse: ids whose weight is 0 (the tokenizer's cls, eos, pad and unk), ascending.
    """

    name: Literal["sparse", "colbert"]
    file: str = ""
    unavailable: str | None = None
    unweighted_ids: tuple[int, ...] = ()


def read_token_heads(
    root: Path, architecture: ArchitectureConfig, pooling: PoolingConfig | None, tokens: TokenizerFiles
) -> tuple[TokenHeadConfig, ...]:
    """Both heads of a BGE-M3 folder, each with the reason where it cannot be had; none for any other folder.

    A folder is BGE-M3's if it holds either file, or is named so and pools as it does.
    """
    files = {name: _find(root, tokens.folder, f"{name}_linear") for name in ("sparse", "colbert")}
    named = "bge-m3" in root.resolve().name.lower() and architecture.model_type == "xlm-roberta"
    if pooling is None or not (any(files.values()) or (named and pooling.modes == ("cls",))):
        return ()
    return _sparse(files["sparse"], tokens), TokenHeadConfig(
        name="colbert", file=files["colbert"], unavailable=_missing(files["colbert"], "colbert_linear")
    )


def _sparse(file: str, tokens: TokenizerFiles) -> TokenHeadConfig:
    ids = {role: tokens.role_id(role) for role in _UNWEIGHTED_ROLES}
    unknown = [role for role, found in ids.items() if found is None]
    reason = _missing(file, "sparse_linear")
    if reason is None and unknown:
        reason = f"the tokenizer's files do not say which ids carry no weight: {', '.join(unknown)}_token"
    known = tuple(sorted({found for found in ids.values() if found is not None}))
    return TokenHeadConfig(name="sparse", file=file, unavailable=reason, unweighted_ids=known)


def _find(root: Path, backbone: Path, stem: str) -> str:
    for folder in dict.fromkeys((root, backbone)):
        for suffix in _SUFFIXES:
            if (folder / f"{stem}{suffix}").exists():
                return str((folder / f"{stem}{suffix}").relative_to(root))
    return ""


def _missing(file: str, stem: str) -> str | None:
    return None if file else f"the checkpoint has no {stem}.pt"
