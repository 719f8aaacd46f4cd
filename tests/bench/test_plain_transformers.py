"""transformers as a reference where flash-linear-attention and causal-conv1d are installed: here packages that fail
when they are called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rose.bench.decode_reference import DecodeReference
from rose.bench.plain_transformers import without_kernels
from rose.config import read_model_folder
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

ROOT = Path(__file__).parents[2]
REFUSES = """
__version__ = "9.9.9"

def refuse(*args, **kwargs):
    raise RuntimeError("a kernel was called")
"""
DELTA = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "recurrent_gated_delta_rule")
CONV = ("causal_conv1d_fn", "causal_conv1d_update")
# As on a machine with a GPU, which earlier versions of transformers ask for.
START = "import sys, torch\ntorch.cuda.is_available = lambda: True\nfolder = sys.argv[1]\n"
REFERENCE = START + (
    "from pathlib import Path\n"
    "from rose.bench.decode_reference import DecodeReference\n"
    "from rose.config import read_model_folder\n"
    "print(repr(DecodeReference(read_model_folder(Path(folder)), torch.device('cpu')).noise))\n"
)
TRANSFORMERS = START + (
    "import transformers\n"
    "model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)\n"
    "model(input_ids=torch.arange(5, 75)[None])\n"
)
TOO_LATE = START + (
    "import transformers.models.qwen3_5.modeling_qwen3_5\n"
    "from rose.bench.plain_transformers import plain_transformers\n"
    "plain_transformers()\n"
)


@pytest.fixture
def installed(tmp_path):
    """A folder for sys.path that holds both packages."""
    packages = tmp_path / "packages"
    modules = {
        "fla": (),
        "fla/modules": ("FusedRMSNormGated",),
        "fla/ops": (),
        "fla/ops/gated_delta_rule": DELTA,
        "causal_conv1d": CONV,
    }
    for name, functions in modules.items():
        (packages / name).mkdir(parents=True)
        text = REFUSES + "".join(f"{function} = refuse\n" for function in functions)
        (packages / name / "__init__.py").write_text(text)
    return packages


@pytest.fixture
def folder(tmp_path):
    return tiny_qwen3_5(tmp_path / "m")


def run(installed, *arguments):
    path = os.pathsep.join([str(ROOT), str(installed), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_a_reference_calls_none_of_them(installed, folder):
    there = run(installed, "-c", REFERENCE, folder)
    assert there.returncode == 0, there.stderr
    assert float(there.stdout) == pytest.approx(DecodeReference(read_model_folder(folder), torch.device("cpu")).noise)


def test_transformers_by_itself_calls_them(installed, folder):
    """What is installed here is what would be called."""
    assert "a kernel was called" in run(installed, "-c", TRANSFORMERS, folder).stderr


def test_a_model_that_was_imported_with_them_is_refused(installed, folder):
    late = run(installed, "-c", TOO_LATE, folder)
    assert "imported with fla and causal_conv1d installed and is no independent reference" in late.stderr


def test_tests_compare_with_plain_torch(installed):
    arguments = ("-q", "-p", "no:cacheprovider", "tests/models/test_qwen3_5.py", "-k", "greedy_text")
    inner = run(installed, "-m", "pytest", *arguments)
    assert inner.returncode == 0, inner.stdout
    assert "passed" in inner.stdout


def test_what_was_imported_before_comes_back(installed, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    for name in ("fla", "causal_conv1d"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import fla.ops.gated_delta_rule as before

    with without_kernels():
        for name in ("fla", "fla.ops.gated_delta_rule", "causal_conv1d"):
            with pytest.raises(ImportError):
                __import__(name)
    import fla.ops.gated_delta_rule as after

    assert after is before
    assert "causal_conv1d" not in sys.modules
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
