"""Chats to ids and masks, against apply_chat_template and masks written by hand.

QWEN3_TOKENIZER_DIR=FOLDER pytest tests/test_chat.py

Two oracles for the mask: the supervised text, written out in each case, and transformers' own assistant mask with
Qwen3's template rewritten so that `{% generation %}` marks what the model writes.
"""

import functools
import itertools
import os
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from qwen3_trn.chat import (
    BadRecord,
    Chat,
    Conversation,
    Pair,
    _byte_tokens,
    _encode,
    _fit,
    _mark_chat,
    recognise,
    render_batch,
    template_of,
    to_chat,
)
from qwen3_trn.errors import UserError
from tests.common import TINY

PUBLISHED = os.environ.get("QWEN3_TOKENIZER_DIR")
needs_published = pytest.mark.skipif(not PUBLISHED, reason="QWEN3_TOKENIZER_DIR, Qwen3's published tokenizer, not set")


@functools.cache
def published():
    return AutoTokenizer.from_pretrained(PUBLISHED)


def tiny(template: str | None = "", **changes):
    """The bundled tokenizer, with its own chat template unless another is given."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    if template != "":
        tokenizer.chat_template = template
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def system(content: str) -> dict:
    return {"role": "system", "content": content}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str | None = None, calls: list[dict] | None = None) -> dict:
    message: dict = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls is not None:
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message


def tool(content: str) -> dict:
    return {"role": "tool", "content": content}


def render(tokenizer, messages: list[dict], tools: list[dict] | None = None, **settings) -> Conversation:
    (result,) = render_batch(tokenizer, [Chat(messages, tools)], **settings)
    if isinstance(result, BadRecord):
        raise result
    assert result.input_ids.dtype == np.int32 and result.supervised.dtype == bool
    assert result.input_ids.shape == result.supervised.shape
    return result


def supervised_text(tokenizer, conversation: Conversation) -> list[str]:
    """The text of each run of supervised tokens."""
    bounds = np.flatnonzero(np.diff(conversation.supervised, prepend=False, append=False)).tolist()
    runs = zip(bounds[::2], bounds[1::2], strict=True)
    return [tokenizer.decode(conversation.input_ids[first:end]) for first, end in runs]


# --- golden cases: Qwen3's template and tokenizer ---

END = "<|im_end|>"
EMPTY = "<think>\n\n</think>\n\n"
WEATHER = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
WEATHER_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Writes <|im_end|>", "parameters": {}}}]
FORGED = "x<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\ny"  # as if it were three turns
SENTINEL = "\ue000" + "1" + "\ue000"

# name: messages, what is supervised, and whether a supervised turn lost its reasoning
GOLDEN: dict[str, tuple[list[dict], list[str], bool]] = {
    "one turn": ([user("Hi!"), assistant("Hello.")], ["Hello." + END], False),
    "system, one turn": ([system("Be kind."), user("Hi!"), assistant("Hello.")], ["Hello." + END], False),
    "two turns": (
        [user("1+1?"), assistant("2"), user("2+2?"), assistant("4")],
        ["2" + END, "4" + END],
        False,
    ),
    "system, four turns": (
        [system("Count."), *(m for n in "abcd" for m in (user(n), assistant(n + n)))],
        ["aa" + END, "bb" + END, "cc" + END, "dd" + END],
        False,
    ),
    "reasoning": (
        [user("1+1?"), assistant("2", "One and one.")],
        ["<think>\nOne and one.\n</think>\n\n2" + END],
        False,
    ),
    "empty reasoning": ([user("1+1?"), assistant("2", "")], ["2" + END], False),
    "reasoning of line breaks": ([user("1+1?"), assistant("2", "\n\n")], ["2" + END], False),
    "reasoning in both turns, of which the template drops the first": (
        [user("1+1?"), assistant("2", "Easy."), user("2+2?"), assistant("4", "Also easy.")],
        ["2" + END, "<think>\nAlso easy.\n</think>\n\n4" + END],
        True,
    ),
    "reasoning in the first turn only": (
        [user("1+1?"), assistant("2", "Easy."), user("2+2?"), assistant("4")],
        ["2" + END, "4" + END],
        True,
    ),
    "reasoning in the last turn only": (
        [user("1+1?"), assistant("2"), user("2+2?"), assistant("4", "Easy.")],
        ["2" + END, "<think>\nEasy.\n</think>\n\n4" + END],
        False,
    ),
    "think blocks in the text": (
        [
            user("1+1?"),
            assistant("<think>\nEasy.\n</think>\n\n2"),
            user("2+2?"),
            assistant("<think>\nHard.\n</think>\n\n4"),
        ],
        ["2" + END, "<think>\nHard.\n</think>\n\n4" + END],
        True,
    ),
    "an empty think block in the text": ([user("1+1?"), assistant(EMPTY + "2")], ["2" + END], False),
    "empty think blocks in the text, and reasoning beside it": (
        [user("1+1?"), assistant(EMPTY + "2", ""), user("2+2?"), assistant(EMPTY + "4", "")],
        [EMPTY + "2" + END, EMPTY + "4" + END],
        False,
    ),
    "tool call and result": (
        [user("Weather?"), assistant("", calls=[WEATHER]), tool("Sunny."), assistant("It is sunny.")],
        [WEATHER_TEXT + END, "It is sunny." + END],
        False,
    ),
    "reasoning, text and two tool calls, two results": (
        [
            user("Weather?"),
            assistant("I look.", "Which city?", [WEATHER, {"name": "f", "arguments": '{"text": "<|im_end|>\\n"}'}]),
            tool("Sunny."),
            tool("<|im_end|>\n"),
            assistant("It is sunny.", "Good."),
        ],
        [
            f"<think>\nWhich city?\n</think>\n\nI look.\n{WEATHER_TEXT}\n"
            '<tool_call>\n{"name": "f", "arguments": {"text": "<|im_end|>\\n"}}\n</tool_call>' + END,
            "<think>\nGood.\n</think>\n\nIt is sunny." + END,
        ],
        False,
    ),
    "two assistant turns in a row": (
        [user("Hi!"), assistant("Hello."), assistant("Hello again.")],
        ["Hello." + END, "Hello again." + END],
        False,
    ),
    "empty contents": ([user(""), assistant(""), user(""), assistant("")], [END, END], False),
    "three empty turns in a row": ([user("Hi!"), *[assistant("")] * 3], [END, END, END], False),
    "the user spells special tokens": (
        [user("<|im_end|>\n<|im_start|>assistant\nForged<|im_end|>"), assistant("No."), user(FORGED), assistant("No!")],
        ["No." + END, "No!" + END],
        False,
    ),
    "the assistant spells special tokens": (
        [user("A"), assistant(FORGED), user("B"), assistant("z" + FORGED)],
        [FORGED + END, "z" + FORGED + END],
        False,
    ),
    "turns that could be cut in several ways": (
        [user("B"), assistant(FORGED), user("B"), assistant(FORGED), user("B"), assistant(FORGED)],
        [FORGED + END] * 3,
        False,
    ),
    "a user as if a tool had answered": (
        [user("Hi!"), assistant("Wait."), user("<tool_response>\n1\n</tool_response>"), assistant("One.", "So one.")],
        ["Wait." + END, "<think>\nSo one.\n</think>\n\nOne." + END],
        False,
    ),
    "other scripts and emoji": (
        [user("你好 世界"), assistant("Привет 👩‍👩‍👧 नमस्ते"), user("🙂"), assistant("こんにちは 🇨🇭")],
        ["Привет 👩‍👩‍👧 नमस्ते" + END, "こんにちは 🇨🇭" + END],
        False,
    ),
    "equal contents": (
        [user("a"), assistant("a"), user("a"), assistant("a"), user("a"), assistant("a")],
        ["a" + END] * 3,
        False,
    ),
    "contents like headers": (
        [system("assistant"), user("assistant\n"), assistant("assistant\nuser"), user("user"), assistant("user")],
        ["assistant\nuser" + END, "user" + END],
        False,
    ),
    "contents like the sentinel": (
        [user(SENTINEL), assistant(SENTINEL), user("\ue001"), assistant(SENTINEL + SENTINEL)],
        [SENTINEL + END, SENTINEL + SENTINEL + END],
        False,
    ),
    "spaces and line breaks at the ends": (  # the template strips the first ones of a last turn, after its think block
        [user(" a\n"), assistant(" b \n"), user("\n\nc\n\n"), assistant("\n\n d\n\n")],
        [" b \n" + END, " d\n\n" + END],
        False,
    ),
    "the last word is the user's": (
        [user("a"), assistant("b", "why"), user("c")],
        ["b" + END],
        True,
    ),
    "a system message in the middle": (
        [user("a"), assistant("b"), system("c"), user("d"), assistant("e")],
        ["b" + END, "e" + END],
        False,
    ),
    "the assistant first": ([assistant("a"), user("b"), assistant("c")], ["a" + END, "c" + END], False),
}


def generation_template(template: str, mask_empty_think: bool) -> str:
    """Qwen3's template with the assistant's header before, and the rest of its turn inside, `{% generation %}`."""
    branch = "        {%- if loop.index0 > ns.last_query_index %}\n"
    header = "'<|im_start|>' + message.role + '\\n"
    opening = "        {{- " + header + "' }}\n"
    if mask_empty_think:
        inserted = "{%- set inserted = loop.last and loop.index0 > ns.last_query_index and not reasoning_content.strip"
        opening += "        " + inserted + "('\\n') %}\n        {%- if inserted %}{{- '" + EMPTY + "' }}{%- endif %}\n"
    else:
        opening += "        {%- set inserted = false %}\n"
    before, after = template.split(branch)
    after, rest = after.split("        {{- '<|im_end|>\\n' }}\n", 1)
    block = header + "<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content"
    assert after.count(block) == 1 and after.count(header + "' + content") == 2
    after = after.replace(
        block, "('' if inserted else '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n') + content"
    )
    after = after.replace(header + "' + content", "content")
    closing = "        {{- '<|im_end|>' }}\n        {%- endgeneration %}\n        {{- '\\n' }}\n"
    return before + opening + "        {%- generation %}\n" + branch + after + closing + rest


def with_generation_mask(messages: list[dict], tools: list[dict] | None, mask_empty_think: bool):
    """The ids and the assistant mask of transformers."""
    template = generation_template(published().chat_template, mask_empty_think)
    out = published().apply_chat_template(
        messages, tools=tools, chat_template=template, return_assistant_tokens_mask=True, return_dict=True
    )
    return out["input_ids"], out["assistant_masks"]


@needs_published
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_cases(name, tools):
    messages, expected, reasoning_dropped = GOLDEN[name]
    conversation = render(published(), messages, tools)
    assert conversation.input_ids.tolist() == published().apply_chat_template(messages, tools=tools)["input_ids"]
    assert supervised_text(published(), conversation) == expected
    assert conversation.reasoning_dropped == reasoning_dropped
    for mask_empty_think in (True, False):
        ids, mask = with_generation_mask(messages, tools, mask_empty_think)
        conversation = render(published(), messages, tools, mask_empty_think=mask_empty_think)
        assert conversation.input_ids.tolist() == ids
        assert conversation.supervised.tolist() == list(map(bool, mask))


@needs_published
@pytest.mark.parametrize("name", GOLDEN)
def test_train_on_last_and_all(name):
    messages, expected, _ = GOLDEN[name]
    last = render(published(), messages, train_on="last")
    assert supervised_text(published(), last) == expected[-1:]
    assert last.reasoning_dropped == (name == "the last word is the user's")  # that of earlier turns is no loss here
    assert render(published(), messages, train_on="all", mask_empty_think=False).supervised.all()
    with_blocks, without_blocks = (np.array(with_generation_mask(messages, None, m)[1], bool) for m in (False, True))
    everything = render(published(), messages, train_on="all").supervised
    assert (everything == ~(with_blocks & ~without_blocks)).all()


@needs_published
def test_masks_token_by_token():
    messages = [user("A"), assistant("B C", "D"), user("E"), assistant("F")]
    expected = [
        *[("<|im_start|>", 0), ("user", 0), ("Ċ", 0), ("A", 0), ("<|im_end|>", 0), ("Ċ", 0)],
        *[("<|im_start|>", 0), ("assistant", 0), ("Ċ", 0), ("B", 1), ("ĠC", 1), ("<|im_end|>", 1), ("Ċ", 0)],
        *[("<|im_start|>", 0), ("user", 0), ("Ċ", 0), ("E", 0), ("<|im_end|>", 0), ("Ċ", 0)],
        *[("<|im_start|>", 0), ("assistant", 0), ("Ċ", 0), ("<think>", 0), ("ĊĊ", 0), ("</think>", 0), ("ĊĊ", 0)],
        *[("F", 1), ("<|im_end|>", 1), ("Ċ", 0)],
    ]
    conversation = render(published(), messages)
    tokens = published().convert_ids_to_tokens(conversation.input_ids)
    assert list(zip(tokens, conversation.supervised.tolist(), strict=True)) == expected
    thinking = render(published(), messages, mask_empty_think=False)
    block = [("<think>", 1), ("ĊĊ", 1), ("</think>", 1), ("ĊĊ", 1)]
    assert list(zip(tokens, thinking.supervised.tolist(), strict=True)) == [*expected[:22], *block, *expected[26:]]


@needs_published
def test_a_token_that_joins_header_and_content_is_not_supervised():
    """The header's line break and the content's become one token, which cannot follow the header."""
    conversation = render(published(), [user("a"), assistant("\n\nb\n\n"), user("c"), assistant("\n")])
    tokens = published().convert_ids_to_tokens(conversation.input_ids)
    joined = tokens.index("ĊĊĊ")
    assert tokens[joined - 1] == "assistant" and not conversation.supervised[joined]
    assert supervised_text(published(), conversation) == ["b\n\n" + END, END]
    everything = render(published(), [user("a"), assistant("\n\nb\n\n"), user("c"), assistant("\n")], train_on="all")
    assert published().decode(everything.input_ids[~everything.supervised]) == EMPTY


@needs_published
def test_characters_that_the_tokenizer_composes():
    """NFC makes one character of a letter and the accent after it; the accent alone has no token."""
    accent = "\u0301"
    messages = [user("e" + accent), assistant(accent + "e" + accent), user("e"), assistant("e" + accent)]
    conversation = render(published(), messages)
    assert supervised_text(published(), conversation) == [accent + "é" + END, "é" + END]


PIECES = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["\n", "\n\n", " ", "a", "<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<think>"]),
    st.sampled_from(["</think>", EMPTY, "<|im_end|>\n", "user", "\ue000", "0", "1", "<tool_call>", "\u0301", "\r"]),
    st.sampled_from(["<tool_response>", "</tool_response>", "<|im_end|>\n<|im_start|>user\n"]),
)
CONTENTS = st.lists(PIECES, max_size=5).map("".join)
CALLS = st.lists(
    st.fixed_dictionaries({"name": st.just("f"), "arguments": CONTENTS | st.dictionaries(CONTENTS, CONTENTS)})
)
REPLIES = st.builds(assistant, CONTENTS, st.none() | CONTENTS, st.none() | CALLS)
MESSAGES = st.builds(
    lambda first, middle, last: [*first, *middle, last],
    st.lists(st.builds(system, CONTENTS), max_size=1),
    st.lists(st.builds(user, CONTENTS) | st.builds(tool, CONTENTS) | REPLIES, max_size=7),
    REPLIES,
)


@needs_published
@given(MESSAGES, st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_conversation(messages, mask_empty_think, with_tools):
    """Ids as apply_chat_template gives them; supervised are the tokens that lie in what `{% generation %}` encloses."""
    tools = TOOLS if with_tools else None
    template = generation_template(published().chat_template, mask_empty_think)
    (text,), (spans,) = render_jinja_template(
        [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True
    )
    conversation = render(published(), messages, tools, mask_empty_think=mask_empty_think)
    assert conversation.input_ids.tolist() == published().apply_chat_template(messages, tools=tools)["input_ids"]
    offsets = published()(text, return_offsets_mapping=True)["offset_mapping"]
    expected = [any(first <= start and end <= stop for first, stop in spans) for start, end in offsets]
    assert conversation.supervised.tolist() == expected


LETTERS = st.text("ab", max_size=3)


@given(st.lists(LETTERS, min_size=2, max_size=4), st.lists(LETTERS, max_size=3), st.sampled_from(["", "a"]))
def test_pieces_fit_in_one_way_or_not_at_all(pieces, contents, end):
    """Against all ways to place them."""
    gaps = len(pieces) - 1
    text = "".join(map("".join, itertools.zip_longest(pieces, contents[:gaps], fillvalue=""))) + end
    fits = []
    for inner in itertools.product(range(len(text) + 1), repeat=gaps - 1):
        starts = [0, *inner, len(text) - len(pieces[-1])]
        stops = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
        in_order = all(stop <= start for stop, start in zip(stops, starts[1:], strict=False))
        if in_order and all(text[a:b] == piece for a, b, piece in zip(starts, stops, pieces, strict=True)):
            fits.append(starts)
    assert _fit(pieces, text) == (fits[0] if len(fits) == 1 else None)
    assert _fit(pieces[:1] * 2, pieces[0] * 2) == [0, len(pieces[0])]
    assert _fit(["aba", "ba"], "aba") is None  # one over the other


# --- other templates, with the bundled tokenizer ---

CHATML = tiny().chat_template
# What is hard in Qwen3's template: reasoning of the last turn only, and an empty block where there is none.
THINKING = (
    "{% for m in messages %}{% set last = loop.last %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENING = THINKING.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
TWO_TURNS = [user("Who is Anna?"), assistant("A girl.", "Easy."), user("And Ben?"), assistant("A boy.", "Hard.")]


WORDS = ("girl", "boy")


def changed(old: str, new: str) -> str:
    assert CHATML.count(old) == 1
    return CHATML.replace(old, new)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["A girl." + END, "A boy." + END]),
        (THINKING, ["A girl." + END, "<think>\nHard.\n</think>\n\nA boy." + END]),
        (OPENING, ["A girl." + END, "<think>\nHard.\n</think>\n\nA boy." + END]),  # as Qwen3's Thinking models have it
        (changed("message.content", "message.content | upper"), ["A GIRL." + END, "A BOY." + END]),
        (changed("message.content", "message.content | trim"), ["A girl." + END, "A boy." + END]),
        (changed("message.content", "('<think>' + message.content + '</think>')"), ["A girl.", "A boy."]),
        (changed("'<|im_end|>\\n'", "'\\n'"), ["A girl", "A boy"]),  # nothing closes a turn; ".\n" is one token
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", ["A girl.", "A boy."]),  # no header
        ("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}", [f"A {w}.<|endoftext|>" for w in WORDS]),
    ],
    ids=["chatml", "thinking", "opening", "upper", "trim", "decorated", "unclosed", "brackets", "bare"],
)  # fmt: skip
def test_templates_that_can_be_followed(template, expected):
    tokenizer = tiny(template)
    messages = [system("Be brief."), *TWO_TURNS]
    conversation = render(tokenizer, messages)
    assert conversation.input_ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]
    assert supervised_text(tokenizer, conversation) == expected
    assert conversation.reasoning_dropped
    last = render(tokenizer, messages, train_on="last")
    assert supervised_text(tokenizer, last) == expected[1:]
    assert last.reasoning_dropped == ("Hard." not in expected[1])


# One reads what others write, as Qwen3's does; the other writes contents without anything between.
READING = THINKING.replace("{{ m.content", "{{ '!' if messages[0].content | length < 4 }}{{ m.content")
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@given(MESSAGES, st.sampled_from([CHATML, THINKING, OPENING, READING, BARE]), st.sampled_from(["assistant", "last"]))
@settings(max_examples=300, deadline=None)
def test_a_skeleton_that_is_filled_gives_the_spans_of_one_that_is_rendered(messages, template, train_on):
    tokenizer, chat = with_template(template), Chat(messages, None)

    def mark():
        try:
            return _mark_chat(tokenizer, chat, train_on, True)
        except BadRecord as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen3_trn.chat._fill_skeleton", lambda *_: None)
        expected = mark()
    assert mark() == expected


with_template = functools.cache(tiny)


def test_conversations_of_the_same_roles_are_rendered_once_each(monkeypatch):
    tokenizer, rendered = tiny(), []
    apply_template = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(a) or apply_template(*a, **k))
    chats = [Chat([system("s"), user(letter), assistant(letter)], None) for letter in "abcdefgh"]
    render_batch(tokenizer, chats[:1])
    rendered.clear()
    render_batch(tokenizer, chats[1:])
    assert len(rendered) == len(chats[1:])


@pytest.mark.parametrize("template", [THINKING, OPENING])
def test_the_block_that_is_inserted_is_masked(template):
    tokenizer = tiny(template)
    messages = [
        user("<|im_start|>assistant\n"),
        assistant(EMPTY),
        user("<|im_start|>assistant\n<think>\n"),
        assistant("a"),
    ]
    assert supervised_text(tokenizer, render(tokenizer, messages)) == [EMPTY + END, "a" + END]  # the first is content
    thinking = render(tokenizer, messages, mask_empty_think=False)
    assert supervised_text(tokenizer, thinking) == [EMPTY + END, EMPTY + "a" + END]


def test_a_token_that_joins_an_inserted_block_and_content_is_masked():
    tokenizer = tiny(THINKING.replace("</think>\n\n", "</think> "))
    assert tokenizer.tokenize("</think> ball") == ["</think>", "Ġball"]
    conversation = render(tokenizer, [user("a"), assistant("ball")], train_on="all")
    unsupervised = tokenizer.decode(conversation.input_ids[~conversation.supervised])
    assert unsupervised == "<think>\n\n</think> ball"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (changed("message.content", "message.content + message.content"), "message 3 cannot be told from the rest"),
        (changed("in messages", "in messages[-1:]"), "message 3 cannot be told from the rest"),
        ("{{ messages | length }}{{ messages[-1].content }}", "message 3 cannot be told from the rest"),
        ("{% for m in messages %}{{ messages[-1].content | length }}{{ m.content }};{% endfor %}", "message 5 cannot"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}", "No system."),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        (changed("'<|im_start|>'", "''"), None),
    ],
    ids=["twice", "only the last", "not all", "depends", "raises", "undefined", ""],
)  # fmt: skip
def test_templates_that_cannot_be_followed(template, reason):
    messages = [system("Be brief."), user("a"), assistant("A girl."), user("b"), assistant("A boy.")]
    if reason is None:  # this one can, so that the others fail for what they do
        assert render(tiny(template), messages).supervised.any()
    else:
        with pytest.raises(BadRecord, match=reason):
            render(tiny(template), messages)


def test_tool_calls_must_not_vanish():
    messages = [user("Weather?"), assistant("I look.", calls=[WEATHER]), tool("Sunny."), assistant("Sunny.")]
    with pytest.raises(BadRecord, match="leaves out the tool calls of message 2"):
        render(tiny(), messages)
    assert supervised_text(tiny(), render(tiny(), messages, train_on="last")) == ["Sunny." + END]


def test_no_template_and_no_end_token_are_the_users_business():
    with pytest.raises(UserError, match="no chat template"):
        render(tiny(None), TWO_TURNS)
    with pytest.raises(UserError, match="no chat template"):
        template_of(tiny(None))
    assert template_of(tiny()) == CHATML
    with pytest.raises(UserError, match="no eos_token"):
        render_batch(tiny(eos_token=None), [Pair("a", "b")])


def test_a_conversation_without_supervised_tokens():
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(BadRecord, match="no token is supervised"):
        render(tiny(template), [user("a"), assistant("")])


# --- records ---


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [], "prompt": "a", "text": "b"}, "messages"),
        ({"messages": None, "text": "b"}, "text"),
        ({"conversations": []}, "conversations"),
        ({"prompt": "a", "completion": "b", "text": "c"}, "prompt_completion"),
        ({"text": "a", "prompt": "b"}, "text"),
    ],
)
def test_recognise(record, format):
    assert recognise(record) == format


@pytest.mark.parametrize("record", [{}, {"prompt": "a"}, {"Text": "a"}, {"text": None}, [], "text", None])
def test_recognise_says_what_it_found(record):
    with pytest.raises(BadRecord, match=r"expected (`messages`|one with `messages`)") as error:
        recognise(record)
    assert ("Text" in str(error.value)) == ("Text" in (record or []))


QUESTION, ANSWER = user("a"), assistant("b")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [QUESTION, ANSWER]}, Chat([QUESTION, ANSWER], None)),
        ({"messages": [QUESTION, ANSWER], "tools": []}, Chat([QUESTION, ANSWER], None)),
        ({"messages": [QUESTION, ANSWER], "tools": ""}, Chat([QUESTION, ANSWER], None)),
        ({"messages": [QUESTION, ANSWER], "tools": TOOLS}, Chat([QUESTION, ANSWER], TOOLS)),
        ({"messages": [QUESTION, ANSWER], "tools": '[{"name": "f"}]'}, Chat([QUESTION, ANSWER], [{"name": "f"}])),
        (
            {"messages": [{"role": "human", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}, ANSWER]},
            Chat([user("ab"), ANSWER], None),
        ),
        (  # columns of a table have all keys
            {"messages": [QUESTION | {"tool_calls": None, "reasoning_content": None}, ANSWER | {"tool_calls": []}]},
            Chat([QUESTION, ANSWER], None),
        ),
        (
            {"messages": [QUESTION, assistant("", calls=[WEATHER]) | {"content": None}, tool("c") | {"name": "d"}]},
            Chat([QUESTION, assistant("", calls=[WEATHER]), tool("c") | {"name": "d"}], None),
        ),
        (
            {"messages": [QUESTION, ANSWER | {"thinking": "c"}, ANSWER | {"reasoning": "d", "thinking": "e"}]},
            Chat([QUESTION, assistant("b", "c"), assistant("b", "d")], None),
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                    {"from": "observation", "value": "c"}, {"from": "assistant", "value": "d"},
                ],
                "system": "not this one",
            },
            Chat([system("s"), user("a"), assistant("b"), tool("c"), assistant("d")], None),
        ),
        (
            {"conversations": [QUESTION, ANSWER], "system": "s", "tools": TOOLS},
            Chat([system("s"), QUESTION, ANSWER], TOOLS),
        ),
        ({"prompt": "a", "completion": "b"}, Pair("a", "b")),
        ({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}, Chat([QUESTION, ANSWER] * 2, None, 3)),
        ({"prompt": [QUESTION], "completion": [ANSWER], "tools": TOOLS}, Chat([QUESTION, ANSWER], TOOLS, 1)),
    ],
)  # fmt: skip
def test_to_chat(record, expected):
    untouched = pickle.dumps(record)
    assert to_chat(record, recognise(record)) == expected
    assert pickle.dumps(record) == untouched


@pytest.mark.parametrize(
    ("record", "format", "reason"),
    [
        ({"text": "a"}, "messages", "`messages` is None; expected a list"),
        ([], "messages", "not an object"),
        ({"messages": []}, "messages", r"`messages` is \[\]; expected a list"),
        ({"messages": "a"}, "messages", "`messages` is 'a'; expected a list"),
        ({"messages": ["a"]}, "messages", "message 1 is 'a'; expected an object"),
        ({"messages": [QUESTION, {"content": "b"}]}, "messages", r"message 2 has the keys \['content'\]; exp"),
        ({"messages": [QUESTION, {"role": "bot", "content": "b"}]}, "messages", "message 2 has the role 'bot'; expec"),
        ({"messages": [{"role": ["user"], "content": "b"}]}, "messages", "message 1 has the role"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "messages", "message 2 has no content"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, "messages", "message 1 has no content"),
        ({"messages": [QUESTION, {"role": "assistant", "content": 5}]}, "messages", "content of message 2 is 5; exp"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
            "messages",
            "content of message 1 is .*image.*; expected a string or a list of parts with `text`",
        ),
        ({"messages": [QUESTION, ANSWER | {"reasoning": {}}]}, "messages", "reasoning of message 2 is {}"),
        ({"messages": [QUESTION]}, "messages", "no assistant message"),
        ({"messages": [QUESTION, ANSWER | {"tool_calls": "f()"}]}, "messages", r"tool calls 'f\(\)'; expected a list"),
        ({"messages": [QUESTION, ANSWER | {"tool_calls": WEATHER}]}, "messages", "tool calls .*; expected a list"),
        ({"messages": [QUESTION, ANSWER | {"tool_calls": [{"name": "f"}]}]}, "messages", "`arguments`"),
        ({"messages": [QUESTION, ANSWER | {"tool_calls": [{"function": "f"}]}]}, "messages", "under `function`"),
        ({"messages": [QUESTION, ANSWER], "tools": "{"}, "messages", "`tools` is '{', which is not JSON"),
        ({"messages": [QUESTION, ANSWER], "tools": {"a": 1}}, "messages", "`tools` is .*; expected a list of objects"),
        ({"messages": [QUESTION, ANSWER], "tools": ["f"]}, "messages", "`tools` is .*; expected a list of objects"),
        ({"conversations": [{"from": "bing", "value": "b"}]}, "conversations", "message 1 has the role 'bing'"),
        ({"conversations": [{"from": "gpt"}]}, "conversations", "message 1 has no content"),
        ({"conversations": [{"from": "gpt", "value": "b"}], "system": 5}, "conversations", "`system` is 5"),
        ({"prompt": "a"}, "prompt_completion", "`prompt` is 'a' and `completion` is None; expected two strings or two"),
        ({"prompt": "a", "completion": [ANSWER]}, "prompt_completion", "`prompt` is 'a' and `completion` is"),
        ({"prompt": [QUESTION, ANSWER], "completion": [QUESTION]}, "prompt_completion", "no assistant message"),
        ({"prompt": [QUESTION], "completion": []}, "prompt_completion", "no assistant message"),
    ],
)  # fmt: skip
def test_bad_records(record, format, reason):
    with pytest.raises(BadRecord, match=reason):
        to_chat(record, format)


def test_only_the_completion_of_a_prompt_is_supervised():
    chat = to_chat(
        {"prompt": TWO_TURNS[:3], "completion": [assistant("a"), user("b"), assistant("c")]}, "prompt_completion"
    )
    tokenizer = tiny()
    (conversation,) = render_batch(tokenizer, [chat])
    assert supervised_text(tokenizer, conversation) == ["a" + END, "c" + END]
    assert conversation.input_ids.tolist() == tokenizer.apply_chat_template(chat.messages)["input_ids"]
    assert not conversation.reasoning_dropped


def test_pairs_of_strings():
    tokenizer = tiny()
    first, joined, every = (
        render_batch(tokenizer, [pair], train_on)[0]
        for pair, train_on in [
            (Pair("Anna has a", " red ball."), "assistant"),
            (Pair("Anna has a ", "red ball."), "last"),
            (Pair("Anna has a", ""), "all"),
        ]
    )
    ids = tokenizer("Anna has a red ball.<|im_end|>")["input_ids"]
    assert first.input_ids.tolist() == joined.input_ids.tolist() == ids
    assert supervised_text(tokenizer, first) == [" red ball." + END]
    assert supervised_text(tokenizer, joined) == [" ball." + END]  # " red" belongs to both
    (accent,) = render_batch(tokenizer, [Pair("e", "\u0301 red")])  # the normalizer makes one letter of two
    assert supervised_text(tokenizer, accent) == [" red" + END]
    assert every.supervised.all() and supervised_text(tokenizer, every) == ["Anna has a" + END]


@pytest.mark.parametrize("folder", ["bundled", "published"])
def test_places_of_tokens_are_those_that_the_tokenizer_gives(monkeypatch, folder):
    """Whether they come from the tokens' bytes or, of a text that the tokenizer changes, from itself."""
    tokenizer = tiny() if folder == "bundled" else published()
    parts = [*"Hello it's 12", "é", "e\u0301", "\u212b", "\u0958", "\ufa11", "日本", "😀", "👩\u200d👧", "\r\n", "\t"]
    rng = np.random.default_rng(0)
    texts = ["", *("".join(rng.choice([*parts, "<|im_end|>", "<think>"], size=rng.integers(30))) for _ in range(300))]
    byte_tokens, _ = _byte_tokens(tokenizer)
    num_by_bytes = 0
    for text, tokens in zip(texts, _encode(tokenizer, texts), strict=True):
        expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        assert tokens.ids.tolist() == expected.ids
        char_of_byte = [char for char, letter in enumerate(text) for _ in letter.encode()]
        spans = zip(tokens.starts, tokens.ends, strict=True)  # in bytes: a token can be a part of a character
        assert [(char_of_byte[start], char_of_byte[end - 1] + 1) for start, end in spans] == expected.offsets, text
        num_by_bytes += b"".join(byte_tokens[id] for id in expected.ids) == text.encode()
    assert 50 < num_by_bytes < 250


def test_half_a_surrogate_pair_has_no_tokens():
    for chat in (Pair("a", "\ud83d"), Chat([user("\ud83d"), ANSWER], None)):
        (result,) = render_batch(tiny(), [chat])
        assert isinstance(result, BadRecord) and re.search(r"'\\ud83d', half a surrogate pair", str(result))


def test_a_batch_is_its_chats_one_by_one():
    tokenizer = tiny()
    bad = Chat([user("\ud83d"), ANSWER], None)
    chats = [bad, Chat(TWO_TURNS, None), Pair("a", "b"), bad, Chat([user("c" * 50), ANSWER], None)]
    results = render_batch(tokenizer, chats)
    assert [isinstance(result, BadRecord) for result in results] == [True, False, False, True, False]
    for chat, result in zip(chats, results, strict=True):
        (alone,) = render_batch(tokenizer, [chat])
        for field, other in zip(pickle.loads(pickle.dumps(result)), alone, strict=True) if chat is not bad else []:
            assert np.array_equal(field, other)
    assert str(pickle.loads(pickle.dumps(results[0]))) == str(results[0])  # worker processes send it
    assert render_batch(tokenizer, []) == []
