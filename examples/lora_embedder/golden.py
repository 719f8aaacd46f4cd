"""What the language model with the LoRA beside it answers, unmerged, as a golden file for `rose verify`.

    python -m examples.lora_embedder.golden smollm2 --adapter ADAPTER --data verify.txt --out peft.npz

transformers and PEFT compute these vectors in fp32; nothing of ROSE's conversion or forward takes part in them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from examples.lora_embedder.model import embed, load_bidirectional
from rose.cli.verifying.answers import Answers, digest, save_golden
from rose.hub import resolve


def main(arguments: Sequence[str] | None = None) -> int:
    from peft import PeftModel

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="language model: short name, folder or hub id")
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="one text a line")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    folder = resolve(options.model)
    texts = options.data.read_text(encoding="utf-8").splitlines()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in texts]
    model = PeftModel.from_pretrained(load_bidirectional(folder), options.adapter).eval()
    with torch.inference_mode():
        values = embed(model, ids).numpy().astype(np.float64)
    answers = Answers(
        name="PEFT, unmerged",
        kind="vectors",
        texts=digest(texts),
        stored="float32",
        ran="float32",
        ids=ids,
        values=values,
    )
    save_golden(answers, options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
