"""Fill the braces of a template with names, dates and amounts drawn by a seeded generator."""

from __future__ import annotations

import random
import re
import unicodedata
from datetime import date, timedelta
from typing import Any

BRACES = re.compile(r"\{([a-z]+)(\d?)\}")
AMOUNTS = {"n1": (2, 24), "n2": (3, 30), "n3": (2, 9), "n4": (110, 980), "n5": (1000, 5900)}


class Filler:
    """Draws values for `{person}`, `{person2}`, `{date}`, `{n1}` and so on; within one text a name has one value."""

    def __init__(self, data: dict[str, Any], rng: random.Random) -> None:
        self.names: dict[str, list[str]] = data["names"]
        self.messages: list[str] = data["messages"]
        self.rng = rng

    def message(self, index: int | None = None) -> str:
        """A message of the data file, filled: the index-th (counted round), or any."""
        index = self.rng.randrange(len(self.messages)) if index is None else index
        return self.fill(self.messages[index % len(self.messages)])

    def fill(self, template: str) -> str:
        """The template with each {name} replaced; other braces, as in JSON, are left as they are."""
        values = self._values()
        return BRACES.sub(lambda match: values.get(match[1] + match[2], match[0]), template)

    def _values(self) -> dict[str, str]:
        values = {}
        for kind, names in self.names.items():
            values[kind], values[f"{kind}2"] = self.rng.sample(names, 2)
        first = date(2024, 1, 1) + timedelta(days=self.rng.randrange(900))
        values["date"] = first.isoformat()
        values["date2"] = (first + timedelta(days=self.rng.randint(6, 70))).isoformat()
        values |= {name: str(self.rng.randint(*bounds)) for name, bounds in AMOUNTS.items()}
        values["p1"], values["p2"] = str(self.rng.randint(4, 48)), str(self.rng.randint(2, 19))
        values["age"] = str(self.rng.choice([16, 17, 18, 34, 57, 99, 104]))
        values["year"], values["year2"] = str(self.rng.randint(1958, 2003)), str(self.rng.randint(2006, 2023))
        values["account"] = f"{self.rng.choice('ABKNRX')}-{self.rng.randint(100000, 999999)}"
        values["host"] = f"{self.rng.choice(['web', 'db', 'queue', 'edge'])}{self.rng.randint(1, 12):02d}"
        values["domain"] = f"{_plain(values['company'].split()[0])}.example"
        values["email"] = f"{_plain(values['person2'].split()[0])}@{values['domain']}"
        return values


def _plain(name: str) -> str:
    letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z]", "", letters.lower())
