"""What is converted: a folder, or adapters in the order in which they were trained on top of a base folder.

Knows which folder answers which question; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.config.folder import ADAPTER_CONFIG, TRANSFORMER_FILES
from rose.config.json_file import JsonFile
from rose.config.sentence_transformers import SentenceModules, read_modules
from rose.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """
    Attributes:
        named: the folder the caller named.
        root: the folder whose sentence-transformers files count: `named`, unless it is an adapter without any.
        modules: what those files say.
        backbone: folder of config.json and the weights.
        tokenizer: folder of the tokenizer's files: the last adapter's own where it has them.
        adapters: merged in this order.
    """

    named: Path
    root: Path
    modules: SentenceModules
    backbone: Path
    tokenizer: Path
    adapters: tuple[Path, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders that are read, each once."""
        return tuple(dict.fromkeys((self.named, self.root, self.backbone, self.tokenizer, *self.adapters)))

    @property
    def config(self) -> JsonFile:
        return JsonFile.read(self.backbone / "config.json")

    @property
    def sentence_config(self) -> JsonFile:
        return JsonFile.read_if_there(self.root / "config_sentence_transformers.json")

    @property
    def transformer_config(self) -> JsonFile:
        """Where max_seq_length and do_lower_case are; the first file found counts."""
        places = [folder / name for folder in (self.root, self.backbone) for name in TRANSFORMER_FILES]
        return JsonFile.read_if_there(next((path for path in places if path.exists()), places[0]))


def named_base(adapter: Path) -> str:
    """The base that an adapter's own config names.

    Raises:
        CheckpointError: it names none.
    """
    config = JsonFile.read(adapter / ADAPTER_CONFIG)
    if "base_model_name_or_path" not in config:
        raise config.error("base_model_name_or_path is missing; name the base with --base")
    return config.text("base_model_name_or_path")


def find_source(named: Path, *, base: Path | None = None, adapters: Sequence[Path] = ()) -> Source:
    """
    Args:
        named: a checkpoint folder, or a folder with an adapter.
        base: of an adapter; None means the folder its config names.
        adapters: further ones, merged after `named` where that is one itself.

    Raises:
        CheckpointError: a folder that is not there, an adapter where a base belongs, or a base for no adapter.
    """
    stack = tuple(adapters)
    if not named.is_dir():
        raise CheckpointError(f"{named} is not a folder")
    root = named
    if (named / ADAPTER_CONFIG).exists():
        stack = (named, *stack)
        base = Path(named_base(named)) if base is None else base
        if not base.is_dir():
            raise CheckpointError(f"{named} is an adapter, and its base {base} is not a folder; name it with --base")
        root = named if (named / "modules.json").exists() else base
    elif base is not None:
        raise CheckpointError(f"{named} is no adapter (it has no {ADAPTER_CONFIG}), so that --base has no meaning")
    for adapter in stack:
        if not (adapter / ADAPTER_CONFIG).is_file():
            raise CheckpointError(f"{adapter} is no adapter: it has no {ADAPTER_CONFIG}")
    modules = read_modules(root)
    weights = named if base is None else base
    backbone = weights / (modules.subfolder if weights == root else read_modules(weights).subfolder)
    if (backbone / ADAPTER_CONFIG).exists():
        raise CheckpointError(
            f"{backbone} is an adapter itself; name the base of all with --base, then every --adapter"
        )
    own = [adapter for adapter in reversed(stack) if (adapter / "tokenizer.json").exists()]
    return Source(
        named=named,
        root=root,
        modules=modules,
        backbone=backbone,
        tokenizer=own[0] if own else backbone,
        adapters=stack,
    )
