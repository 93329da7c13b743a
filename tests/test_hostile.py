"""Records and command lines of any form: nothing but a whole record counts, nothing but a UserError comes out.

900 cases (hypothesis); composing a recipe costs some 50 ms, so command lines are few.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mtptrain.overrides import check
from mtptrain.run import StageFolder, StageRecord
from mtptrain.types import UserError

MANY = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just("one")
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
records = st.one_of(
    values,
    st.fixed_dictionaries(
        {}, optional={"fingerprint": values, "seconds": values, "summary": values}
    ),
)
contents = st.one_of(
    records.map(json.dumps).map(str.encode),
    st.binary(max_size=20),
    st.sampled_from([b"[" * 10**5, b"9" * 10**4, b'{"fingerprint":"one"', b"\xff\xfe"]),
)


@settings(max_examples=500, **MANY)
@given(content=contents)
def test_a_stage_is_complete_by_a_whole_record_only(content: bytes) -> None:
    """Any stage.json is either a record with all its fields of their kinds, or none."""
    with tempfile.TemporaryDirectory() as name:
        stage = StageFolder(Path(name))
        (stage.path / "stage.json").write_bytes(content)
        record = stage.record()
        if stage.is_complete("one"):
            held = json.loads(content)
            assert held["fingerprint"] == "one" and isinstance(held["summary"], dict)
        assert record is None or isinstance(record, StageRecord)


@settings(max_examples=300, **MANY)
@given(content=contents)
@example(content=b'{"fingerprint": "one"}')
def test_work_is_resumed_by_its_own_name_only(content: bytes) -> None:
    """Any started.json: the work is this fingerprint's, is deleted, or is left alone with a UserError."""
    with tempfile.TemporaryDirectory() as name:
        stage = StageFolder(Path(name))
        (stage.path / "started.json").write_bytes(content)
        (stage.path / "work.bin").write_bytes(b"x")
        try:
            resumed = stage.begin("one")
        except UserError as error:
            assert "\n" not in str(error) and (stage.path / "work.bin").exists()
            return
        assert resumed == (stage.path / "work.bin").exists()
        assert not resumed or json.loads(content) == {"fingerprint": "one"}


KEYS = [
    "seed",
    "train.epochs",
    "data.path",
    "draft",
    "loss",
    "draft.taps",
    "recipe",
    "run_dir",
    "hydra.run.dir",
]
words = st.one_of(
    st.text(max_size=12),
    st.builds(
        "{}{}={}".format,
        st.sampled_from(["", "+", "++", "~"]),
        st.one_of(st.sampled_from(KEYS), st.text(max_size=6)),
        st.one_of(
            st.text(max_size=10),
            st.integers().map(str),
            st.sampled_from(
                [
                    "[" * 3000,
                    "${seed}",
                    "${nosuch}",
                    "${oc.env:HOME}",
                    "null",
                    "???",
                    "1,2",
                    "{a:[1}",
                ]
            ),
        ),
    ),
)


@settings(max_examples=100, **MANY)
@given(arguments=st.lists(words, max_size=2))
@example(arguments=["+="])
@example(arguments=["~loss=3"])
def test_a_command_line_of_any_form_is_understood_or_one_line(arguments: list[str]) -> None:
    """`check` lets it pass or raises UserError: no other exception, no second line."""
    try:
        check("fit", arguments)
    except UserError as error:
        assert "\n" not in str(error)
