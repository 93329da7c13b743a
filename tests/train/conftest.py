"""A real store of the tiny target's answers."""

from __future__ import annotations

import pytest

from hidden_state_cache import FeatureStore, FeatureWriter
from mtptrain.capture import ShardSink, identity
from mtptrain.chat import Chat
from mtptrain.prepare import completion_answer
from mtptrain.targets.base import Target
from mtptrain.types import Completion


@pytest.fixture(scope="session")
def store(
    tiny_target: Target,
    tiny_chat: Chat,
    answers: list[Completion],
    tmp_path_factory: pytest.TempPathFactory,
) -> FeatureStore:
    """Twenty-four answers in three shards, with four taps in fp32."""
    folder, taps = (
        tmp_path_factory.mktemp("store"),
        ("layer.1", "layer.2", "final_prenorm", "final"),
    )
    writer = FeatureWriter(folder, identity(tiny_target, tiny_chat, taps, "f00d", "d0"), "fp32")
    sink = ShardSink(writer, tiny_target, taps, True)
    for shard in range(3):
        mine = answers[8 * shard : 8 * shard + 8]
        sink.from_completions(shard, mine, [completion_answer(c, tiny_chat) for c in mine])
    writer.finish()
    return FeatureStore.open(folder)
