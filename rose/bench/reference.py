"""What a load's answers are held against before any clock starts: transformers in fp32 on the same folder.

Knows how the two families are pooled; knows neither ROSE's layers nor clocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rose.bench.plain_transformers import plain_transformers
from rose.config import read_model_folder

Vectors = npt.NDArray[np.float32]


class Reference:
    """One folder in transformers, fp32, one sequence at a time, tf32 off."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        transformers = plain_transformers()

        self._device = device
        read = read_model_folder(folder)
        if read.pooling is None or len(read.pooling.modes) != 1:
            raise ValueError(f"{folder} has no single pooling mode")
        self._pooling = read.pooling.modes[0]
        self._causal = read.architecture.causal
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        qwen = "qwen3" in config["model_type"]
        cls: Any = transformers.Qwen3Model if qwen else transformers.AutoModel
        options: dict[str, Any] = (
            {"config": transformers.Qwen3Config(**{**config, "model_type": "qwen3"})} if qwen else {}
        )
        self._model = cls.from_pretrained(folder, dtype=torch.float32, **options).to(device).eval()
        self._qwen = qwen

    @torch.inference_mode()
    def embed(self, sequences: Sequence[npt.NDArray[np.int32]]) -> Vectors:
        """[len(sequences), hidden], not normalised."""
        matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        try:
            return np.stack([self._one(ids) for ids in sequences])
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv

    def _one(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        tokens = torch.from_numpy(np.array(ids, dtype=np.int64))[None].to(self._device)
        options = {}
        if self._qwen and not self._causal:
            # transformers' Qwen3 is causal; a 4-D mask of zeros lets every token see every other.
            n = tokens.shape[1]
            options["attention_mask"] = torch.zeros(1, 1, n, n, device=self._device)
        hidden = self._model(input_ids=tokens, **options).last_hidden_state[0]
        pooled = {"cls": lambda: hidden[0], "mean": lambda: hidden.mean(0), "last": lambda: hidden[-1]}[self._pooling]()
        vector: npt.NDArray[np.float32] = pooled.float().cpu().numpy()
        return vector


def cosines(a: Vectors, b: Vectors) -> npt.NDArray[np.float64]:
    """Row by row, in fp64: [rows]."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    found: npt.NDArray[np.float64] = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return found
