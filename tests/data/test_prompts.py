"""The prompts of a run: read, cut to a part, kept apart from what is measured, and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtptrain.data.prompts import evaluation_prompts, locate, read_prompts, training_prompts
from mtptrain.datasets.base import DataSettings, DropRow, evenly
from mtptrain.run import recipes_dir
from mtptrain.types import Conversation, Turn, UserError


def _write(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    lines = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


LAYOUTS = {
    "turns": {"turns": ["Hi", "And?"]},
    "messages": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "And?"},
        ]
    },
    "conversations": {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
            {"from": "human", "value": "And?"},
        ]
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_alike(layout: str, tmp_path: Path) -> None:
    """The user's turns are kept in order; answers of another model are dropped, for the target writes its own."""
    (row,) = read_prompts(_write(tmp_path, {"id": 7, "category": "qa"} | LAYOUTS[layout]))
    assert row.id == "7" and row.category == "qa"
    assert row.turns == (Turn("user", "Hi"), Turn("user", "And?"))


def test_a_single_prompt_and_a_system_turn(tmp_path: Path) -> None:
    """`prompt` is one user turn; system and developer turns stay where they stood."""
    system = {
        "messages": [{"role": "developer", "content": "Be brief."}, *LAYOUTS["turns"]["turns"]]
    }
    one, two = read_prompts(_write(tmp_path, {"prompt": "Hi"}, system))
    assert one.turns == (Turn("user", "Hi"),) and one.category == "all"
    assert [t.role for t in two.turns] == ["system", "user", "user"]


def test_max_turns_keeps_the_first_user_turns(tmp_path: Path) -> None:
    """Later user turns go, and what follows them; the system turn in front stays."""

    def cut(turns: int) -> list[str]:
        return [t.content for t in read_prompts(path, DataSettings(max_turns=turns))[0].turns]

    roles = ("system", "user", "user", "user")
    messages = [{"role": r, "content": f"{r}{i}"} for i, r in enumerate(roles)]
    path = _write(tmp_path, {"messages": messages})
    assert cut(1) == ["system0", "user1"]
    assert cut(2) == ["system0", "user1", "user2"]
    assert len(cut(9)) == 4


def test_ids_come_from_the_row_or_its_text(tmp_path: Path) -> None:
    """`id`, else `question_id`, else a hash of place and prompt: the same in every run."""
    path = _write(tmp_path, {"question_id": 81, "prompt": "a"}, {"prompt": "b"})
    first, second = read_prompts(path)
    assert first.id == "81" and second.id == read_prompts(path)[1].id and len(second.id) == 16


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """U+2028 and its like may stand inside a string; blank lines, CRLF and a byte-order mark are harmless."""
    path = tmp_path / "prompts.jsonl"
    rows = ['{"prompt": "one\u2028two\u0085three"}', "", '{"prompt": "next"}', "  "]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    assert [r.turns[0].content for r in read_prompts(path)] == ["one\u2028two\u0085three", "next"]


ERRORS = {
    "no json": ("{'prompt': 1}", "line 2 is not JSON"),
    "no object": ('["Hi"]', "line 2 has no text for the user's turn"),
    "no text": ({"id": 1}, "line 2 has no text for the user's turn"),
    "blank text": ({"prompt": "  "}, "line 2 has no text"),
    "no user turn": ({"messages": [{"role": "system", "content": "x"}]}, "line 2 has no text"),
    "no question": ({"messages": [{"role": "tool", "content": "x"}]}, "line 2 has no text"),
    "content is no text": ({"messages": [{"role": "user", "content": 3}]}, "line 2 has no text"),
    "empty list": ({"turns": []}, "line 2 has no text"),
    "the same id": ({"id": "a", "prompt": "y"}, "two rows with id 'a'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_row_that_is_not_understood_is_named(name: str, tmp_path: Path) -> None:
    """File, line and remedy in one line; with data.skip_bad_rows it is left out."""
    row, message = ERRORS[name]
    path = _write(tmp_path, {"id": "a", "prompt": "x"}, row)
    with pytest.raises(UserError, match=message) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert "data.skip_bad_rows=true" in str(caught.value)
    assert [r.id for r in read_prompts(path, DataSettings(skip_bad_rows=True))] == ["a"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, an empty folder, an empty file and one that is no UTF-8 are the user's errors."""
    missing, empty, binary = (tmp_path / name for name in ("missing", "empty", "binary"))
    empty.write_text("\n\n")
    binary.write_bytes(b'{"prompt": "\xff\xfe"}')
    for path, message in (
        (missing, "cannot be read"),
        (tmp_path, "holds no data file"),
        (empty, "holds no prompts"),
        (binary, "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            read_prompts(path)


@pytest.mark.parametrize("name", ["starter.jsonl", "starter_eval.jsonl"])
def test_the_starter_prompts_are_whole(name: str) -> None:
    """Both files read, in several categories, some with two turns."""
    rows = read_prompts(recipes_dir() / "prompts" / name)
    assert len(rows) >= 100 and len({r.category for r in rows}) > 5
    assert {len(r.turns) for r in rows} >= {1, 2}


def test_no_evaluation_prompt_is_trained_on() -> None:
    """The two starter files share no user turn."""
    train, held = (
        {t.content for r in read_prompts(recipes_dir() / "prompts" / f) for t in r.turns}
        for f in ("starter.jsonl", "starter_eval.jsonl")
    )
    assert not train & held


def _settings(folder: Path, train: list[str], held: list[str], **more: object) -> DataSettings:
    for name, texts in (("train", train), ("held", held)):
        rows = [json.dumps({"turns": text.split("|")}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    paths = {"path": str(folder / "train.jsonl"), "eval_path": str(folder / "held.jsonl")}
    return DataSettings(**paths, **more)  # pyright: ignore[reportArgumentType]


def _prompts(settings: DataSettings, folder: Path) -> list[str]:
    held = evaluation_prompts(settings, folder / "eval_data.json")
    rows = training_prompts(settings, held, folder / "data.json")
    return [row.turns[0].content for row in rows]


EIGHT = "one two three four five six seven eight"
TRAIN = ["Alpha", f"So: {EIGHT}.", "Beta", "gamma  RAYS"]
HELD = [f"{EIGHT.title()}, and nine", "Gamma rays"]


def test_training_on_what_is_measured_is_refused(tmp_path: Path) -> None:
    """The first rows are named with what they share, and so are the keys that go on."""
    with pytest.raises(
        UserError, match=r"in 2 of 4 rows: line 2 .*'one two .* eight'; line 4"
    ) as e:
        _prompts(_settings(tmp_path, TRAIN, HELD), tmp_path)
    line = str(e.value)
    assert "\n" not in line and "data.overlap=drop" in line and "data.overlap=allow" in line


def test_what_is_measured_is_dropped_or_allowed(tmp_path: Path) -> None:
    """Dropped rows are counted; allowed ones are trained on."""
    assert _prompts(_settings(tmp_path, TRAIN, HELD, overlap="drop"), tmp_path) == ["Alpha", "Beta"]
    counts = json.loads((tmp_path / "data.json").read_text())
    assert (counts["rows"], counts["kept"]) == (4, 2)
    assert _prompts(_settings(tmp_path, TRAIN, HELD, overlap="allow"), tmp_path) == TRAIN


def test_a_limit_is_filled_from_the_rows_that_are_accepted(tmp_path: Path) -> None:
    """A row that cannot be answered is counted with its reason, and its place goes to another."""

    def short(row: Conversation) -> None:
        if len(row.turns[0].content) > 2:
            raise DropRow("too long")

    settings = _settings(tmp_path, ["long", "a", "longer", "b", "c"], ["d", "long"], limit=2)
    held = evaluation_prompts(settings, None, short)
    assert [row.turns[0].content for row in held] == ["d"]
    rows = training_prompts(settings, held, tmp_path / "data.json", short)
    assert [row.turns[0].content for row in rows] == evenly("abc", 2)
    counts = json.loads((tmp_path / "data.json").read_text())
    tally = counts["dropped"]["too long"]
    assert tally["rows"] == 2 and tally["first"].endswith("train.jsonl line 1")


def test_rows_that_a_limit_leaves_out_are_not_refused(tmp_path: Path) -> None:
    """Only what is trained on matters."""
    assert _prompts(_settings(tmp_path, TRAIN, HELD, limit=2), tmp_path) == ["Alpha", "Beta"]


@pytest.mark.parametrize("limit", [None, 0, 1, 3, 7, 9])
def test_a_limit_takes_rows_evenly_over_those_that_are_kept(
    limit: int | None, tmp_path: Path
) -> None:
    """As `evenly` of all of them; the others are counted as left out by the limit."""
    train = ["a", "b", "A", "c", "d", "e", "c", "f", "g"]
    settings = _settings(tmp_path, train, ["x"], limit=limit)
    taken = _prompts(settings, tmp_path)
    assert taken == evenly("abcdefg", limit)
    counts = json.loads((tmp_path / "data.json").read_text())
    left_out = {reason: t["rows"] for reason, t in counts["dropped"].items()}
    assert counts["kept"] == len(taken) and sum(left_out.values()) + len(taken) == 9
    assert left_out.get("left out by the limit", 0) == 7 - len(taken)


def test_a_benchmark_is_measured_as_it_stands(tmp_path: Path) -> None:
    """Its duplicates stay; those of the training rows go, unless they are kept."""
    settings = _settings(tmp_path, ["a", "A"], ["b", "B"])
    assert len(evaluation_prompts(settings, tmp_path / "r.json")) == 2
    assert _prompts(settings, tmp_path) == ["a"]
    keep = _settings(tmp_path, ["a", "A"], ["b"], duplicates="keep")
    assert _prompts(keep, tmp_path) == ["a", "A"]


def test_the_log_says_what_became_of_the_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for the file, one for each reason, with the first place."""
    caplog.set_level("INFO", "mtptrain")
    _prompts(_settings(tmp_path, ["a", "A", "a|b"], ["x"], max_turns=1), tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[1].endswith("train.jsonl: 3 rows read, 1 kept")
    assert "2  the same prompt as an earlier row (first: " in lines[2] and "line 2)" in lines[2]


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    """The largest reason and its first row; the record is written all the same."""
    settings = _settings(tmp_path, ["x"], ["x"], overlap="drop")
    with pytest.raises(UserError, match="all 1 rows were dropped, 1 for 'shares its first"):
        _prompts(settings, tmp_path)
    assert json.loads((tmp_path / "data.json").read_text())["kept"] == 0


def test_a_path_is_a_file_a_folder_or_a_data_set(tmp_path: Path) -> None:
    """What is there wins; a name with a file's ending is never looked for on the hub."""
    assert locate(str(tmp_path), "data.path") == tmp_path
    assert locate("prompts/starter.jsonl", "data.path") == recipes_dir() / "prompts/starter.jsonl"
    assert locate("owner/name:test", "data.path") == "owner/name:test"
    for path in ("prompts/missing.jsonl", "owner/name.parquet", "missing", ""):
        with pytest.raises(UserError, match="^data.path=.*: no such file"):
            locate(path, "data.path")


def test_the_starter_prompts_share_nothing_with_what_is_measured(tmp_path: Path) -> None:
    """The default run passes its own refusal."""
    settings = DataSettings("prompts/starter.jsonl", "prompts/starter_eval.jsonl")
    assert len(_prompts(settings, tmp_path)) > 1000
