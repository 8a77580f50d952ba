"""Text for the load: questions that people might ask, and real documents.

Chats are sentences with open places, filled from word lists: every combination reads naturally, and there
are some hundred thousand of them, so no two requests of a run need to be alike. Documents are real prose that
every Python installation carries: the reference topics of `pydoc`, the docstrings of the standard library
and, in a checkout, the licence. A document starts at a paragraph of its own, so that two documents never
share more than their instruction as a prefix.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random

CHAT_FORMS = (
    "Tell me about {topic} in {form}.",
    "Explain {topic} to {audience} in {form}.",
    "Give me {number} facts about {topic} that would surprise {audience}.",
    "What is the difference between {topic} and {other}? Keep it to {form}.",
    "Which came first, {topic} or {other}, and how do we know?",
    "Write {form} about {topic} that {audience} would enjoy.",
    "Write a short message inviting {audience} to an evening about {topic} in {city}.",
    "How would you plan one day in {city} for {audience} with an interest in {topic}?",
    "Suggest {number} questions that {audience} could ask in an interview about {topic}.",
    "Translate this into French: We met in {city} to talk about {topic}.",
    "Name {number} books or films in which {topic} plays a part.",
    "Is it true that {topic} depends on {other}? Answer yes or no and give one reason.",
    "Correct the grammar: Yesterday {audience} have went to {city} for learn more on {topic}.",
    "Turn these notes into {form}: {topic}, {city}, {number} visitors, a talk on {other}, good weather.",
    "I have {number} minutes before a meeting about {topic} with {audience}. What should I read or look up "
    "first, and what can I safely leave for later?",
    "I am preparing a talk about {topic} for {audience} in {city}. Suggest a title and {number} points that "
    "I should cover, and say which of them I could leave out if there is too little time.",
    "My neighbour says that {topic} matters more than {other}, and I am not so sure. Give {number} arguments "
    "for each side in plain words, then say which side you find stronger and why.",
    "We are {number} people from {city} and want to start a reading group on {topic}. Half of us have never "
    "heard of it, the others know a lot about {other}. How should the first evening run so that nobody is "
    "bored, and what should everyone bring along?",
)

WORDS: dict[str, tuple[str, ...]] = {
    "topic": (
        "photosynthesis", "the water cycle", "plate tectonics", "the printing press", "public transport",
        "bread baking", "the Roman calendar", "solar panels", "the human heart", "chess openings", "tides",
        "earthquakes", "the violin", "paper making", "coral reefs", "steam engines", "vaccines", "honey bees",
        "the metric system", "lighthouses", "magnetism", "rainbows", "the Silk Road", "glass blowing",
        "migrating birds", "satellite navigation", "black holes", "the alphabet", "compost", "volcanoes",
        "sign language", "cheese", "bicycles", "maps", "the Moon", "recycling", "jazz", "bridges", "clouds",
        "cryptography", "the Olympic Games", "wool", "submarines", "time zones", "inflation", "antibiotics",
    ),
    "audience": (
        "a ten-year-old", "a new colleague", "my grandmother", "a group of tourists", "a school class",
        "someone who has never seen the sea", "a busy manager", "a retired engineer", "a curious neighbour",
        "a first-year student", "a visiting friend", "the local newspaper",
    ),
    "form": (
        "one sentence", "two sentences", "three short points", "a short paragraph", "a rhyme of four lines",
        "plain words", "fewer than twenty words", "a friendly note",
    ),
    "number": ("two", "three", "four", "five", "six", "seven"),
    "city": (
        "Lisbon", "Kyoto", "Nairobi", "Oslo", "Toronto", "Hanoi", "Lima", "Prague", "Cairo", "Melbourne",
        "Edinburgh", "Istanbul", "Vienna", "Montreal", "Dublin", "Porto",
    ),
}  # fmt: skip

INSTRUCTION = "Summarise the following text in one sentence.\n\n"

# Modules whose docstrings are prose rather than tables; all pure Python and quick to import.
DOCSTRING_MODULES = (
    "argparse", "ast", "asyncio.tasks", "bdb", "calendar", "codecs", "collections",
    "concurrent.futures", "configparser", "contextlib", "csv", "dataclasses", "decimal", "difflib",
    "dis", "doctest", "email.message", "enum", "fractions", "functools", "heapq", "inspect",
    "ipaddress", "json", "logging", "mailbox", "optparse", "pathlib", "pickletools", "pprint", "random",
    "re", "shutil", "statistics", "string", "subprocess", "tarfile", "textwrap", "threading",
    "traceback", "unittest.case", "unittest.mock", "zipfile",
)  # fmt: skip

PARAGRAPH_CHARS_MIN = 80  # shorter ones are headings and list crumbs


def chats(rng: Random) -> Iterator[str]:
    """Endless distinct chat prompts; once combinations run thin, a numbered remark keeps them apart."""
    seen: set[str] = set()
    while True:
        for _ in range(20):
            text = _fill(rng)
            if text not in seen:
                break
        else:
            text = f"Question {len(seen)}: {text}"
        seen.add(text)
        yield text


def _fill(rng: Random) -> str:
    topic, other = rng.sample(WORDS["topic"], 2)
    words = {name: rng.choice(WORDS[name]) for name in ("audience", "form", "number", "city")}
    text = rng.choice(CHAT_FORMS).format(topic=topic, other=other, **words)
    return text[0].upper() + text[1:]


@cache
def paragraphs() -> tuple[str, ...]:
    """All paragraphs of prose at hand, in source order, each once, white space collapsed."""
    found = (" ".join(part.split()) for source in _sources() for part in re.split(r"\n\s*\n", source))
    return tuple(dict.fromkeys(text for text in found if len(text) >= PARAGRAPH_CHARS_MIN))


def document_starts(rng: Random, count: int) -> list[int]:
    """Endless-looking but finite choice of where documents begin: `count` distinct paragraph indices."""
    everything = len(paragraphs())
    if count > everything:
        raise ValueError(
            f"documents: {count} wanted, but the text at hand begins only {everything}; ask for fewer"
        )
    return rng.sample(range(everything), count)


def _sources() -> Iterator[str]:
    licence = Path(__file__).parents[2] / "LICENSE"
    if licence.is_file():
        yield licence.read_text(encoding="utf-8")
    yield from _reference_topics()
    yield from chain.from_iterable(_docstrings(name) for name in DOCSTRING_MODULES)


def _reference_topics() -> Iterator[str]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it apart; the docstrings alone will do
        return
    for name in sorted(topics):
        yield topics[name]


def _docstrings(module_name: str) -> Iterator[str]:
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return
    yield _doc(module)
    # What a module and its classes hold themselves: looking further wakes deprecated names.
    for _, member in sorted(vars(module).items()):
        if not (inspect.isclass(member) or inspect.isfunction(member)):
            continue
        if member.__module__ != module.__name__:
            continue
        yield _doc(member)
        if inspect.isclass(member):
            for _, method in sorted(vars(member).items()):
                if inspect.isfunction(method):
                    yield _doc(method)


def _doc(thing: object) -> str:
    text = thing.__doc__
    return inspect.cleandoc(text) if isinstance(text, str) else ""  # a class may hold a descriptor there
