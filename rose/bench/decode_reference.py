"""What generated tokens are held against before any clock starts: transformers in fp32 on the same folder.

Each continuation is fed to the reference whole, so one wrong token costs one place and not all that follow. Where the
reference's best token leads clearly, the engine must have drawn it. Knows logits; knows neither engines nor clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rose.bench.carriers import Ids
from rose.bench.plain_transformers import plain_transformers
from rose.config import ModelFolder

# The best token leads clearly when it is ahead of the next by so many times what half precision moves a logit.
MARGIN = 4.0
_CALIBRATION, _SEED = 64, 5


@dataclass(frozen=True, slots=True)
class Agreement:
    """
    Attributes:
        clear: share of the places at which the reference leads clearly where the tokens are the same.
        places: how many those are. all: share of all places.
    """

    clear: float
    places: int
    all: float


class DecodeReference:
    """One folder in transformers, fp32, one sequence at a time, tf32 off.

    Attributes:
        noise: how far bf16 moves the reference's own logits, as a share of their spread.
    """

    def __init__(self, read: ModelFolder, device: torch.device) -> None:
        transformers = plain_transformers()

        folder: Path = read.backbone_path
        self._device = device
        limit = read.architecture.vocab_size if read.generation is None else read.generation.vocab_limit
        self._limit = limit
        cls: Any = transformers.AutoModelForCausalLM
        self._model = cls.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        ids = torch.randint(5, limit, (1, _CALIBRATION), generator=torch.Generator().manual_seed(_SEED)).to(device)
        with torch.inference_mode(), _exact():
            half = self._model(input_ids=ids, use_cache=False).logits.float()
            self._model.float()  # made for bf16 or read from it: nothing is lost that the engine has
            full = self._model(input_ids=ids, use_cache=False).logits
        self.noise = float(((half - full).std(-1) / full.std(-1)).mean())

    @torch.inference_mode()
    def agreement(self, prompts: Sequence[Ids], continued: Sequence[Sequence[int]]) -> Agreement:
        """Of all tokens of all continuations."""
        with _exact():
            found = [self._one(prompt, new) for prompt, new in zip(prompts, continued, strict=True)]
        same = np.concatenate([one[0] for one in found])
        clear = np.concatenate([one[1] for one in found])
        return Agreement(float(same[clear].mean()) if clear.any() else 0.0, int(clear.sum()), float(same.mean()))

    def _one(self, prompt: Ids, new: Sequence[int]) -> tuple[Any, Any]:
        """(whether each token is the reference's best, whether the reference has a clear best there)."""
        drawn = torch.tensor(new, device=self._device)
        ids = torch.cat([torch.from_numpy(np.array(prompt, np.int64)).to(self._device), drawn[:-1]])[None]
        logits = self._model(input_ids=ids, logits_to_keep=len(new), use_cache=False).logits[0, :, : self._limit]
        best = logits.topk(2, dim=-1)
        clear = best.values[:, 0] - best.values[:, 1] > MARGIN * self.noise * logits.std(dim=-1)
        return (best.indices[:, 0] == drawn).cpu().numpy(), clear.cpu().numpy()


@contextmanager
def _exact() -> Iterator[None]:
    """Without tf32."""
    matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv
