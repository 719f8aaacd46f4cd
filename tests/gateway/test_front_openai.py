"""OpenAI's Python client against a live front: the installed version here, three major versions on their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from rose.errors import InternalError, Overloaded, Unavailable
from tests.gateway import openai_check
from tests.gateway.conftest import DIMENSION, card_for, live_front

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "openai"
# The newest of each major version whose parsing code differs.
VERSIONS = ("1.109.1", "2.54.0", "3.57.0")


def test_the_installed_client(shared):
    """Report C65: the client asks for base64 unasked."""
    openai_check.check(shared.url, "tiny/embedder", DIMENSION)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Overloaded("full", retry_after_s=7.0), openai.RateLimitError),
        (Unavailable("draining"), openai.InternalServerError),
        (InternalError("broken"), openai.InternalServerError),
    ],
)
def test_faults_of_the_server_arrive_as_the_clients_own_errors(shared, error, kind):
    def fault(request):
        raise error

    client = openai.OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0)
    shared.engines[0].fault = fault
    try:
        with pytest.raises(kind) as refused:
            client.embeddings.create(model="tiny/embedder", input="a")
    finally:
        shared.engines[0].fault = lambda request: None
    assert refused.value.code == error.kind
    assert refused.value.status_code == error.http_status


def test_the_client_comes_back_by_itself_after_an_overload(shared):
    failed = []

    def fault(request):
        if not failed:
            failed.append(request)
            raise Overloaded("full", retry_after_s=0.01)

    shared.engines[0].fault = fault
    client = openai.OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=1)
    assert client.embeddings.create(model="tiny/embedder", input="a").data
    assert len(failed) == 1
    shared.engines[0].fault = lambda request: None


def installed(version):
    """A folder with this version of the client and what it needs; installed once, skipped where it cannot be had."""
    folder = CACHE / version
    done = folder / ".complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted installation left
        options = ["--quiet", "--no-compile", "--target", str(folder)]
        install = [sys.executable, "-m", "pip", "install", *options, f"openai=={version}"]
        result = subprocess.run(install, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode:
            pytest.skip(f"openai {version} cannot be installed: {result.stderr.strip().splitlines()[-1]}")
        done.touch()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_three_major_versions(text_folder, version):
    folder = installed(version)
    with live_front(text_folder, card_for(text_folder)) as live:
        # Without site-packages the client finds no numpy either, and decodes base64 by itself.
        result = subprocess.run(
            [sys.executable, "-S", openai_check.__file__, live.url, "tiny/embedder", str(DIMENSION)],
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"openai {version} ok"
