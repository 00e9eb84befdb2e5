"""What a format search is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.formats import KVFormat
from nibble.recipes import KVRecipe, ModelRecipe, SearchRecipe


@dataclass(frozen=True)
class SearchRequest:
    """What to search. kv: a recipe with a `search`. calibration: for static candidates. out: gets the files."""

    model: ModelRecipe
    kv: KVRecipe
    prompts: str
    seed: int
    calibration: Calibration
    out: Path

    @property
    def search(self) -> SearchRecipe:
        if self.kv.search is None:
            raise NibbleError(f"KV recipe {self.kv.name}: got no key search, allowed a recipe that has one (mixed)")
        return self.kv.search

    @property
    def candidates(self) -> list[KVFormat]:
        return [KVFormat.named(name) for name in self.search.formats]

    @property
    def base(self) -> KVFormat:
        """The recipe's own format, under the name of the candidate that it is."""
        own = self.kv.format
        return next((fmt for fmt in self.candidates if (fmt.k, fmt.v) == (own.k, own.v)), own)
