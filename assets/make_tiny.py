"""Make the bundled miniature: sample text from a seeded grammar, a tokenizer trained on it, a 2-layer MoE config.

    python assets/make_tiny.py              # rewrites assets/tiny/
    python assets/make_tiny.py /tmp/tiny    # the same files somewhere else

`--init random --data sample` trains on these files, with nothing downloaded. The same program writes the same bytes.
The text is about 2,700 documents, each of one to three very short stories about the same two people. What a tiny model
can learn shows in what it writes: names, pets and colours recur within a story, nouns and pronouns agree, counts come
out right, and some facts never change.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SEED = 0
SAMPLE_CHARS = 1_000_000
MAX_BPE_TOKENS = 900  # with five added tokens fewer than the model's 1,024 rows, as in the released models
SEPARATOR = "<|endoftext|>"

WOMEN = ["Anna", "Clara", "Ella", "Grace", "Iris", "Kate", "Mia", "Olga", "Rosa", "Tess"]
MEN = ["Ben", "Dan", "Finn", "Hugo", "Jack", "Leo", "Noah", "Paul", "Sam", "Will"]
PEOPLE = dict.fromkeys(WOMEN, ("she", "her", "her")) | dict.fromkeys(MEN, ("he", "his", "him"))
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "grey"]
THINGS = {  # singular: plural
    "apple": "apples", "ball": "balls", "book": "books", "box": "boxes", "cup": "cups", "drum": "drums", "egg": "eggs",
    "hat": "hats", "key": "keys", "kite": "kites", "lamp": "lamps", "leaf": "leaves", "shell": "shells",
    "stone": "stones",
}  # fmt: skip
PLACES = ["in the garden", "in the kitchen", "in the forest", "at school", "at the market", "by the river",
          "in the barn", "on the beach", "on the hill", "under the bridge"]  # fmt: skip
HIDING_PLACES = ["under the bed", "behind the door", "on the roof", "in the old boat", "under the table",
                 "behind the tree"]  # fmt: skip
PET_NAMES = ["Biscuit", "Pepper", "Misty", "Button", "Ginger", "Shadow", "Clover", "Nutmeg"]
# What an animal says, eats and where it sleeps never changes: facts to be learned by heart.
ANIMALS = {
    "cat": ("meow", "fish", "on the chair"),
    "dog": ("woof", "meat", "by the door"),
    "duck": ("quack", "bread", "by the pond"),
    "horse": ("neigh", "hay", "in the stable"),
    "hen": ("cluck", "corn", "in the hen house"),
    "goat": ("baa", "grass", "in the field"),
    "mouse": ("squeak", "cheese", "in the wall"),
    "owl": ("hoo", "mice", "in the tower"),
}
FACTS = ["Grass is green.", "Snow is white.", "The sky is blue.", "Coal is black.", "The sun is hot.", "Ice is cold.",
         "Birds fly.", "Fish swim.", "Stones are hard.", "Feathers are soft.", "Sugar is sweet.",
         "Lemons are sour."]  # fmt: skip
FEELINGS = {
    "happy": "the sun was warm", "sad": "it rained all day", "tired": "the way was long", "proud": "the work was done",
    "hungry": "it was time for dinner",
}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
OPENINGS = ["One day", "One morning", "In the evening", "After lunch", "Before school"]
ENDINGS = ["It was a good day.", "Then it was time to go home.", "They all laughed.", "The end."]


class Dice(random.Random):
    """Choices that use random() alone, whose values Python promises to keep from version to version."""

    def number(self, low: int, high: int) -> int:
        """low <= number <= high"""
        return low + int(self.random() * (high - low + 1))

    def pick(self, options):
        options = list(options)
        return options[self.number(0, len(options) - 1)]

    def pick_some(self, options, count: int) -> list:
        """`count` different options, in random order."""
        options = list(options)
        return [options.pop(self.number(0, len(options) - 1)) for _ in range(count)]


def amount(number: int, thing: str, colour: str = "") -> str:
    """Two red kites, one red kite, no red kites."""
    noun = thing if number == 1 else THINGS[thing]
    return " ".join(filter(None, [NUMBERS[number] if number else "no", colour, noun]))


def a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def tell_lost_thing(dice: Dice, owner: str, helper: str) -> str:
    he, his, _ = PEOPLE[owner]
    thing, colour = dice.pick(THINGS), dice.pick(COLOURS)
    *wrong, right = dice.pick_some(PLACES + HIDING_PLACES, dice.number(2, 3))
    lines = [f"{dice.pick(OPENINGS)}, {owner} lost {his} {colour} {thing}."]
    for place in wrong:
        lines.append(f"{capital(he)} looked {place}, but the {thing} was not there.")
    lines.append(f"Then {helper} looked {right}, and there it was!")
    lines.append(f'"Here is your {colour} {thing}, {owner}," said {helper}.')
    lines.append(f'"Thank you, {helper}," said {owner}. {dice.pick(ENDINGS)}')
    return " ".join(lines)


def tell_gift(dice: Dice, giver: str, taker: str) -> str:
    thing, colour = dice.pick(THINGS), dice.pick(COLOURS)
    had = dice.number(2, 10)
    given = dice.number(1, had)
    he, _, him = PEOPLE[taker]
    return (
        f"{giver} had {amount(had, thing, colour)}. {dice.pick(OPENINGS)}, {giver} met {taker} {dice.pick(PLACES)}. "
        f"{capital(he)} had no {THINGS[thing]}, so {giver} gave {him} {amount(given, thing)}. "
        f"Now {giver} has {amount(had - given, thing, colour)} and {taker} has {amount(given, thing, colour)}."
    )


def tell_counting(dice: Dice, counter: str, other: str) -> str:
    thing, last = dice.pick(THINGS), dice.number(3, 12)
    numbers = NUMBERS[1 : last + 1]
    return (
        f"{counter} and {other} count the {THINGS[thing]} {dice.pick(PLACES)}. {counter} counts: {', '.join(numbers)}. "
        f"{other} counts back: {', '.join(reversed(numbers))}. There are {amount(last, thing)}."
    )


def tell_questions(dice: Dice, asker: str, teller: str) -> str:
    count = dice.number(2, 3)
    things, colours = dice.pick_some(THINGS, count), dice.pick_some(COLOURS, count)
    places = dice.pick_some(PLACES + HIDING_PLACES, count)
    facts = [f"The {colours[i]} {things[i]} is {places[i]}." for i in range(count)]
    turns = []
    for i in dice.pick_some(range(count), count):
        if dice.number(0, 1):
            turns.append(f'{asker}: "Where is the {things[i]}?"\n{teller}: "It is {places[i]}."')
        else:
            turns.append(f'{asker}: "What colour is the {things[i]}?"\n{teller}: "It is {colours[i]}."')
    return "\n".join([" ".join(facts), *turns])


def tell_sums(dice: Dice, writer: str, reader: str) -> str:
    lines = [f"{writer} writes sums for {reader}:"]
    for _ in range(dice.number(3, 6)):
        total = dice.number(1, 12)
        left = dice.number(0, total)
        lines.append(dice.pick([f"{left} + {total - left} = {total}", f"{total} - {left} = {total - left}"]))
    return "\n".join(lines)


def tell_adding(dice: Dice, first: str, second: str) -> str:
    thing, total = dice.pick(THINGS), dice.number(2, 12)
    left = dice.number(1, total - 1)
    return (
        f"{first} and {second} are {dice.pick(PLACES)}. {first} finds {amount(left, thing)}. "
        f"{second} finds {amount(total - left, thing)}. {capital(NUMBERS[left])} and {NUMBERS[total - left]} "
        f"are {NUMBERS[total]}. Together they have {amount(total, thing)}. {dice.pick(ENDINGS)}"
    )


def tell_pet(dice: Dice, owner: str, friend: str) -> str:
    _, his, _ = PEOPLE[owner]
    pet, animal, colour = dice.pick(PET_NAMES), dice.pick(ANIMALS), dice.pick(COLOURS)
    sound, food, bed = ANIMALS[animal]
    facts = [
        f'When {pet} sees {friend}, {pet} says "{sound}".',
        f"{pet} likes to eat {food}.",
        f"At night {pet} sleeps {bed}.",
        f"{owner} and {friend} play with {pet} {dice.pick(PLACES)}.",
    ]
    start = f"{owner} has {a(colour)} {animal}. The name of {his} {animal} is {pet}."
    return " ".join([start, *dice.pick_some(facts, dice.number(2, 4)), f"{owner} loves {his} {colour} {animal}."])


def tell_week(dice: Dice, writer: str, friend: str) -> str:
    he, _, _ = PEOPLE[writer]
    first = dice.number(0, 3)
    last = dice.number(first + 2, 6)
    lines = []
    for day in range(first, last):
        what = dice.pick([f"was {dice.pick(PLACES)}", f"found {a(dice.pick(THINGS))}", f"played with {friend}"])
        lines.append(f"On {DAYS[day]} {writer if day == first else he} {what}.")
    feeling = dice.pick(FEELINGS)
    return "\n".join([*lines, f"On {DAYS[last]} {he} was {feeling}, because {FEELINGS[feeling]}."])


def tell_facts(dice: Dice, teacher: str, pupil: str) -> str:
    he, _, _ = PEOPLE[pupil]
    facts = " ".join(dice.pick_some(FACTS, dice.number(2, 5)))
    animal = dice.pick(ANIMALS)
    sound, food, _ = ANIMALS[animal]
    return (
        f'{teacher} teaches {pupil}. {facts} "What does {a(animal)} eat?" asks {teacher}. "It eats {food}," says '
        f'{pupil}. "And what does it say?" "It says {sound}," says {pupil}. {capital(he)} is right.'
    )


STORIES = [tell_lost_thing, tell_gift, tell_counting, tell_questions, tell_sums, tell_adding, tell_pet, tell_week,
           tell_facts]  # fmt: skip


def make_sample() -> str:
    """About SAMPLE_CHARS characters: documents of one to three stories about the same two people.

    Each document is followed by a line that holds only the separator.
    """
    dice = Dice(SEED)
    documents, num_chars = [], 0
    while num_chars < SAMPLE_CHARS:
        first, second = dice.pick_some(PEOPLE, 2)
        stories = [tell(dice, first, second) for tell in dice.pick_some(STORIES, dice.number(1, 3))]
        documents.append("\n\n".join(stories) + f"\n{SEPARATOR}\n")
        num_chars += len(documents[-1])
    return "".join(documents)


def make_tokenizer(documents: Sequence[str]) -> Tokenizer:
    """A byte-level BPE built like Qwen3's: NFC, its splitting rule, the added tokens after the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), behavior="isolated"), pre_tokenizers.ByteLevel(**byte_level)]
    )
    tokenizer.post_processor = processors.ByteLevel(**byte_level)
    tokenizer.decoder = decoders.ByteLevel(**byte_level)
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_BPE_TOKENS,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: no text is out of vocabulary
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (SEPARATOR, "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict:
    added = {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": (
            "{%- for message in messages %}\n"
            "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
            "{%- endfor %}\n"
            "{%- if add_generation_prompt %}\n"
            "    {{- '<|im_start|>assistant\\n' }}\n"
            "{%- endif %}"
        ),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": SEPARATOR,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def model_config(tokenizer: Tokenizer) -> dict:
    """The keys of the released Qwen3-30B-A3B; head_dim * num_attention_heads != hidden_size, as in several sizes."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id(SEPARATOR),
        "decoder_sparse_step": 1,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 384,
        "max_position_embeddings": 2048,
        "max_window_layers": 2,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 1024,
    }


def generation_config(tokenizer: Tokenizer) -> dict:
    end_of_text, im_end = tokenizer.token_to_id(SEPARATOR), tokenizer.token_to_id("<|im_end|>")
    return {
        "bos_token_id": end_of_text,
        "do_sample": True,
        "eos_token_id": [im_end, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }


def write(folder: Path) -> None:
    """Write all five files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    sample = make_sample()
    (folder / "sample.txt").write_bytes(sample.encode())
    tokenizer = make_tokenizer([document.strip() for document in sample.split(SEPARATOR)])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in [
        ("tokenizer_config.json", tokenizer_config(tokenizer)),
        ("config.json", model_config(tokenizer)),
        ("generation_config.json", generation_config(tokenizer)),
    ]:
        (folder / name).write_bytes((json.dumps(content, indent=2) + "\n").encode())


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tiny")
