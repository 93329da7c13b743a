"""The runs of a comparison: the config of each draft, alike in everything that is not the draft's own.

A contender is what `fit` would be given: the command's config with another draft and a run folder of its own.
The recipe's own draft keeps what recipe and command line say of it; any other comes as its recipe has it. What
`compare.own` says of one is laid over that. All are known to be sound before the first one runs. All capture the
taps of all, so that they share one store; a draft around a head takes that of the run which trains it alone, if
its settings are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from mtptrain.compose import compose_beside
from mtptrain.pipeline.sound import check_run
from mtptrain.session import Session
from mtptrain.types import UserError
from mtptrain.validate.compare import CompareSettings

OWN = ("draft", "loss", "train", "tree")  # sections that a contender may have to itself


def contenders(session: Session) -> dict[str, Session]:
    """A session of each draft of `drafts=`, by its name. Raises UserError where one cannot be."""
    config = session.config
    names, how = [str(name) for name in config.drafts], session.settings(CompareSettings, "compare")
    if not names or len(set(names)) < len(names):
        raise UserError(f"drafts={names} must name one draft or more, each once")
    common = _common(config, how)
    sessions = dict[str, Session]()
    for name in names:
        with named(name):
            sessions[name] = session.beside(_contender(common, name, how.own.get(name, ())))
            check_run(sessions[name])
    taps = list(dict.fromkeys(tap for one in sessions.values() for tap in one.taps))
    for one in sessions.values():
        one.config.capture.taps = taps
    _lend_heads(list(sessions.values()))
    return sessions


@contextmanager
def named(name: str) -> Iterator[None]:
    """A fault of the user's says which of the drafts it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"draft {name}: {error}") from error
    except InstantiationException as error:  # Hydra's, around a setting's own refusal
        if not isinstance(error.__cause__, UserError):
            raise
        raise UserError(f"draft {name}: {error.__cause__}") from error


def _lend_heads(sessions: Sequence[Session]) -> None:
    """One run trains a head for all that have the same: one where it lies already, else the first that has no other
    part."""
    heads = [one for one in sessions if one.draft_config.trained() is one.draft_config]
    heads.sort(key=lambda one: not one.train_stage.is_complete(one.train_key))
    folders = dict[str, Path]()
    for one in heads:
        folders.setdefault(one.train_key, one.run_dir)
    for one in sessions:
        if one.head_config is not None:
            one.head_dir = folders.get(one.train_key)


def _common(config: DictConfig, how: CompareSettings) -> DictConfig:
    """The command's config as a run of one draft would have it."""
    plain = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(plain, DictConfig)
    if how.minutes is not None:
        plain.train.max_minutes = how.minutes
    if how.steps is not None:
        plain.train.max_steps = how.steps
    del plain["drafts"], plain["compare"]
    return plain


def _contender(common: DictConfig, name: str, words: Sequence[str]) -> DictConfig:
    """With the draft of this name, or the one that its own `words` choose."""
    kind = next((w.partition("=")[2] for w in words if w.startswith("draft=")), name)
    rest = [word for word in words if not word.startswith("draft=")]
    fresh = compose_beside("fit", [f"draft={kind}", *rest])
    mine = OmegaConf.create(OmegaConf.to_container(common))
    assert isinstance(mine, DictConfig)
    if mine.draft._target_ != fresh.draft._target_:
        mine.draft = fresh.draft
    for key in (_key(name, word) for word in rest):
        OmegaConf.update(mine, key, OmegaConf.select(fresh, key), merge=False)
    mine.run_dir = str(Path(common.run_dir) / "compare" / name)
    return mine


def _key(name: str, word: str) -> str:
    """What a word sets; of a choice for a part of a group, `draft@draft.head=eagle3`, that part."""
    key = word.partition("=")[0].lstrip("+").rpartition("@")[2]
    if key.partition(".")[0] not in OWN:
        raise UserError(
            f"compare.own.{name} sets {key}, which all drafts of a comparison share; it may set "
            f"{', '.join(OWN)}"
        )
    return key
