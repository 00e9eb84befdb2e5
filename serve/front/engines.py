"""Which engine answers a request: engines side by side, an A/B split, and a request's own choice of KV format.

Names of models as clients see them:

    smollm2-135m-int4   one engine, by what it was built with (its cache may be fp16 after a fallback)
    smollm2-135m        any engine of that model, by the split; the first engine when there is none

A request's `kv_cache` asks for an engine whose cache has that format now, whatever the name says.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nibble.errors import NibbleError
from serve.front.errors import OpenAIError, unavailable
from serve.front.triton import TritonModels


@dataclass(frozen=True)
class ServedEngine:
    """An engine behind Triton. built_kv: the format in its name; kv: the one in use. max_context: tokens."""

    triton_model: str
    model: str
    built_kv: str
    kv: str
    max_context: int
    fingerprint: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.built_kv}"

    @classmethod
    def from_parameters(cls, triton_model: str, parameters: Mapping[str, str]) -> ServedEngine:
        """Of a model's parameters in config.pbtxt (serve/repository.py writes them)."""
        built = parameters.get("built_kv", "")
        kv = parameters.get("kv_fallback") or built
        return cls(
            triton_model=triton_model,
            model=parameters.get("model_name", triton_model),
            built_kv=built,
            kv=kv,
            max_context=int(parameters.get("max_context", 2048)),
            fingerprint=f"{kv}-{parameters.get('engine_hash', 'unknown')[:12]}",
        )


@dataclass
class Engines:
    """The engines that are loaded now. candidates: Triton's names to look for. split: KV format to share, in sum 1."""

    triton: TritonModels
    candidates: Sequence[str]
    split: Mapping[str, float] = field(default_factory=dict)
    loaded: list[ServedEngine] = field(default_factory=list)

    async def refresh(self) -> None:
        """Ask Triton what is loaded. Raises OpenAIError when it doesn't answer."""
        found = await asyncio.gather(*(self.triton.parameters_of(name) for name in self.candidates))
        self.loaded = [
            ServedEngine.from_parameters(name, parameters)
            for name, parameters in zip(self.candidates, found, strict=True)
            if parameters is not None
        ]

    @property
    def names(self) -> list[str]:
        """Every name that a request may use."""
        return list(dict.fromkeys([engine.name for engine in self.loaded] + [engine.model for engine in self.loaded]))

    def choose(self, model: str, kv_cache: str | None, sticky: str | None) -> ServedEngine:
        """The engine for a request. sticky: a user's name, which always gets the same side. Raises OpenAIError."""
        if not self.loaded:
            raise unavailable("no engine is loaded yet")
        named = [engine for engine in self.loaded if model in (engine.name, engine.model)]
        if not named:
            message = f"model: got {model!r}, this server has {', '.join(self.names)}"
            raise OpenAIError(404, message, code="model_not_found", param="model")
        if kv_cache is not None:
            return self._with_cache(named[0].model, kv_cache)
        return self._by_split(named, sticky) if model == named[0].model else named[0]

    def _with_cache(self, model: str, kv_cache: str) -> ServedEngine:
        of_model = [engine for engine in self.loaded if engine.model == model]
        if found := next((engine for engine in of_model if engine.kv == kv_cache), None):
            return found
        has = ", ".join(sorted({engine.kv for engine in of_model}))
        message = f"kv_cache: got {kv_cache!r}, this server has {has}; serve it beside with BESIDE={kv_cache}"
        raise OpenAIError(400, message, code="kv_cache_not_served", param="kv_cache")

    def _by_split(self, engines: Sequence[ServedEngine], sticky: str | None) -> ServedEngine:
        shares = [(engine, self.split.get(engine.built_kv, 0.0)) for engine in engines]
        total = sum(share for _, share in shares)
        if not total:
            return engines[0]
        point = total * (random.random() if sticky is None else _unit_hash(sticky))  # noqa: S311
        for engine, share in shares:
            point -= share
            if point < 0:
                return engine
        return max(shares, key=lambda pair: pair[1])[0]


def parse_split(text: str) -> dict[str, float]:
    """`int4=90,fp16=10` as shares. Raises NibbleError."""
    shares = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        try:
            shares[name] = float(number)
        except ValueError:
            shares[name] = -1.0
        if not name or not 0 <= shares[name] < float("inf"):
            raise NibbleError(f"split: got {part!r}, allowed <kv>=<share>, such as int4=90,fp16=10")
    if shares and not sum(shares.values()):
        raise NibbleError(f"split: got {text!r}, allowed shares of which one at least is above 0")
    return shares


def _unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:6], "big") / 2**48
