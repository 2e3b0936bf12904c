"""Validation, samples and the test of the document mask.

The oracle of the validation loss is transformers' model, one conversation at a time; that of samples is `generate`.
"""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from qwen3_trn import Qwen3Config, Qwen3ForCausalLM, checks, evaluate, model
from qwen3_trn.data import PackedData, PackedSource
from qwen3_trn.device import Device
from qwen3_trn.encode import load_tokenizer
from qwen3_trn.errors import UserError
from tests.caches import make_cache, number_tokens
from tests.common import TINY, run_python, succeeded, tiny_config
from tests.run_evaluate import LAYOUTS, MODEL, SEQ_LEN, init_weights, make_documents, open_rows

TOKENIZER = AutoTokenizer.from_pretrained(TINY)
TINY_CONFIG = Qwen3Config.from_pretrained(TINY)


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model(raw: dict = MODEL) -> Qwen3ForCausalLM:
    made = Qwen3ForCausalLM(Qwen3Config.from_dict(raw))
    init_weights(made)
    return made


def evaluate_alone(made, data, batch_size: int, rank: int = 0, num_ranks: int = 1) -> float:
    return evaluate.evaluate(made, data, batch_size, num_ranks, rank, 1, Device())


# ------------------------------------------------------------------------------------------------- on several ranks


@pytest.fixture(scope="module")
def on_4_ranks(tmp_path_factory):
    """What each rank found on each layout."""
    out = tmp_path_factory.mktemp("evaluate")
    succeeded(run_python("tests/run_evaluate.py", out, ranks=4))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def true_loss(tmp_path_factory):
    """transformers' mean loss over the supervised tokens of all conversations, each by itself, in fp64."""
    folder = tmp_path_factory.mktemp("oracle") / "model"
    make_model().save_pretrained(folder, dtype=torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    losses = []
    for document, supervised in zip(*make_documents(), strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor(document)[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(document[1:]), reduction="none")
        losses.append(loss[torch.tensor(supervised[1:])])
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_seven_rows_on_four_ranks(on_4_ranks, true_loss, layout):
    tolerance = 2e-3 if layout == "bf16" else 1e-6
    for found in on_4_ranks:
        assert found[layout]["loss"] == pytest.approx(true_loss, rel=tolerance)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 8])
def test_seven_rows_on_one_rank(world_of_one, true_loss, batch_size):
    assert evaluate_alone(make_model(), [open_rows()], batch_size) == pytest.approx(true_loss, rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_the_same_on_every_rank_and_layout(on_4_ranks, layout):
    for found in on_4_ranks:
        assert found[layout]["samples"] == on_4_ranks[0]["fsdp"]["samples"]
    greedy = [line for line in on_4_ranks[0]["fsdp"]["samples"] if line.startswith("greedy")]
    assert greedy[0] != greedy[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_run_the_same_shapes_and_give_the_weights_back(on_4_ranks, layout):
    for found in on_4_ranks:
        assert found[layout]["shapes"] == on_4_ranks[0][layout]["shapes"]
        assert found[layout]["whole"] == []
    assert len({tuple(shape) for shape in on_4_ranks[0][layout]["shapes"]}) == 2  # of rows, and of samples


# ------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_no_row_is_lost_or_counted_twice(world_of_one, monkeypatch, num_ranks, batch_size):
    """What the ranks together show the model; rows of padding are zeros."""
    data = open_rows()
    rows = [data.row(position).input_ids.tolist() for position in range(7)]

    class CountingModel(torch.nn.Module):
        def loss(self, input_ids, labels, positions, document_ids):
            seen.extend(row for row in input_ids.tolist() if any(row))
            return torch.tensor(0.0), torch.tensor(0)

    num_labels = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums: num_labels.append(sums[1].item()))
    seen: list[list[int]] = []
    for rank in range(num_ranks):
        try:
            evaluate_alone(CountingModel(), [data], batch_size, rank, num_ranks)
        except ZeroDivisionError:
            assert num_labels[-1] == 0  # nothing but padding; all ranks' sum, which is left out here, has labels
    assert sorted(seen) == sorted(rows)
    assert sum(num_labels) == sum((data.row(position).labels != -100).sum() for position in range(7))


def test_several_sources_weigh_by_their_tokens(world_of_one):
    made = make_model()
    sources = [make_cache(number_tokens(lengths)) for lengths in ([100, 50, 30], [20])]
    data = [PackedData([PackedSource(source, SEQ_LEN, 0, shuffle=False)], [1.0]) for source in sources]
    losses, counts = [evaluate_alone(made, [part], 2) for part in data], [180 - 3, 20 - 1]
    expected = np.average(losses, weights=counts)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert evaluate_alone(made, data, 2) == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------------------------------------- the document mask

MODELS = {"dense": tiny_config(), "moe": tiny_config(moe=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_mask_that_does_not_part_documents_is_found(monkeypatch, name, dtype):
    """With random weights, which show the least."""
    made = Qwen3ForCausalLM(Qwen3Config.from_dict(MODELS[name])).to(dtype)

    def check(seq_len: int = 64) -> None:
        checks.check_document_mask(made, 2, seq_len, Device(), dtype)

    for seq_len in (1, 2, 3, 32, 64, 250):
        check(seq_len)
    document_mask = model.document_mask
    with monkeypatch.context() as patch:
        patch.setattr(model, "document_mask", lambda document_ids: document_mask(torch.zeros_like(document_ids)))
        with pytest.raises(UserError, match=r"documents in one row see each other.*Use --no-pack"):
            check()
    with monkeypatch.context() as patch:  # it leaks by one token at the border
        patch.setattr(model, "document_mask", lambda ids: document_mask(torch.cat((ids[:, :1], ids[:, :-1]), 1)))
        with pytest.raises(UserError, match="documents in one row see each other"):
            check()
    with monkeypatch.context() as patch:  # an attention that takes no notice of the mask
        attend = torch.nn.functional.scaled_dot_product_attention

        def attend_causally(q, k, v, attn_mask=None, is_causal=False, **settings):
            return attend(q, k, v, is_causal=True, **settings)

        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_causally)
        with pytest.raises(UserError, match="documents in one row see each other"):
            check()
    check()


# ------------------------------------------------------------------------------------------------- samples


def test_samples_are_what_generate_gives_up_to_the_stop_token():
    made, prompts = make_model(), [[5, 6, 7], [400, 401]]
    lines = evaluate.sample_texts(made, TOKENIZER, prompts, [], 0, 1, Device())
    for number, prompt in enumerate(prompts):
        ids = made.generate(torch.tensor([prompt]), 64 - len(prompt))[0, len(prompt) :].tolist()
        assert lines[3 * number] == "> " + TOKENIZER.decode(prompt)
        assert lines[3 * number + 1] == "greedy: " + evaluate._show(TOKENIZER, ids)
        # The first place of a token, so that it stops there.
        stop = ids[10]
        end = ids.index(stop)
        stopped = evaluate.sample_texts(made, TOKENIZER, [prompt], [stop, 3], 0, 1, Device())
        assert stopped[1] == "greedy: " + evaluate._show(TOKENIZER, ids[:end])
    assert evaluate.sample_texts(made, TOKENIZER, prompts, [], 0, 1, Device()) == lines
    assert evaluate.sample_texts(made, TOKENIZER, prompts, [], 1, 1, Device())[2] != lines[2]


def test_a_sample_is_one_harmless_line():
    ids = TOKENIZER("a\n\n\x1b[31mb\r\x00\x7f", add_special_tokens=False).input_ids
    assert evaluate._show(TOKENIZER, ids) == r"a\n\n\x1b[31mb\r\x00\x7f"


@pytest.mark.parametrize(
    ("changes", "is_chat", "expected"),
    [
        ({}, False, ["<|im_end|>", "<|endoftext|>"]),
        ({}, True, ["<|im_end|>", "<|endoftext|>"]),
        ({"eos_token": "<|endoftext|>"}, False, ["<|endoftext|>"]),  # a base model
        ({"eos_token": "<|endoftext|>"}, True, ["<|im_end|>", "<|endoftext|>"]),
        ({"eos_token": None}, False, ["<|endoftext|>"]),
        ({"chat_template": None}, True, ["<|im_end|>", "<|endoftext|>"]),
        ({"chat_template": None, "eos_token": None}, True, ["<|endoftext|>"]),
        # Another template's end of turn.
        ({"chat_template": "{% for m in messages %}{{ m.content }}<think>{% endfor %}", "eos_token": None}, True, None),
        ({"chat_template": "{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}"}, True, "<|im_start|>"),
    ],
)
def test_stop_tokens(changes, is_chat, expected):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    names = tokenizer.convert_ids_to_tokens(evaluate.find_stop_tokens(tokenizer, is_chat))
    if expected is None:
        expected = ["<|endoftext|>"]  # <think> is no special token, so it may be content
    elif isinstance(expected, str):
        expected = [expected, "<|im_end|>", "<|endoftext|>"]
    assert names == expected


def test_prompts(tmp_path):
    (tmp_path / "some.txt").write_text("One\n\nTwo é\n", encoding="utf-8")
    prompts = ["Hi there", str(tmp_path / "some.txt")]

    def read(is_chat: bool) -> list[str]:
        return [TOKENIZER.decode(ids) for ids in evaluate.read_prompts(prompts, TOKENIZER, is_chat, TINY_CONFIG)]

    assert read(is_chat=False) == ["Hi there", "One", "Two é"]
    assert read(is_chat=True)[2] == "<|im_start|>user\nTwo é<|im_end|>\n<|im_start|>assistant\n"
    assert evaluate.read_prompts((), TOKENIZER, True, TINY_CONFIG) == []
    plain = load_tokenizer(TINY)
    template, plain.chat_template = plain.chat_template, None
    try:  # pairs of strings need no chat template
        assert evaluate.read_prompts(["Hi"], plain, True, TINY_CONFIG) == [TOKENIZER("Hi").input_ids]
    finally:
        plain.chat_template = template


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["missing.txt"], "--prompts missing.txt cannot be read: .*No such file.* ends in .txt, so it is a file"),
        (["latin.txt"], "--prompts latin.txt cannot be read: .*utf-8"),
        (["blank.txt", " "], r"--prompts blank.txt  : there is no text"),
        (["a b " * 1100], r"'a b a b.*' has \d+ tokens, and 48 are to follow; .*max_position_embeddings is 2048"),
        (["Hi<|endoftext|>"], r"--prompts: 'Hi<|endoftext|>' has token id 890; the model has 800"),
    ],
)
def test_bad_prompts(tmp_path, monkeypatch, prompts, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "blank.txt").write_text("\n \n")
    raw = json.loads((TINY / "config.json").read_text()) | ({"vocab_size": 800} if "Hi" in prompts[0] else {})
    with pytest.raises(UserError, match=message):
        evaluate.read_prompts(prompts, TOKENIZER, False, Qwen3Config.from_dict(raw))


def test_the_default_prompt_is_the_start_of_a_row():
    text = PackedSource(make_cache(number_tokens([100])), SEQ_LEN, 0, shuffle=False)
    assert evaluate.find_prompt(text.row(0)) == list(range(1, 17))
    supervised = [[False] * 5 + [True] * 4]
    chat = PackedSource(make_cache(number_tokens([9]), supervised), SEQ_LEN, 0, shuffle=False)
    assert evaluate.find_prompt(chat.row(0)) == [1, 2, 3, 4, 5]
