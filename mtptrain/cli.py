"""The command line: `mtptrain VERB [recipe=NAME] [group=choice] [key=value]`, `mtptrain inspect WHAT ...`.

Three things happen in order: flags are read, the overrides are checked (`overrides.py`), and Hydra
composes the config and calls the pipeline, once or, with -m, once for each combination. Hydra takes
its command line from sys.argv and prints its errors itself; both are set aside while it runs, so
that every failure, wherever it arises, leaves here as one line and an exit code: 2 for the user's
input, 1 for the rest, 130 for Ctrl-C. Torch is imported only where a run needs it: help is quick.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig

from mtptrain import __version__
from mtptrain.progress import log, setup_logging
from mtptrain.run import VERBS, recipes_dir

SUBJECTS = ("data", "cache")  # of `inspect`
RESUME = "run the same command again to resume"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is what follows the program's name."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _say(f"interrupted: {RESUME}", 130)
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning's answer to Ctrl-C
            return _say(f"interrupted: {RESUME}", 130)
        return _say(f"stopped by a library: {stop}", 1) if stop.code else 0
    except _JobError as failed:
        return _report(failed.error)
    except Exception as error:
        return _report(error)


def _dispatch(argv: list[str]) -> int:
    flags = _parse_flags(argv)
    if flags.version:
        print(f"mtptrain {__version__}")
    elif flags.help or flags.verb is None:
        from mtptrain.help import help_text

        print(help_text())
    else:
        _run_verb(flags)
    return 0


class _Parser(argparse.ArgumentParser):
    """A mistake is a UserError like any other, where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise _user_error(f"{message}; `mtptrain --help` lists what there is")


def _parse_flags(argv: list[str]) -> argparse.Namespace:
    parser = _Parser("mtptrain", add_help=False, allow_abbrev=False)
    parser.add_argument("verb", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("-m", "--multirun", action="store_true")
    either.add_argument("--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    return parser.parse_intermixed_args(argv)


def _run_verb(flags: argparse.Namespace) -> None:
    from mtptrain.overrides import check, nearest, search_path

    if flags.verb not in VERBS:
        hint = nearest(flags.verb, VERBS) or (": the verb comes first" if "=" in flags.verb else "")
        raise _user_error(f"unknown verb {flags.verb!r}{hint} (there are {', '.join(VERBS)})")
    if flags.verb == "inspect" and _subject(flags) == "cache":
        return _inspect_cache(flags.overrides)
    if flags.config_dir is not None and not flags.config_dir.is_dir():
        raise _user_error(f"--config-dir {flags.config_dir}: no such folder; name one of recipes")
    setup_logging(quiet=not _is_debug())
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch on CPU: large pages fault less often
    swept = check(flags.verb, flags.overrides, sweep=flags.multirun, folder=flags.config_dir)
    arguments = [*flags.overrides, *search_path(flags.config_dir), *_hydra_flags(flags)]
    _run_hydra(flags.verb, arguments, lambda config: _run_job(flags.verb, config, swept))


def _subject(flags: argparse.Namespace) -> str:
    """Takes the word after `inspect` off the overrides."""
    from mtptrain.overrides import nearest

    subject = flags.overrides.pop(0) if flags.overrides else ""
    if subject not in SUBJECTS:
        found = f"{subject!r}{nearest(subject, SUBJECTS)}" if subject else "nothing"
        raise _user_error(
            f"inspect is asked for {found}: write `mtptrain inspect data recipe=NAME` or "
            "`mtptrain inspect cache PATH`"
        )
    return subject


def _inspect_cache(paths: list[str]) -> None:
    if len(paths) != 1:
        raise _user_error(f"inspect cache takes one PATH, a store's folder, not {len(paths)}")
    from hidden_state_cache.inspect import describe  # pyright: ignore[reportMissingImports]

    print(describe(Path(paths[0])))


def _hydra_flags(flags: argparse.Namespace) -> list[str]:
    if flags.multirun:
        return ["--multirun"]
    if flags.cfg is None:
        return []
    return ["--cfg", flags.cfg, *(["--resolve"] if flags.resolve else [])]


def _run_hydra(verb: str, arguments: list[str], job: Callable[[DictConfig], None]) -> None:
    import hydra

    from mtptrain.compose import HYDRA_VERSION_BASE

    folder = str(recipes_dir())
    decorate = hydra.main(config_path=folder, config_name=verb, version_base=HYDRA_VERSION_BASE)
    with _as_hydra_wants(arguments):
        decorate(job)()


@contextmanager
def _as_hydra_wants(arguments: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and lets exceptions through to us only with this variable set."""
    held_argv, held_full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["mtptrain", *arguments], "1"
    try:
        yield
    finally:
        sys.argv = held_argv
        del os.environ["HYDRA_FULL_ERROR"]
        if held_full is not None:
            os.environ["HYDRA_FULL_ERROR"] = held_full


class _JobError(BaseException):
    """Carries a job's exception past Hydra, which says a line of its own about any Exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _run_job(verb: str, config: DictConfig, swept: list[str]) -> None:
    """One run of the pipeline; each job of a sweep in a folder named after its own values."""
    from hydra.core.hydra_config import HydraConfig

    from mtptrain import pipeline

    if swept:
        words = sorted(HydraConfig.get().overrides.task)
        own = [word for word in words if word.partition("=")[0].lstrip("+") in swept]
        config.run_dir = str(Path(config.run_dir) / ",".join(own).replace(os.sep, "_"))
        log.info("sweep: %s", config.run_dir)
    try:
        pipeline.run(verb, config)
    except Exception as error:
        raise _JobError(error) from error


def _report(error: Exception) -> int:
    """Says in one line what went wrong, and returns the exit code."""
    if _is_debug():
        traceback.print_exception(error)
    fault = _user_fault(error)
    if fault:
        return _say(fault, 2)
    first = str(error).strip().partition("\n")[0]
    line = f"internal error: {type(error).__name__}: {first} (in {_place(error)})"
    return _say(line if _is_debug() else f"{line}; set MTPTRAIN_DEBUG=1 for the trace", 1)


def _user_fault(error: BaseException | None) -> str | None:
    """The line to show where the user's input or machine is at fault; None where we are."""
    from hydra.errors import HydraException, InstantiationException

    from mtptrain.overrides import one_line
    from mtptrain.types import UserError

    if error is None:
        return None
    store = sys.modules.get("hidden_state_cache")  # who raised a StoreError has imported it
    if isinstance(error, UserError) or (store and isinstance(error, store.StoreError)):
        return str(error)
    if isinstance(error, InstantiationException) and not isinstance(error.__cause__, TypeError):
        return _user_fault(error.__cause__)
    if isinstance(error, HydraException):
        return f"the recipe does not compose: {one_line(error)}"
    return _machine_fault(error)


def _machine_fault(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    if number in DISK_FULL or "No space left on device" in str(error):
        where = f" for {error.filename}" if isinstance(error, OSError) and error.filename else ""
        return f"no disk space left{where}: free some, or move run_dir= or MTPTRAIN_CACHE; {RESUME}"
    if isinstance(error, OSError) and number in NOT_ALLOWED:
        return f"{error.filename}: {error.strerror}: allow it or name another place; {RESUME}"
    return None


def _place(error: BaseException) -> str:
    """`mtptrain/train/loop.py:42`: the innermost line of ours that the error passed through."""
    root = Path(__file__).resolve().parents[1]
    rooms = (root / "mtptrain", root / "hidden_state_cache")
    frames = traceback.extract_tb(error.__traceback__)
    paths = [Path(frame.filename) for frame in frames]
    ours = [
        frame
        for frame, path in zip(frames, paths, strict=True)
        if any(map(path.is_relative_to, rooms))
    ]
    frame = (ours or list(frames))[-1]
    path = Path(frame.filename)
    return f"{path.relative_to(root) if ours else path.name}:{frame.lineno}"


def _say(line: str, code: int) -> int:
    print(f"mtptrain: {' '.join(line.split())}", file=sys.stderr)
    return code


def _is_debug() -> bool:
    return os.environ.get("MTPTRAIN_DEBUG") == "1"


def _user_error(line: str) -> Exception:
    from mtptrain.types import UserError  # imports torch

    return UserError(line)
