"""Collect the borrowed texts of the prompt set into data/excerpts.jsonl: novels, Python's documentation, its library.

Run once and committed, so that `make_prompts.py` needs nothing but the repository. Sizes are cut here: a novel's
excerpt is whole paragraphs, a documentation topic is whole, a code excerpt is a whole function, class or module.

    python -m scripts.austen_text /tmp/austen /tmp/novels
    python -m calibrate.prompts.collect_excerpts /tmp/novels     # CPython 3.11.7 made the committed file
"""

import ast
import json
import pydoc_data.topics
import random
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

OUTPUT = Path(__file__).parent / "data" / "excerpts.jsonl"
# Emma and Persuasion are evaluated on, so they are not here.
NOVELS = ["pride_and_prejudice", "sense_and_sensibility", "mansfield_park", "northanger_abbey"]
NOVEL_CHARS = [(1_200, 3_000, 16), (9_000, 12_000, 5), (16_000, 22_000, 5)]  # shortest, longest, excerpts a novel
TOPIC_CHARS = (700, 26_000)
FUNCTION_CHARS = (350, 2_600)
MODULES = (
    "argparse ast bisect calendar cmd collections/__init__ colorsys configparser contextlib copy csv dataclasses "
    "datetime difflib dis email/message enum filecmp fileinput fnmatch fractions functools getopt glob graphlib gzip "
    "heapq hmac html/parser imaplib ipaddress json/decoder json/encoder keyword linecache locale mailbox mimetypes "
    "netrc numbers operator pathlib pickletools plistlib pprint queue quopri random reprlib sched selectors shelve "
    "shlex shutil smtplib socketserver statistics string tabnanny tempfile textwrap threading timeit tokenize typing "
    "urllib/parse uuid weakref wsgiref/handlers zipfile"
).split()
WHOLE_MODULES = (
    "bisect cmd colorsys contextlib csv fileinput fnmatch getopt graphlib heapq keyword linecache netrc quopri reprlib "
    "sched shelve shlex string tabnanny textwrap timeit queue json/decoder json/encoder"
).split()


def novel_excerpts(folder: Path, rng: random.Random) -> Iterator[dict]:
    """Runs of whole paragraphs that don't overlap, of the lengths in NOVEL_CHARS."""
    for name in NOVELS:
        paragraphs = (folder / f"{name}.txt").read_text(encoding="utf-8").split("\n\n")[6:]
        lengths = [(low, high) for low, high, count in NOVEL_CHARS for _ in range(count)]
        rng.shuffle(lengths)
        spacing = len(paragraphs) // len(lengths)
        for i, (low, high) in enumerate(lengths):
            text = take_paragraphs(paragraphs[i * spacing : (i + 1) * spacing], rng.randint(low, high))
            title = name.replace("_", " ").title().replace(" And ", " and ")
            yield {"kind": "novel", "source": f"Jane Austen, {title}", "licence": "public domain", "text": text}


def take_paragraphs(paragraphs: list[str], size: int) -> str:
    """The first paragraphs that together have at least `size` characters, chapter headings left out."""
    taken: list[str] = []
    for paragraph in paragraphs:
        if sum(map(len, taken)) >= size:
            break
        if len(paragraph) > 30:
            taken.append(paragraph)
    return "\n\n".join(taken)


def topic_excerpts() -> Iterator[dict]:
    """Topics of the Python language reference, as `help()` shows them."""
    for name, text in sorted(pydoc_data.topics.topics.items()):
        if TOPIC_CHARS[0] <= len(text) <= TOPIC_CHARS[1]:
            yield {
                "kind": "topic",
                "source": f"Python 3.11 documentation, topic {name}",
                "licence": "PSF-2.0",
                "text": text,
            }


def code_excerpts(rng: random.Random) -> Iterator[dict]:
    """Two functions or classes of each module in MODULES, and each of WHOLE_MODULES entire."""
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        source = (library / f"{module}.py").read_text(encoding="utf-8")
        pieces = [whole_lines(source, node) for node in definitions(ast.parse(source))]
        fitting = [piece for piece in pieces if FUNCTION_CHARS[0] <= len(piece) <= FUNCTION_CHARS[1]]
        for text in rng.sample(fitting, min(2, len(fitting))):
            yield code_record("function", module, text)
        if module in WHOLE_MODULES and len(source) > 4_000:
            yield code_record("module", module, source)


def whole_lines(source: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """The source of a definition, moved to the left margin."""
    return textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")


def definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes of a module and the methods of its classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node


def code_record(kind: str, module: str, text: str) -> dict:
    """An excerpt of the standard library."""
    name = module.removesuffix("/__init__").replace("/", ".")
    return {
        "kind": kind,
        "source": f"Python 3.11 standard library, {name}",
        "licence": "PSF-2.0",
        "text": text[:24_000],
    }


def main() -> None:
    """Write data/excerpts.jsonl."""
    rng = random.Random(20261130)
    records = [*novel_excerpts(Path(sys.argv[1]), rng), *topic_excerpts(), *code_excerpts(rng)]
    with OUTPUT.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    print(f"{OUTPUT}: {len(records)} excerpts, {OUTPUT.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
