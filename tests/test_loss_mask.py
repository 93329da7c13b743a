"""Which tokens the target would write: forms of templates, real ones, and the borders token by token.

The inline templates are those of the families that they are named after, with a byte-level tokenizer trained
here; Llama-3.1, Qwen3 and DeepSeek-V3 are the real tokenizers with their own templates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mtptrain import loss_mask
from mtptrain.chat import Chat
from mtptrain.loss_mask import first_inside, first_outside
from mtptrain.template import Thinking
from mtptrain.types import Conversation, Sample, ToolCall, Turn

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    + ALTERNATE
    + ""
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}" + ALTERNATE + "{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
MISTRAL_SYSTEM_LAST = (  # as Mistral's third template: the system text goes to the last user turn
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set ms = messages[1:] if system else messages %}{{ bos_token }}{% for m in ms %}"
    "{% if m.role == 'user' %}{{ '[INST] ' }}{% if system and loop.index0 >= ms | length - 2 %}"
    "{{ system + '\n\n' }}{% endif %}{{ m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
HEADER = (  # writes a header but knows no generation prompt
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
    "{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
TEXTS = [
    "Hello there, how are you? Yes. No, I am here.",
    "user\nassistant\nuser\nassistant\nsystem\nYou are a helpful assistant.\n",
    "one two three four five six seven eight nine ten",
    " Hello Hello Yes No [INST] [/INST] A: B:\n\nAnd so on: 1, 2, 3.",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    return made


@pytest.fixture(scope="module")
def speak(tokenizer: Tokenizer) -> Callable[..., Chat]:
    """A chat of this template, whose answers end with `end`."""

    def made(template: str, end: str = "<|im_end|>", thinking: Thinking = "strip") -> Chat:
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
        )
        return Chat(fast, frozenset({SPECIAL.index(end)} if end else ()), thinking)

    return made


def talk(*texts: str, system: str | None = None, **more: str) -> Conversation:
    """User and assistant in turns."""
    turns = [Turn("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)]
    head = [Turn("system", system)] if system is not None else []
    return Conversation("c", "all", tuple(head + turns), **more)


def tokens(chat: Chat, sample: Sample) -> list[tuple[str, bool]]:
    """Each token as text with whether it is supervised."""
    assert len(sample.input_ids) == len(sample.loss_mask)
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    return [(chat.tokenizer.decode([token]), mask) for token, mask in pairs]


def stretches(chat: Chat, sample: Sample) -> list[tuple[str, bool]]:
    """The text cut where supervision begins or ends."""
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    groups = [
        (mask, [token for token, _ in group]) for mask, group in groupby(pairs, lambda p: p[1])
    ]
    return [(chat.tokenizer.decode(ids), mask) for mask, ids in groups]


def written(chat: Chat, sample: Sample) -> list[str]:
    return [text for text, mask in stretches(chat, sample) if mask]


def only(samples: list[Sample]) -> Sample:
    [sample] = samples
    return sample


# ---- forms of templates ---------------------------------------------------------------------------------


def test_every_token_of_a_chat_is_where_it_should_be(speak: Callable[..., Chat]) -> None:
    """Token by token: the answer and its end token, not the header before nor the line end after it."""
    chat = speak(CHATML)
    sample = only(chat.sample(talk("Hello", "Yes", "No", "Yes")))
    assert tokens(chat, sample) == [
        *[("<|im_start|>", False), ("user", False), ("\n", False), ("Hello", False)],
        *[("<|im_end|>", False), ("\n", False)],
        *[("<|im_start|>", False), ("assistant", False), ("\n", False)],
        *[("Ye", True), ("s", True), ("<|im_end|>", True), ("\n", False)],
        *[("<|im_start|>", False), ("user", False), ("\n", False), ("No", False)],
        *[("<|im_end|>", False), ("\n", False)],
        *[("<|im_start|>", False), ("assistant", False), ("\n", False)],
        *[("Ye", True), ("s", True), ("<|im_end|>", True), ("\n", False)],
    ]


@pytest.mark.parametrize(
    ("template", "end", "answers"),
    [
        (CHATML, "<|im_end|>", ["one two<|im_end|>", "🦜 é\n\nthree<|im_end|>"]),
        (SMOLLM2, "<|im_end|>", ["one two<|im_end|>", "🦜 é\n\nthree<|im_end|>"]),
        (GEMMA, "<end_of_turn>", ["one two<end_of_turn>", "🦜 é\n\nthree<end_of_turn>"]),
        (MISTRAL, "</s>", [" one two</s>", " 🦜 é\n\nthree</s>"]),
        (HEADER, "<|im_end|>", ["one two<|im_end|>", "🦜 é\n\nthree<|im_end|>"]),
        (MARKED, "<|im_end|>", ["one two<|im_end|>", "🦜 é\n\nthree<|im_end|>"]),
        (MARKED_WITHOUT_END, "<|im_end|>", ["one two<|im_end|>", "🦜 é\n\nthree<|im_end|>"]),
    ],
    ids="chatml smollm2 gemma mistral header marked marked-without-end".split(),
)
def test_answers_are_supervised_with_their_end_and_nothing_else(
    template: str, end: str, answers: list[str], speak: Callable[..., Chat]
) -> None:
    """Each form of template: all of each answer, one end token, in one sample of the whole text."""
    chat, counts = speak(template, end), Counter[str]()
    sample = only(chat.sample(talk("Hello", "one two", "And?", "🦜 é\n\nthree"), counts))
    assert written(chat, sample) == answers
    assert not +counts


@pytest.mark.parametrize("template", [CHATML, SMOLLM2, GEMMA, MISTRAL, MISTRAL_SYSTEM_LAST])
def test_an_answer_begins_where_its_prompt_ends(template: str, speak: Callable[..., Chat]) -> None:
    """The tokens before an answer are those that a server is sent for it."""
    chat = speak(template, "</s>" if "INST" in template else "<|im_end|>")
    row = talk("Hello", "one two", "And?", "three")
    ids = [int(i) for i in only(chat.sample(row)).input_ids]
    for k in (1, 3):
        prompt = list(chat.prompt_ids(row.turns[:k]))
        assert ids[: len(prompt)] == prompt
        mask = only(chat.sample(row)).loss_mask
        assert mask[len(prompt)] and not mask[len(prompt) - 1]


def test_text_is_what_apply_chat_template_tokenises(speak: Callable[..., Chat]) -> None:
    """Ids of a sample and of a prompt are transformers' own, default system prompt and all."""
    for template in (CHATML, SMOLLM2, GEMMA, MISTRAL, MARKED):
        chat, row = speak(template), talk("Hello", "one two", "And?", "three")
        plain = [{"role": t.role, "content": t.content} for t in row.turns]
        ids = chat.tokenizer.apply_chat_template(plain, return_dict=False)
        assert only(chat.sample(row)).input_ids.tolist() == ids
        asked = chat.tokenizer.apply_chat_template(
            plain[:3], add_generation_prompt=True, return_dict=False
        )
        assert list(chat.prompt_ids(row.turns[:3])) == asked


def test_marks_give_transformers_own_mask(speak: Callable[..., Chat]) -> None:
    """With generation marks the mask is that of return_assistant_tokens_mask."""
    chat, row = speak(MARKED), talk("Hello", "one two", "And?", "🦜 three")
    plain = [{"role": t.role, "content": t.content} for t in row.turns]
    theirs = chat.tokenizer.apply_chat_template(plain, return_assistant_tokens_mask=True)
    sample = only(chat.sample(row))
    assert sample.loss_mask.int().tolist() == theirs["assistant_masks"]
    assert sample.input_ids.tolist() == theirs["input_ids"]


def test_a_default_system_prompt_is_in_the_text_and_out_of_the_loss(
    speak: Callable[..., Chat],
) -> None:
    """SmolLM2 writes a system turn where there is none; one that is given stands in its place."""
    chat = speak(SMOLLM2)
    [(before, _), *_] = stretches(chat, only(chat.sample(talk("Hello", "Yes"))))
    assert before.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    [(before, _), *_] = stretches(chat, only(chat.sample(talk("Hello", "Yes", system="Be here."))))
    assert before.startswith("<|im_start|>system\nBe here.<|im_end|>\n<|im_start|>user")


def test_an_answer_that_later_turns_render_otherwise_is_a_sample_of_its_own(
    speak: Callable[..., Chat],
) -> None:
    """Mistral moves the system text to the last question: each answer is learnt as it is asked for."""
    chat, counts = speak(MISTRAL_SYSTEM_LAST, "</s>"), Counter[str]()
    first, second = chat.sample(talk("Hello", "one", "And?", "two", system="Be here."), counts)
    assert stretches(chat, first) == [
        ("<s>[INST] Be here.\n\nHello [/INST]", False),
        ("one</s>", True),
    ]
    assert stretches(chat, second) == [
        ("<s>[INST] Hello [/INST]one</s>[INST] Be here.\n\nAnd? [/INST]", False),
        ("two</s>", True),
    ]
    assert (first.id, second.id) == ("c#0", "c")
    assert counts == {loss_mask.OWN_SAMPLE: 1}


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (GEMMA, talk("Hello", "Yes", system="Be here."), "System role not supported"),
        (MISTRAL, talk("Hello", "Yes", system="Be here."), "roles must alternate"),
        (CHATML + "{{ messages[7].content.nothing }}", talk("Hello", "Yes"), "has no element 7"),
        (CHATML, talk("Hello"), "rows left out: no answer"),
        (
            CHATML,
            Conversation("c", "all", (Turn("user", "a"), Turn("assistant", "b")), "[3]"),
            "tools",
        ),
        (
            CHATML,
            Conversation("c", "all", (Turn("user", "a"), Turn("assistant", "b")), "{"),
            "JSON",
        ),
        (CHATML, Conversation("c", "all", ()), "rows left out: no answer"),
    ],
)
def test_a_row_that_cannot_be_rendered_is_counted_by_reason(
    template: str, row: Conversation, reason: str, speak: Callable[..., Chat]
) -> None:
    """A template that refuses, or fails, costs a row and not the run."""
    chat, counts = speak(template), Counter[str]()
    good = talk("Hello", "Yes")
    assert [s.id for s in chat.samples([row, row], counts)] == []
    [(found, number)] = counts.items()
    assert reason in found and number == 2
    if "nothing" not in template:
        assert len(list(chat.samples([row, good], counts))) == 1


def test_turns_behind_the_last_answer_are_cut(speak: Callable[..., Chat]) -> None:
    """A question without an answer teaches nothing."""
    chat = speak(CHATML)
    asked, answered = chat.sample(talk("a", "b", "c")), chat.sample(talk("a", "b"))
    assert only(asked).input_ids.tolist() == only(answered).input_ids.tolist()


def test_an_answer_before_any_question_is_not_supervised(speak: Callable[..., Chat]) -> None:
    chat, counts = speak(CHATML), Counter[str]()
    row = Conversation("c", "all", (Turn("assistant", "one"), Turn("user", "two")))
    later = Conversation("d", "all", (*row.turns, Turn("assistant", "three")))
    assert chat.sample(row, counts) == []
    assert written(chat, only(chat.sample(later, counts))) == ["three<|im_end|>"]
    assert counts[loss_mask.NO_QUESTION] == 2


def test_without_a_known_end_token_only_the_content_is_supervised(
    speak: Callable[..., Chat],
) -> None:
    """A target whose end token is not the template's would not stop there; what it writes there is unknown."""
    chat, counts = speak(GEMMA, "</s>"), Counter[str]()
    sample = only(chat.sample(talk("Hello", "one two", "And?", "three"), counts))
    assert written(chat, sample) == ["one two", "three"]
    assert counts == {loss_mask.NO_END: 2}


def test_nothing_behind_the_first_end_token_is_supervised(speak: Callable[..., Chat]) -> None:
    """A server would have stopped at an end token inside the answer."""
    chat = speak(CHATML)
    sample = only(chat.sample(talk("Hello", "one<|im_end|>two")))
    assert written(chat, sample) == ["one<|im_end|>"]


def test_an_answer_that_does_not_continue_its_prompt_is_left_out(
    speak: Callable[..., Chat],
) -> None:
    """A generation prompt that the template does not write before answers, as R1's `<think>`."""
    chat, counts = speak(CHATML.replace("assistant\n", "assistant\n<think>\n")), Counter[str]()
    assert chat.sample(talk("Hello", "one two"), counts) == []
    assert counts == {loss_mask.NOT_A_CONTINUATION: 1}


def test_tool_turns_stay_in_the_text_and_out_of_the_loss(speak: Callable[..., Chat]) -> None:
    """A template that renders any role keeps what the tool said; it is the tool's, not the target's."""
    turns = (Turn("user", "a"), Turn("assistant", "b"), Turn("tool", "one"), Turn("assistant", "c"))
    chat = speak(CHATML)
    sample = only(chat.sample(Conversation("c", "all", turns)))
    assert written(chat, sample) == ["b<|im_end|>", "c<|im_end|>"]
    assert "<|im_start|>tool\none<|im_end|>" in chat.tokenizer.decode(sample.input_ids)


def test_tools_that_the_template_does_not_render_are_counted(speak: Callable[..., Chat]) -> None:
    chat, counts = speak(CHATML), Counter[str]()
    assert len(chat.sample(talk("a", "b", tools='[{"name": "f"}]'), counts)) == 1
    assert counts == {loss_mask.UNSAID_TOOLS: 1}


def test_a_sample_without_supervised_tokens_is_counted_and_left_out(
    speak: Callable[..., Chat],
) -> None:
    chat, counts = speak(CHATML, ""), Counter[str]()
    assert chat.sample(talk("Hello", ""), counts) == []
    assert counts[loss_mask.NO_TOKENS] == 1


# ---- borders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trim", [False, True])
def test_a_token_that_the_border_cuts_is_not_supervised(
    trim: bool, speak: Callable[..., Chat], tokenizer: Tokenizer
) -> None:
    """`A: ` and `Hello` are ` Hello` in one token, which the prompt alone does not end with; also where the
    tokenizer leaves its leading space out of the offsets."""
    chat, counts = (
        speak(
            "{% for m in messages %}{{ m.role[0] + ': ' + m.content + '</s>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}",
            "</s>",
        ),
        Counter[str](),
    )
    chat.tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    sample = only(chat.sample(talk("one", "Hello there"), counts))
    assert (" Hello", False) in tokens(chat, sample)
    assert written(chat, sample) == [" there</s>"]
    assert counts == {loss_mask.CUT_TOKEN: 1}


def _extents(encoding: Encoding, text: str) -> list[tuple[int, int]]:
    """Characters of each token, from the bytes that it stands for: a byte-level token has one letter a byte."""
    owner = [i for i, char in enumerate(text) for _ in char.encode()]
    extents, at = [], 0
    for token in encoding.tokens:
        size = len(token.encode()) if token in SPECIAL else len(token)
        extents.append((owner[at], owner[at + size - 1] + 1))
        at += size
    assert at == len(owner)
    return extents


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize(
    "text", ["Hello  there\n\n one 🦜🦜 é two", " a  b   c ", "<s>Hello <|im_end|>\n🦜", "x", "x  "]
)
def test_borders_are_those_of_the_tokens_bytes(trim: bool, text: str, tokenizer: Tokenizer) -> None:
    """At every character: the first token wholly behind it, and the first token with anything behind it."""
    held = tokenizer.post_processor
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    tokenizer.post_processor = held
    extents = _extents(encoding, text)
    for char in range(len(text) + 1):
        inside = next((i for i, (start, _) in enumerate(extents) if start >= char), len(extents))
        outside = next((i for i, (_, stop) in enumerate(extents) if stop > char), len(extents))
        assert first_inside(encoding, char) == inside, char
        assert first_outside(encoding, char) == outside, char


# ---- real templates -------------------------------------------------------------------------------------

CALL = ToolCall("weather", '{"city": "Oslo"}', "call12345")
TOOLS = (
    '[{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}}}}]'
)
TOOL_TURNS = (
    Turn("system", "Be brief."),
    Turn("user", "Weather in Oslo?"),
    Turn("assistant", "", tool_calls=(CALL,)),
    Turn("tool", "3 °C", tool_call_id="call12345", name="weather"),
    Turn("assistant", "It is cold."),
    Turn("user", "Thanks"),
)
REASONED = (
    Turn("user", "2+2?"),
    Turn("assistant", "Four.", reasoning="Easy."),
    Turn("user", "3+3?"),
    Turn("assistant", "Six.", reasoning="Hm."),
)


@pytest.fixture(scope="module")
def real(real_tokenizer: Callable[[str], Path]) -> Callable[..., Chat]:
    made: dict[tuple[str, Thinking], Chat] = {}

    def load(name: str, thinking: Thinking = "strip") -> Chat:
        if (name, thinking) not in made:
            others = [chat for (known, _), chat in made.items() if known == name]
            made[name, thinking] = (
                Chat(others[0].tokenizer, others[0].eos_ids, thinking)
                if others
                else Chat.load(real_tokenizer(name), thinking)
            )
        return made[name, thinking]

    return load


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("llama3_1", ["Hello 🦜.<|eot_id|>", "Naïve,\n\nyes.<|eot_id|>"]),
        ("deepseek_v3", ["Hello 🦜.<｜end▁of▁sentence｜>", "Naïve,\n\nyes.<｜end▁of▁sentence｜>"]),
    ],
)
def test_real_templates_that_keep_their_answers_give_one_sample(
    name: str, answers: list[str], real: Callable[..., Chat]
) -> None:
    """Llama-3.1 and DeepSeek-V3: every answer of a chat in one sample, and its prompt before each."""
    chat, counts = real(name), Counter[str]()
    row = talk("Hi", "Hello 🦜.", "So?", "Naïve,\n\nyes.", system="Be brief.")
    sample = only(chat.sample(row, counts))
    assert written(chat, sample) == answers and not +counts
    ids = sample.input_ids.tolist()
    for k in (2, 4):
        prompt = list(chat.prompt_ids(row.turns[:k]))
        assert ids[: len(prompt)] == prompt and sample.loss_mask[len(prompt)]


def test_llama_borders_token_by_token(real: Callable[..., Chat]) -> None:
    chat = real("llama3_1")
    assert tokens(chat, only(chat.sample(talk("Hi", "Hello."))))[-7:] == [
        *[("<|start_header_id|>", False), ("assistant", False), ("<|end_header_id|>", False)],
        *[("\n\n", False), ("Hello", True), (".", True), ("<|eot_id|>", True)],
    ]


@pytest.mark.parametrize(
    ("thinking", "prompts", "answers"),
    [
        (
            "off",
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            ["Four.<|im_end|>", "Six.<|im_end|>"],
        ),
        (
            "on",
            "<|im_start|>assistant\n",
            [
                "<think>\nEasy.\n</think>\n\nFour.<|im_end|>",
                "<think>\nHm.\n</think>\n\nSix.<|im_end|>",
            ],
        ),
        (
            "strip",
            "<|im_start|>assistant\n",
            [
                "<think>\n\n</think>\n\nFour.<|im_end|>",
                "<think>\n\n</think>\n\nSix.<|im_end|>",
            ],
        ),
    ],
)
def test_qwen3_thinks_as_it_is_told(
    thinking: Thinking, prompts: str, answers: list[str], real: Callable[..., Chat]
) -> None:
    """Qwen3 drops the thoughts of earlier answers: each answer is a sample of its own, from the rendering that
    a server would have sent, and the last one's text holds the earlier answers without thoughts."""
    chat, counts = real("qwen3", thinking), Counter[str]()
    first, second = chat.sample(Conversation("c", "all", REASONED), counts)
    assert written(chat, first) + written(chat, second) == answers
    assert counts == {loss_mask.OWN_SAMPLE: 1}
    for sample, k in ((first, 1), (second, 3)):
        before = stretches(chat, sample)[0][0]
        assert before.endswith(prompts)
        ids = chat.tokenizer.encode(before, add_special_tokens=False)
        assert list(chat.prompt_ids(REASONED[:k])) == ids == sample.input_ids[: len(ids)].tolist()
    assert "<|im_start|>assistant\nFour.<|im_end|>" in chat.tokenizer.decode(second.input_ids)


@pytest.mark.parametrize("name", ["llama3_1", "deepseek_v3"])
def test_reasoning_is_inline_where_the_template_knows_none(
    name: str, real: Callable[..., Chat]
) -> None:
    """`on` writes it before the answer between think marks; off and strip leave it out."""
    on = only(real(name, "on").sample(Conversation("c", "all", REASONED)))
    assert written(real(name), on)[1].startswith("<think>\nHm.\n</think>\n\nSix.")
    for thinking in ("off", "strip"):
        chat = real(name, thinking)
        assert written(chat, only(chat.sample(Conversation("c", "all", REASONED))))[1][:4] == "Six."


def test_qwen3_calls_tools_in_its_own_form(real: Callable[..., Chat]) -> None:
    """The call is what the target writes; the tool's answer is in the text and not supervised."""
    chat = real("qwen3", "off")
    call, answer = chat.sample(Conversation("c", "all", TOOL_TURNS, TOOLS))
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    assert written(chat, call) == [text]
    assert written(chat, answer) == ["It is cold.<|im_end|>"]
    before = stretches(chat, answer)[0][0]
    assert (
        "<tool_response>\n3 °C\n</tool_response>" in before
        and "# Tools" in before
        and text in before
    )
    prompt = chat.prompt_ids(TOOL_TURNS[:2], TOOLS)
    assert call.input_ids[: len(prompt)].tolist() == list(prompt)


def test_qwen3_with_thoughts_keeps_a_chain_of_calls_in_one_sample(
    real: Callable[..., Chat],
) -> None:
    """Thoughts since the last question are kept, so that call and answer stand in one text."""
    turns = list(TOOL_TURNS[:5])
    turns[2] = Turn("assistant", "", reasoning="Ask.", tool_calls=(CALL,))
    turns[4] = Turn("assistant", "It is cold.", reasoning="So.")
    chat = real("qwen3", "on")
    spoken = written(chat, only(chat.sample(Conversation("c", "all", tuple(turns), TOOLS))))
    assert [text.split("\n")[1] for text in spoken] == ["Ask.", "So."]


def test_deepseek_calls_tools_in_its_own_form(real: Callable[..., Chat]) -> None:
    """Its template wants no content and arguments as text, and forgets the end of a single call: that call is
    in the text but not supervised, and counted; two calls have an end."""
    chat, counts = real("deepseek_v3"), Counter[str]()
    sample = only(chat.sample(Conversation("c", "all", TOOL_TURNS), counts))
    assert written(chat, sample) == ["It is cold.<｜end▁of▁sentence｜>"]
    assert counts == {loss_mask.ENDLESS: 1}
    before = stretches(chat, sample)[0][0]
    call = (
        "function<｜tool▁sep｜>weather\n```json\n" + '{"city": "Oslo"}' + "\n```<｜tool▁call▁end｜>"
    )
    assert f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}" in before and "3 °C" in before
    twice = list(TOOL_TURNS)
    twice[2] = Turn("assistant", "", tool_calls=(CALL, CALL))
    sample = only(chat.sample(Conversation("c", "all", tuple(twice))))
    assert written(chat, sample)[0].startswith("<｜tool▁calls▁begin｜>")
    assert written(chat, sample)[0].endswith("<｜tool▁calls▁end｜><｜end▁of▁sentence｜>")


@pytest.mark.parametrize(
    ("name", "turns", "reason"),
    [
        ("llama3_1", TOOL_TURNS, "rows left out: the template does not render tool calls"),
        (
            "deepseek_v3",
            (Turn("user", "a"), Turn("assistant", "b", tool_calls=(CALL,))),
            "rows left out: the template renders no text beside tool calls",
        ),
        (
            "qwen3",
            (Turn("user", "a"), Turn("assistant", "", tool_calls=(ToolCall("f", "{"),))),
            "rows left out: the arguments of a tool call are not JSON",
        ),
    ],
)
def test_calls_that_a_template_would_swallow_leave_the_row_out(
    name: str, turns: tuple[Turn, ...], reason: str, real: Callable[..., Chat]
) -> None:
    """Nothing that an answer says is lost without a word."""
    counts = Counter[str]()
    assert real(name).sample(Conversation("c", "all", turns), counts) == []
    assert counts == {reason: 1}


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "deepseek_v3"])
def test_real_templates_render_as_apply_chat_template_does(
    name: str, real: Callable[..., Chat]
) -> None:
    """The prompt is what transformers, and so a server, makes of the same messages."""
    chat = real(name)
    turns = talk("Hi", "Hello.", "So?", system="Be brief.").turns
    plain = [{"role": t.role, "content": t.content} for t in turns]
    theirs = chat.tokenizer.apply_chat_template(
        plain, add_generation_prompt=True, return_dict=False
    )
    assert list(chat.prompt_ids(turns)) == theirs
