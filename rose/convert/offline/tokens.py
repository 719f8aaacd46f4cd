"""Which end token a folder's tokenizer really adds: read from tokenizer.json, which is what runs.

tokenizer_config.json may promise one (`add_eos_token`) that tokenizer.json does not add; then the last token of the
text would be pooled. Knows tokenizer.json's post-processors; turns no text into ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rose.config.json_file import JsonFile
from rose.convert.offline.choices import Choice


def end_token(folder: Path, pools_last: bool) -> Choice:
    """What stands after every text, as a choice; what is doubtful about it is part of the value."""
    file = JsonFile.read_if_there(folder / "tokenizer.json")
    token = _last_added(file.data.get("post_processor"))
    if token is not None:
        return Choice("end token", repr(token), "tokenizer.json: post_processor")
    promised = JsonFile.read_if_there(folder / "tokenizer_config.json").flag("add_eos_token", False)
    doubt = " (tokenizer_config.json: add_eos_token promises one, and it is not added)" if promised else ""
    pooled = "; the text's own last token is pooled" if pools_last else ""
    return Choice("end token", f"none{pooled}{doubt}", "tokenizer.json: post_processor")


def _last_added(processor: Any) -> str | None:
    """The special token that a post-processor puts at the end of a single text."""
    if not isinstance(processor, dict):
        return None
    kind = processor.get("type")
    if kind == "Sequence":
        found = [_last_added(part) for part in processor.get("processors") or ()]
        return next((token for token in reversed(found) if token is not None), None)
    if kind == "TemplateProcessing":
        last = (processor.get("single") or [{}])[-1].get("SpecialToken")
        return None if last is None else str(last["id"])
    if kind in ("BertProcessing", "RobertaProcessing"):
        return str(processor["sep"][0])
    return None
