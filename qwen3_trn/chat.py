"""Conversations to token ids and the mask of supervised tokens.

    python - <<END
    from transformers import AutoTokenizer
    from qwen3_trn.chat import recognise, render_batch, to_chat
    tokenizer = AutoTokenizer.from_pretrained("assets/tiny")
    record = {"messages": [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]}
    (conversation,) = render_batch(tokenizer, [to_chat(record, recognise(record))])
    print(tokenizer.convert_ids_to_tokens(conversation.input_ids[conversation.supervised]))
    END

The ids are those of the whole conversation, rendered once by the tokenizer's own chat template. The template may change
what it is given (Qwen3's drops the reasoning of earlier turns and inserts empty think blocks), so the turns are found
neither by their content nor from prefixes of the conversation. It is rendered a second time, with a sentinel in place
of each assistant turn. The pieces between the sentinels must be in the first text too, in this order and in one way
only. What lies between them there is what the template made of the turns. Where the template writes all contents as
they are, which is checked, a second rendering serves all conversations of the same roles.

A turn begins after the header that asks for it, which is the template's generation prompt, and ends with the special
token that closes it: `<|im_start|>assistant\\n` is not supervised, `<|im_end|>` is, the line break after it is not. A
token is supervised if all its characters are. One that joins the line break of the header and one of the content is
not: when the model writes, the header is already there.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from qwen3_trn.errors import UserError

Format = Literal["messages", "conversations", "prompt_completion", "text"]
TrainOn = Literal["assistant", "last", "all"]
Long = Literal["drop", "truncate", "error"]  # what happens to a conversation that does not fit into a row

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
         "tool": "tool", "function": "tool", "observation": "tool"}  # fmt: skip
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # the first is the one that Qwen3's template reads


class BadRecord(Exception):
    """A record that cannot be trained on: what was found, what was expected. The caller knows the file and line."""


class Chat(NamedTuple):
    """A conversation for the tokenizer's chat template."""

    messages: list[dict[str, Any]]  # with Hugging Face's keys; each `content` a string
    tools: list[dict[str, Any]] | None
    num_prompt: int = 0  # the assistant turns among the first messages that are not supervised


class Pair(NamedTuple):
    """Plain text that goes past the chat template."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """What the trainer sees of a Chat or Pair."""

    input_ids: np.ndarray  # int32 [T]
    supervised: np.ndarray  # bool [T]: token t is a target, to be predicted from those before it
    reasoning_dropped: bool  # the template left out the reasoning of a supervised turn


# --- records to chats ---


def recognise(record: Any) -> Format:
    """The format of a record, by its keys. Raises BadRecord if no format has them."""
    _check_record(record)
    filled = {key for key, value in record.items() if value is not None}
    if "messages" in filled:
        return "messages"
    if "conversations" in filled:
        return "conversations"
    if {"prompt", "completion"} <= filled:
        return "prompt_completion"
    if "text" in filled:
        return "text"
    raise BadRecord(
        f"a record with {_keys(record)}; expected `messages`, `conversations`, `prompt` and `completion`, or `text`. "
        "Rename the keys."
    )


def to_chat(record: dict[str, Any], format: Format) -> Chat | Pair:
    """A record of one of the three chat formats, checked and brought into Hugging Face's form.

    messages: `messages`, a list of {role, content}, with `tool_calls` and `reasoning_content` where an assistant turn
        has them, and `tools` beside it, a list or its JSON. Roles are the keys of ROLES. Content is a string, or a list
        of text parts, which are joined; beside tool calls it may be missing. A key with the value null is as good as
        none.
    conversations: ShareGPT's list of {from, value}, or {role, content}; `system` and `tools` beside it.
    prompt_completion: two lists of messages, of which only the second's turns are supervised, or two strings.
    Raises BadRecord for anything else, and for a conversation without an assistant turn to learn from.
    """
    _check_record(record)
    if format == "prompt_completion":
        prompt, completion = record.get("prompt"), record.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return Pair(prompt, completion)
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            raise BadRecord(
                f"`prompt` is {_short(prompt)} and `completion` is {_short(completion)}; expected two strings or two "
                "lists of messages."
            )
        chat = _to_chat({"messages": prompt + completion, "tools": record.get("tools")}, "messages")
        chat = chat._replace(num_prompt=len(prompt))
    else:
        chat = _to_chat(record, format)
    if not _assistant_indices(chat):
        raise BadRecord("no assistant message; there is nothing to learn from. Add the reply, or remove the record.")
    return chat


def _check_record(record: Any) -> None:
    if not isinstance(record, dict):
        raise BadRecord(f"{_short(record)} is not an object; expected one with `messages`, or with `text`.")


def _to_chat(record: dict[str, Any], key: str) -> Chat:
    messages = record.get(key)
    if not isinstance(messages, list) or not messages:
        raise BadRecord(f"`{key}` is {_short(messages)}; expected a list of messages.")
    messages = [_to_message(message, f"message {number}") for number, message in enumerate(messages, start=1)]
    if key == "conversations" and record.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _to_text(record["system"], "`system`")})
    return Chat(messages, _to_tools(record.get("tools")))


def _to_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRecord(f"{where} is {_short(message)}; expected an object with `role` and `content`.")
    message = {key: value for key, value in message.items() if value is not None}
    if "from" in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    if "role" not in message:
        raise BadRecord(f"{where} has {_keys(message)}; expected `role` and `content`.")
    if not isinstance(message["role"], str) or message["role"] not in ROLES:
        raise BadRecord(f"{where} has the role {_short(message['role'])}; expected one of {', '.join(ROLES)}.")
    message["role"] = ROLES[message["role"]]

    reasonings = [message.pop(key) for key in REASONING_KEYS if key in message]
    if reasonings:
        message["reasoning_content"] = _to_text(reasonings[0], f"the reasoning of {where}")
    tool_calls = message.pop("tool_calls", None)
    if tool_calls:
        if not isinstance(tool_calls, list) or not all(map(_is_tool_call, tool_calls)):
            raise BadRecord(
                f"{where} has the tool calls {_short(tool_calls)}; expected a list of objects, each with a string "
                "`name` and with `arguments`, an object or its JSON; these two may stand under `function`."
            )
        message["tool_calls"] = tool_calls
    if message.get("content") is None and tool_calls:
        message["content"] = ""
    if message.get("content") is None:
        raise BadRecord(f"{where} has no content; expected a string. Use an empty one if it is meant to be empty.")
    message["content"] = _to_text(message["content"], f"the content of {where}")
    return message


def _to_text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    raise BadRecord(f"{where} is {_short(value)}; expected a string or a list of parts with `text`.")


def _to_tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise BadRecord(f"`tools` is {_short(tools)}, which is not JSON: {error}.") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord(f"`tools` is {_short(tools)}; expected a list of objects, or its JSON.")
    return tools


def _is_tool_call(call: Any) -> bool:
    function = call.get("function") or call if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict | str)
    )


def _assistant_indices(chat: Chat) -> list[int]:
    """The indices of the messages that may be supervised."""
    return [
        index
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant" and index >= chat.num_prompt
    ]


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _keys(record: dict) -> str:
    return f"the keys {_short(sorted(map(str, record)))}"


# --- chats to text and the spans of it that are supervised ---


class _Edges(NamedTuple):
    """What the template writes around the content of an assistant message."""

    before: re.Pattern  # the end of that: the header and, in group 1, the empty think block that may follow it
    after: re.Pattern  # the start of that: a special token


class _Turn(NamedTuple):
    """Where an assistant message stands in the rendered text, in characters."""

    start: int  # after the header
    end: int
    closed: int  # after the special token that closes the turn, if there is one
    empty_think: str  # the block that the template inserts at `start` if the message has no reasoning


class _Marked(NamedTuple):
    text: str
    supervised: list[tuple[int, int]]
    masked: list[tuple[int, int]]  # what is not supervised of that, after all
    reasoning_dropped: bool


def template_of(tokenizer) -> str:
    """The text of the tokenizer's chat template. Raises UserError if it has none."""
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template, which conversations need. Put the chat_template.jinja of a Qwen3 "
            "instruct model beside its tokenizer.json, or train on plain `text`."
        )
    return str(tokenizer.chat_template)


def find_end_of_turn(tokenizer) -> str | None:
    """The special token that closes an assistant's turn; None if the chat template has none, or is missing."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    (conversation,) = render_batch(tokenizer, [Chat(turns, None)])
    if isinstance(conversation, BadRecord):
        return None
    last = tokenizer.added_tokens_decoder.get(int(conversation.input_ids[conversation.supervised][-1]))
    return last.content if last and last.special else None


def _mark_pair(tokenizer, pair: Pair, train_on: TrainOn) -> _Marked:
    if not tokenizer.eos_token:
        raise UserError("the tokenizer has no eos_token, with which the `completion` of a plain pair ends.")
    text = pair.prompt + pair.completion + tokenizer.eos_token
    return _Marked(text, [(0 if train_on == "all" else len(pair.prompt), len(text))], [], False)


def _mark_chat(tokenizer, chat: Chat, train_on: TrainOn, mask_empty_think: bool) -> _Marked:
    edges = _turn_edges(tokenizer, template_of(tokenizer))
    text = _apply_template(tokenizer, chat.messages, chat.tools)
    indices = _assistant_indices(chat)[-1:] if train_on == "last" else _assistant_indices(chat)
    turns = _find_turns(tokenizer, edges, chat, text, indices)
    if turns is None:  # there may be several ways to fit them in; for one turn at a time there is only one
        turns = []
        for index in indices:
            found = _find_turns(tokenizer, edges, chat, text, [index])
            if found is None:
                raise BadRecord(
                    f"message {index + 1} cannot be told from the rest of what the chat template writes; expected a "
                    "template that writes each assistant message once, in text that does not depend on it."
                )
            turns += found

    masked, reasoning_dropped = [], False
    for index, turn in zip(indices, turns, strict=True):
        message, body = chat.messages[index], text[turn.start : turn.end]
        if mask_empty_think and turn.empty_think and body.startswith(turn.empty_think):
            masked.append((turn.start, turn.start + len(turn.empty_think)))
        inline_reasoning = message["content"].rpartition("</think>")[0].rpartition("<think>")[2]
        reasoning_dropped |= (message.get("reasoning_content") or inline_reasoning).strip() not in body
        for call in message.get("tool_calls", []):
            if (call.get("function") or call)["name"] not in body:
                raise BadRecord(f"the chat template leaves out the tool calls of message {index + 1}.")
    supervised = [(0, len(text))] if train_on == "all" else [(turn.start, turn.closed) for turn in turns]
    return _Marked(text, supervised, masked, reasoning_dropped)


def _find_turns(tokenizer, edges: _Edges, chat: Chat, text: str, indices: Sequence[int]) -> list[_Turn] | None:
    """Where the messages at `indices` stand in `text`, the rendering of `chat`; None if that is not certain."""
    messages = list(chat.messages)
    for index in indices:
        messages[index] = {k: v for k, v in messages[index].items() if k not in ("reasoning_content", "tool_calls")}
    fixed = _fill_skeleton(tokenizer, messages, chat.tools, text, indices)
    fixed = fixed or _render_skeleton(tokenizer, messages, chat.tools, text, indices)
    if fixed is None:
        return None
    empty_thinks = []
    for k in range(len(indices)):
        match = edges.before.search(fixed[k])
        empty_thinks.append(match[1] if match else "")
        fixed[k] = fixed[k].removesuffix(empty_thinks[k])
    starts = _fit(fixed, text)
    if starts is None:
        return None
    turns = []
    for k, empty_think in enumerate(empty_thinks):
        start, end = starts[k] + len(fixed[k]), starts[k + 1]
        closing = edges.after.match(fixed[k + 1])
        turns.append(_Turn(start, end, end + (len(closing[0]) if closing else 0), empty_think))
    return turns


def _render_skeleton(
    tokenizer, messages: Sequence[dict], tools: list | None, text: str, indices: Sequence[int]
) -> list[str] | None:
    """What the template writes before, between and after the contents of the messages at `indices`.

    Sentinels that are not in `text` show it, in place of the contents. None if the template does not write each once,
    in order.
    """
    mark = next(mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in text)  # private use: no meaning
    marked = list(messages)
    for index in indices:
        marked[index] = messages[index] | {"content": f"{mark}{index}{mark}"}
    pieces = re.split(f"{mark}([0-9]+){mark}", _apply_template(tokenizer, marked, tools))
    return pieces[::2] if pieces[1::2] == list(map(str, indices)) else None


def _fill_skeleton(
    tokenizer, messages: Sequence[dict], tools: list | None, text: str, indices: Sequence[int]
) -> list[str] | None:
    """The skeleton without a rendering: that of these roles, in which the other messages' contents are filled in.

    None unless it is certain: with all contents filled in, it has to be `text`. The template then writes the contents
    as they are, between the same pieces as it writes any.
    """
    if tools or any(message.keys() != {"role", "content"} for message in messages):
        return None
    pieces = _skeleton_of(tokenizer, template_of(tokenizer), tuple(message["role"] for message in messages))
    if pieces is None:
        return None
    filled = [pieces[0]]
    for message, piece in zip(messages, pieces[1:], strict=True):
        filled += message["content"], piece
    if "".join(filled) != text:
        return None
    bounds = [-1, *(2 * index + 1 for index in indices), len(filled)]
    return ["".join(filled[start + 1 : end]) for start, end in itertools.pairwise(bounds)]


@functools.lru_cache(maxsize=1000)
def _skeleton_of(tokenizer, template: str, roles: tuple[str, ...]) -> list[str] | None:
    messages = [{"role": role, "content": ""} for role in roles]
    try:
        return _render_skeleton(tokenizer, messages, None, template, range(len(roles)))
    except BadRecord:  # it does not take every content
        return None


def _fit(pieces: Sequence[str], text: str) -> list[int] | None:
    """Where two or more pieces start in `text`, which begins and ends with the outer ones and holds them in order.

    None if there is no such fit or more than one: if each piece is as far to the left as it can be, and then as far to
    the right, they have to be in the same places.
    """
    first, *inner, last = pieces
    end = len(text) - len(last)
    if not (text.startswith(first) and text.endswith(last) and len(first) <= end):
        return None
    leftmost, rightmost = [], []
    position = len(first)
    for piece in inner:
        position = text.find(piece, position, end)
        if position < 0:
            return None
        leftmost.append(position)
        position += len(piece)
    position = end
    for piece in reversed(inner):
        position = text.rfind(piece, len(first), position)
        rightmost.append(position)
    return [0, *leftmost, end] if leftmost == rightmost[::-1] else None


@functools.lru_cache(maxsize=4)
def _turn_edges(tokenizer, template: str) -> _Edges:
    """The header is the template's generation prompt, up to the think block that some of them open there."""
    question = [{"role": "user", "content": "?"}]
    without = _apply_template(tokenizer, question, None)
    prompted = _apply_template(tokenizer, question, None, add_generation_prompt=True)
    header = re.sub(r"<think>\s*\Z", "", prompted.removeprefix(without)) if prompted.startswith(without) else ""
    special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return _Edges(
        re.compile(re.escape(header) + r"((?:<think>\s*</think>\s*)?)\Z"),
        re.compile("|".join(special)),
    )


def _apply_template(tokenizer, messages: list[dict[str, Any]], tools: list | None, **settings: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **settings)
    except Exception as error:  # whatever a template makes of messages that it was not written for
        raise BadRecord(f"the chat template cannot render this conversation: {error!r}.") from error


# --- text to tokens ---


def render_batch(
    tokenizer, chats: Sequence[Chat | Pair], train_on: TrainOn = "assistant", mask_empty_think: bool = True
) -> list[Conversation | BadRecord]:
    """The token ids of each chat and the mask of its supervised tokens; or why it cannot be used, which is not raised.

    A Chat's ids are those of `tokenizer.apply_chat_template(messages, tools=tools)`. train_on: "assistant" supervises
    every assistant turn after the prompt, on what the template leaves of it; "last" the last of them; "all" the whole
    text. mask_empty_think leaves out the empty think blocks that the template inserts.
    A Pair's ids are those of prompt + completion + eos_token, of which "assistant" and "last" supervise the last two.
    Special tokens that are spelled out in a text become these tokens. Raises UserError if the tokenizer lacks a chat
    template or eos_token that is needed.
    """
    results: list[_Marked | BadRecord] = []
    for chat in chats:
        try:
            if isinstance(chat, Pair):
                marked = _mark_pair(tokenizer, chat, train_on)
            else:
                marked = _mark_chat(tokenizer, chat, train_on, mask_empty_think)
            marked.text.encode()
            results.append(marked)
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            results.append(BadRecord(f"the text holds {half!a}, half a surrogate pair. Remove it."))
        except BadRecord as error:
            results.append(error)
    encoded = _encode(tokenizer, [result.text for result in results if isinstance(result, _Marked)])
    return [result if isinstance(result, BadRecord) else _supervise(result, next(encoded)) for result in results]


class _Tokens(NamedTuple):
    """The tokens of a text."""

    ids: np.ndarray  # int32 [T]
    starts: np.ndarray  # int64 [T]: where each starts and ends in the text, in bytes
    ends: np.ndarray


def _encode(tokenizer, texts: list[str]) -> Iterator[_Tokens]:
    """The tokens of each text.

    The tokenizer is an eighth faster where it does not keep their places. These are known without it if the tokens'
    bytes are the text's; if not, because it has normalized the text or is not one of bytes, it is asked for them.
    """
    backend = tokenizer.backend_tokenizer
    byte_tokens, sizes = _byte_tokens(tokenizer)
    ids_of_texts = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    all_ids = np.fromiter(itertools.chain.from_iterable(ids_of_texts), np.int32)
    all_sizes = sizes[all_ids]
    all_ends = all_sizes.cumsum()
    first, num_bytes = 0, 0
    for text, ids in zip(texts, ids_of_texts, strict=True):
        data, these = text.encode(), slice(first, first + len(ids))
        if b"".join(map(byte_tokens.__getitem__, ids)) == data:
            ends = all_ends[these] - num_bytes
            yield _Tokens(all_ids[these], ends - all_sizes[these], ends)
        else:
            offsets = np.array(backend.encode(text, add_special_tokens=False).offsets, np.int64).reshape(-1, 2)
            byte_of_char = np.append(np.flatnonzero(np.frombuffer(data, np.int8) >= -64), len(data))
            yield _Tokens(all_ids[these], *byte_of_char[offsets.T])
        first, num_bytes = these.stop, int(all_ends[these.stop - 1]) if these.stop else 0


@functools.lru_cache(maxsize=4)
def _byte_tokens(tokenizer) -> tuple[list[bytes], np.ndarray]:
    """The bytes of each token by its id, none for what is no token of a byte-level BPE, and how many they are."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # here, because it takes seconds

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = tokenizer.get_vocab()
    tokens = [b""] * (max(vocab.values()) + 1)
    for token, id in vocab.items():
        if all(char in byte_of for char in token):
            tokens[id] = bytes(byte_of[char] for char in token)
    for id, added in tokenizer.added_tokens_decoder.items():
        tokens[id] = added.content.encode()
    return tokens, np.array([len(token) for token in tokens])


def _supervise(marked: _Marked, tokens: _Tokens) -> Conversation | BadRecord:
    is_ascii = marked.text.isascii()

    def byte_of(char: int) -> int:
        return char if is_ascii else len(marked.text[:char].encode())

    def token_of(char: int) -> int:
        """The first token that ends after `char` starts."""
        return int(tokens.ends.searchsorted(byte_of(char), "right"))

    def token_from(char: int) -> int:
        """The first token that does not start before `char`."""
        return int(tokens.starts.searchsorted(byte_of(char), "left"))

    supervised = np.zeros(len(tokens.ids), bool)
    for start, end in marked.supervised:
        supervised[token_from(start) : token_of(end)] = True
    for start, end in marked.masked:
        supervised[token_of(start) : token_from(end)] = False
    if not supervised[1:].any():  # nothing comes before the first
        return BadRecord("no token is supervised; expected an assistant turn with text, or a token that closes it.")
    return Conversation(tokens.ids, supervised, marked.reasoning_dropped)
