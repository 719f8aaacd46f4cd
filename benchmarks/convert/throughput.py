"""`rose convert` against a plain copy of the same folder, and how much memory it takes.

    python benchmarks/convert/throughput.py --out benchmarks/results/cpu/convert.json

Sources are causal language models in the shape of Llama 3.2 1B with as many layers as make about `--gb` (seeded random
weights, tied head); they become bidirectional embedders. A copy is `shutil.copyfile` (sendfile) of every file. Both
sides end when their files are on the disk (fsync), since a conversion does not give its folder a name before. Two
states of the page cache, the same for both sides: "warm", the source was just read; "cold", it was dropped
(posix_fadvise). Rounds rotate the order of the sides; before each run earlier writes are waited for (sync), after it
its result is removed. A conversion is a whole command in a process of its own: `convert_s` is the conversion itself,
`command_s` with start and imports, `peak_mb` the process's VmHWM. Shares are copy / conversion, of medians.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.bench.machine import provenance
from tests.support import tiny_tokenizers

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY, RANK = 2048, 8192, 32, 8, 128_256, 16
KV = HIDDEN * KV_HEADS // HEADS
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
STATES = ("warm", "cold")


@dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype = torch.bfloat16
    shards: int = 1
    options: tuple[str, ...] = ()
    lora: bool = False


CASES = (
    Case("bf16 to bf16, one file"),
    Case("bf16 to bf16, four files", shards=4),
    Case("fp32 to bf16, one file", dtype=torch.float32, options=("--dtype", "bfloat16")),
    Case("bf16 with a LoRA merged, one file", lora=True),
)


def make_source(folder: Path, case: Case, size: float) -> Path:
    """A folder of about `size` bytes; with the adapter beside it where the case has one."""
    source, width = folder / "source", case.dtype.itemsize
    source.mkdir(parents=True)
    tiny_tokenizers.save(tiny_tokenizers.byte_level(chat=True), source)
    per_layer = sum(rows * columns for rows, columns in MATRICES.values())
    layers = max(1, round((size / width - VOCABULARY * HIDDEN) / per_layer))
    write_config(source, layers, case.dtype)
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(0, columns**-0.5, generator=draw).to(dtype)

    files: list[dict[str, torch.Tensor]] = [{} for _ in range(case.shards)]
    files[0]["model.embed_tokens.weight"] = matrix(VOCABULARY, HIDDEN)
    files[-1]["model.norm.weight"] = torch.ones(HIDDEN, dtype=case.dtype)
    adapter: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        # The embedding is as large as four layers.
        file = files[min((layer + 4) * case.shards // (layers + 4), case.shards - 1)]
        for name, (rows, columns) in MATRICES.items():
            file[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns)
            if case.lora:
                module = f"base_model.model.model.layers.{layer}.{name}"
                adapter[f"{module}.lora_A.weight"] = matrix(RANK, columns, torch.float32)
                adapter[f"{module}.lora_B.weight"] = matrix(rows, RANK, torch.float32) * 0.1
        for name in ("input_layernorm", "post_attention_layernorm"):
            file[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN, dtype=case.dtype)
    write_weights(source, files)
    if case.lora:
        write_adapter(folder / "adapter", adapter)
    return source


def write_config(source: Path, layers: int, dtype: torch.dtype) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_weights(source: Path, files: Sequence[dict[str, torch.Tensor]]) -> None:
    if len(files) == 1:
        save_file(files[0], source / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, source / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_adapter(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def prepare(source: Path, state: str) -> None:
    """Nothing left to write, and the source in the page cache or out of it."""
    os.sync()
    for path in source.iterdir():
        with path.open("rb", buffering=0) as file:
            if state == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                digest(path)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(source: Path, target: Path) -> dict[str, float]:
    started = time.perf_counter()
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
    copied = time.perf_counter()
    for path in (*target.iterdir(), target):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return {"copy_s": time.perf_counter() - started, "copy_into_cache_s": copied - started}


def convert(source: Path, target: Path, case: Case) -> dict[str, float]:
    """The command in a process of its own."""
    adapter = ("--adapter", str(source.parent / "adapter")) if case.lora else ()
    arguments = ["convert", source, "--to", "embedder", "--bidirectional", "-o", target, *case.options, *adapter]
    command = [sys.executable, str(Path(__file__).resolve()), "--run", *map(str, arguments)]
    started = time.perf_counter()
    before = children_cpu()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told | {"command_s": seconds, "cpu_s": children_cpu() - before}


def children_cpu() -> float:
    """Processor seconds of all commands that have ended; they run one at a time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_mb() -> float:
    """Of this process's own memory; ru_maxrss would count its parent's before the exec."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def run_command(arguments: Sequence[str]) -> None:
    """`rose ARGUMENTS`; its last line is what the conversion took, and the memory before it and in all."""
    from rose import cli
    from rose.convert import offline

    plain, told = offline.convert, {}

    def timed(*given: Any, **named: Any) -> Path:
        told["before_mb"] = peak_mb()
        started = time.perf_counter()
        made = plain(*given, **named)
        told["convert_s"] = time.perf_counter() - started
        return made

    offline.convert = timed
    status = cli.main(list(arguments))
    told["peak_mb"] = peak_mb()
    print(json.dumps(told))
    raise SystemExit(status)


def measure(case: Case, folder: Path, rounds: int, size: float) -> dict[str, Any]:
    source, target = make_source(folder, case, size), folder / "target"
    weights = [path for path in source.iterdir() if path.suffix == ".safetensors"]
    nbytes = sum(path.stat().st_size for path in weights)
    largest = VOCABULARY * HIDDEN * case.dtype.itemsize
    result: dict[str, Any] = {
        "source_gb": round(nbytes / 1e9, 3),
        "files": len(weights),
        "largest_tensor_mb": round(largest / 1e6, 1),
        "memory_bound_mb": round((4 * largest + 1e9) / 1e6),
        "sha256_s": sha256_seconds(weights),
    }
    for state in STATES:
        taken: dict[str, list[float]] = {}
        for at in range(rounds):
            sides = [lambda: copy(source, target), lambda: convert(source, target, case)]
            for side in sides[at % 2 :] + sides[: at % 2]:
                prepare(source, state)
                for name, value in side().items():
                    taken.setdefault(name, []).append(round(value, 3))
                shutil.rmtree(target)
        result[state] = summary(taken, nbytes)
        print(case.name, state, json.dumps(result[state]["median"]), flush=True)
    return result


def sha256_seconds(paths: Sequence[Path]) -> float:
    """One thread over all files in the page cache: what no conversion that tells its source's digests gets below, where
    there is one file."""
    for _ in range(2):
        started = time.perf_counter()
        for path in paths:
            digest(path)
    return round(time.perf_counter() - started, 3)


def summary(taken: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    median = {name: round(statistics.median(values), 3) for name, values in taken.items()}
    return {
        "median": median,
        "spread": {name: [min(values), max(values)] for name, values in taken.items()},
        "convert_gb_s": round(nbytes / 1e9 / median["convert_s"], 2),
        "copy_gb_s": round(nbytes / 1e9 / median["copy_s"], 2),
        "share_of_copy": round(median["copy_s"] / median["convert_s"], 3),
        "share_of_copy_with_start": round(median["copy_s"] / median["command_s"], 3),
        "share_of_copy_into_cache": round(median["copy_into_cache_s"] / median["convert_s"], 3),
        "rounds": taken,
    }


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run_command(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of each source (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--folder", type=Path, help="where sources and results lie (default: the system's for such)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shown = [name for name in sys.argv[1:] if name != "--folder" and name != str(options.folder)]
    head = provenance("", shown, ("rose-serving", "torch", "safetensors", "numpy"))
    head["command"] = " ".join(["python benchmarks/convert/throughput.py", *shown])
    head |= {"system": f"{platform.system()} {platform.release().partition('-')[0]}", "gb": options.gb}
    head["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS", "")
    cases = {}
    for case in CASES:
        if options.case is None or case.name in options.case:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                cases[case.name] = measure(case, Path(folder), options.rounds, options.gb * 1e9)
    if options.out is not None:
        options.out.write_text(json.dumps(head | {"cases": cases}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
