"""What cannot end well is refused before anything is computed: the draft as it is asked for, held against itself.

A head is built on the target's outline, which has every shape and no weight, so all that its building refuses is
refused here, and what it says of itself (the most tokens that it drafts, a confidence) is held against the rest of
the command. Otherwise hours of answers and training would end in one line. It gives up what only the data show.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hydra.utils import instantiate

from mtptrain.drafts.base import Draft, HeadConfig
from mtptrain.runtime.engine import check_draft, require_confidence
from mtptrain.session import Session
from mtptrain.train.fit import require_all_trained
from mtptrain.train.module import TrainSettings
from mtptrain.validate.replay import ReplaySettings


def check_run(session: Session) -> None:
    """Raises UserError where this session's training or validation could not end, or would mean nothing."""
    limits = session.limits(1, int(session.config.num_draft_tokens))
    replayed: ReplaySettings = session.settings(ReplaySettings, "validate")
    params = replayed.sampling(float(session.config.temperature), session.seed)
    limits.tree.require_verification(params)
    config, head_config = session.draft_config, session.head_config
    if head_config is None:
        return require_confidence(False, limits)
    head = _outline(head_config, session)
    settings: TrainSettings = session.settings(TrainSettings, "train")
    require_all_trained(head, instantiate(session.config.loss), settings)
    check_draft(config.around(head, session.parts.outline), limits)


def _outline(config: HeadConfig, session: Session) -> Draft:
    """The head that would be trained, without weights."""
    target = session.parts.outline
    target.require_taps(config.taps)
    reduced = 0 < config.draft_vocab_size < target.vocab_size
    vocab = tuple(range(config.draft_vocab_size)) if reduced else ()
    with torch.device("meta"):
        return replace(config, draft_vocab=vocab).build(target)
