"""The rows of each category of the prompt set: our texts in data/, alone or about a borrowed excerpt.

Templates only vary names and numbers, and the generator's seed decides them; everything else is written by hand.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from calibrate.prompts.fill import Filler

DATA = Path(__file__).parent / "data"
OWN = ("NibbleKV", "Apache-2.0")
LONG_TOPIC_CHARS = 6_800
LONG_NOVEL_CHARS = 8_000
# An instruction that points forward stays in front of its text; other languages end theirs with a colon.
COMES_FIRST = re.compile(r"below|following|Here is|[:：]$|[^\x00-\u024f]")

Draft = tuple[str, str, str, str]  # language, source, licence, text


def read(name: str) -> dict[str, Any]:
    """A file of data/."""
    return yaml.safe_load((DATA / f"{name}.yaml").read_text(encoding="utf-8"))


def excerpts(kind: str) -> list[dict[str, str]]:
    """Borrowed texts of one kind, in the file's order."""
    lines = (DATA / "excerpts.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def ask(instruction: str, text: str, rng: random.Random) -> str:
    """An instruction and the text it is about, in either order, as people do."""
    text_first = rng.random() < 0.4 and not COMES_FIRST.search(instruction)
    text = text.strip()
    return f"{text}\n\n{instruction}" if text_first else f"{instruction}\n\n{text}"


def own(text: str, language: str = "en") -> Draft:
    """A text that we wrote."""
    return (language, *OWN, text)


def borrowed(instruction: str, record: dict[str, str], rng: random.Random) -> Draft:
    """Our instruction about somebody's text, under the text's licence."""
    return ("en", record["source"], record["licence"], ask(instruction, record["text"], rng))


def chat(rng: random.Random) -> Iterator[Draft]:
    """Everyday questions, and conversations with their earlier turns."""
    data = read("chat")
    yield from map(own, data["questions"] + data["conversations"])


def code(rng: random.Random) -> Iterator[Draft]:
    """Tasks, broken snippets, and questions about functions of the standard library."""
    data = read("code")
    yield from map(own, data["tasks"] + data["snippets"])
    for i, record in enumerate(rng.sample(excerpts("function"), 100)):
        fenced = {**record, "text": f"```python\n{record['text']}\n```"}
        yield borrowed(data["reviews"][i % len(data["reviews"])], fenced, rng)


def maths(rng: random.Random) -> Iterator[Draft]:
    """Questions, and word problems with three draws of numbers each."""
    data = read("maths")
    yield from map(own, data["questions"])
    for template in data["templates"]:
        seen: set[str] = set()
        while len(seen) < 3:
            numbers = {
                name: rng.randrange(low, high + 1, step) for name, (low, high, step) in template["numbers"].items()
            }
            seen.add(template["text"].format(**numbers))
        yield from map(own, sorted(seen))


def summarising(rng: random.Random) -> Iterator[Draft]:
    """Short articles of ours, scenes of novels, short topics of documentation."""
    data, questions = read("passages"), read("documents")
    for i, text in enumerate(data["texts"]):
        for instruction in (data["instructions"][i % 7], data["instructions"][(i + 3) % 7]):
            yield own(ask(instruction, text, rng))
    short = [record for record in excerpts("novel") if len(record["text"]) < LONG_NOVEL_CHARS]
    topics = [record for record in excerpts("topic") if len(record["text"]) < LONG_TOPIC_CHARS]
    for kind, records in (("novel_short", short[:40]), ("topic_short", rng.sample(topics, 22))):
        for i, record in enumerate(records):
            yield borrowed(questions[kind][i % len(questions[kind])], record, rng)


def writing(rng: random.Random) -> Iterator[Draft]:
    """Rewriting, continuing and translating scenes of novels."""
    questions = read("documents")
    short = [record for record in excerpts("novel") if len(record["text"]) < LONG_NOVEL_CHARS]
    for i, record in enumerate(short[40:64]):
        instruction = questions["novel_writing"][i % 8].format(language=questions["languages"][i // 8])
        yield borrowed(instruction, record, rng)


def long_document(rng: random.Random) -> Iterator[Draft]:
    """Chapters, documentation, whole modules and compiled mailboxes, some of 2,000 to 6,000 tokens."""
    questions = read("documents")
    novels = [record for record in excerpts("novel") if len(record["text"]) >= LONG_NOVEL_CHARS]
    topics = [record for record in excerpts("topic") if len(record["text"]) >= LONG_TOPIC_CHARS]
    modules = [{**record, "text": f"```python\n{record['text']}\n```"} for record in excerpts("module")]
    for kind, records in (("novel_long", novels), ("topic_long", topics), ("module", modules)):
        for i, record in enumerate(records):
            language = questions["languages"][i // 10 % 8]
            yield borrowed(questions[kind][i % len(questions[kind])].format(language=language), record, rng)
    filler = Filler(read("extraction"), rng)
    for i in range(100 - len(novels) - len(topics) - len(modules)):
        documents = "\n\n".join(f"--- {n} ---\n{filler.message()}" for n in range(1, rng.randint(17, 34)))
        yield own(ask(questions["mailbox"][i % len(questions["mailbox"])], documents, rng))


def multilingual(rng: random.Random) -> Iterator[Draft]:
    """Each language: questions, two tasks for each passage, and all passages together."""
    for path in sorted((DATA / "languages").glob("*.yaml")):
        data = read(f"languages/{path.stem}")
        texts = list(data["questions"])
        for i, passage in enumerate(data["passages"]):
            texts += [ask(data["instructions"][(i + j) % 3], passage, rng) for j in range(2)]
        texts.append("\n\n".join([data["compare"], *(f"{n}.\n{p}" for n, p in enumerate(data["passages"], start=1))]))
        yield from (own(text, path.stem) for text in texts)


def structured(rng: random.Random) -> Iterator[Draft]:
    """Function calling, JSON tasks and filled forms."""
    data, filler = read("structured"), Filler(read("extraction"), rng)
    for toolset in data["toolsets"].values():
        for i, request in enumerate(toolset["requests"]):
            tools = json.loads(toolset["tools"])
            shown = json.dumps(tools, indent=2 if i % 2 else None)
            yield own(f"{data['preamble'][i % 3]}\n\n{shown}\n\nUser: {request}")
    yield from map(own, data["json_tasks"])
    yield from (own(filler.fill(form)) for form in data["forms"] for _ in range(4))


def extraction(rng: random.Random) -> Iterator[Draft]:
    """Mails, invoices, logs and minutes with invented names, and what to extract."""
    data = read("extraction")
    filler = Filler(data, rng)
    for i in range(43):
        yield own(ask(data["tasks"][i % 6], filler.message(i), rng))


def role_play(rng: random.Random) -> Iterator[Draft]:
    """A role or system prompt and the first message."""
    yield from (own(f"{role}\n\n{message}") for role, message in read("roles")["scenes"])


CATEGORIES = (
    chat, code, maths, summarising, writing, long_document, multilingual, structured, extraction, role_play
)  # fmt: skip
