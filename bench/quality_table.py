"""Which caches the quality bench measures, by set.

ours: the shipped formats. peers: stand-ins for what others ship; they quantize every token at once and keep no page in
fp16. research: what was tried (docs/log.md says what came of it). spans: int4-static by half its range, built: as it is
built. long, long-rest: for windows that take minutes each.
"""

from __future__ import annotations

from dataclasses import replace

from bench.quality_schemes import FP16, Scheme, scheme
from build.key_basis import STATIC_SPAN
from nibble.recipes import load_kv_recipe
from nibble.visibility import PagePolicy

PEERS = [
    scheme("fp8 per tensor", "8 fp8", "8 fp8", None),
    scheme("int4 per token", "4 token", "4 token", None),
    scheme("int4 rotated K per token", "4 token hadamard", "4 token", None),
]
OURS = [
    FP16,
    scheme("int8", "8 token", "8 token"),
    scheme("int8-static", "8 static", "8 static"),
    scheme("k8v4", "8 page", "4 token hadamard"),
    scheme("int4", "4 page", "4 token hadamard"),
    scheme("int4-static", "4 static", "4 static"),
    scheme("int4-balanced", "4 page balanced", "4 token hadamard"),
]
RESEARCH = [
    scheme("K page | V none", "4 page", "16 none"),
    scheme("K page32", "4 page32", "4 token hadamard"),
    scheme("K hadamard", "4 page hadamard", "4 token hadamard"),
    scheme("K diagonal", "4 page diagonal", "4 token hadamard"),
    scheme("K balanced | V none", "4 page balanced", "16 none"),
    scheme("K none | V hadamard", "16 none", "4 token hadamard"),
    scheme("K none | V balanced", "16 none", "4 token balanced"),
    scheme("K none | V plain", "16 none", "4 token"),
    scheme("K balanced, V balanced", "4 page balanced", "4 token balanced"),
    scheme("K page32 balanced", "4 page32 balanced", "4 token hadamard"),
    scheme("K 5 bits", "5 page", "4 token hadamard"),
    scheme("K 5 bits balanced", "5 page balanced", "4 token hadamard"),
    scheme("K feedback", "4 page feedback", "4 token hadamard"),
    scheme("K balanced feedback", "4 page balanced feedback", "4 token hadamard"),
    scheme("K token balanced", "4 token balanced", "4 token hadamard"),
    scheme("k8v4, V balanced", "8 page", "4 token balanced"),
    scheme("int8, K balanced", "8 token balanced", "8 token hadamard"),
    scheme("int8 K page", "8 page", "8 token hadamard"),
    scheme("int4, no sink", "4 page", "4 token hadamard", PagePolicy(0, 1)),
    scheme("int4, recent 0", "4 page", "4 token hadamard", PagePolicy(1, 0)),
    scheme("int4, recent 2", "4 page", "4 token hadamard", PagePolicy(1, 2)),
    scheme("balanced, no sink", "4 page balanced", "4 token hadamard", PagePolicy(0, 1)),
    scheme("balanced, recent 0", "4 page balanced", "4 token hadamard", PagePolicy(1, 0)),
    scheme("balanced, recent 2", "4 page balanced", "4 token hadamard", PagePolicy(1, 2)),
]
STATIC = [
    *(
        scheme(
            f"static {basis} {clip or 'max'}",
            f"4 static {basis}{f' clip={clip}' if clip else ''}",
            f"4 static {basis}{f' clip={clip}' if clip else ''}",
        )
        for basis in ("none", "hadamard", "balanced", "balanced-static")
        for clip in (None, 2.5, 2.75, 3.0, 3.5, 4.0)
    ),
    scheme("static K balanced max, V balanced 3", "4 static balanced", "4 static balanced clip=3.0"),
    scheme("static K balanced 3, V hadamard 3", "4 static balanced clip=3.0", "4 static hadamard clip=3.0"),
    scheme("static K balanced 3, V token hadamard", "4 static balanced clip=3.0", "4 token hadamard"),
    scheme("static K balanced 3.5, V balanced 3", "4 static balanced clip=3.5", "4 static balanced clip=3.0"),
    scheme("static K none max, V balanced 3", "4 static none", "4 static balanced clip=3.0"),
    scheme(
        "static K balanced-static 3.5, V balanced 3", "4 static balanced-static clip=3.5", "4 static balanced clip=3.0"
    ),
    scheme("static8 balanced max", "8 static balanced", "8 static balanced"),
    scheme("static8 balanced 6", "8 static balanced clip=6.0", "8 static balanced clip=6.0"),
]
SPANS = [
    scheme(f"int4-static, span {span}", f"4 static balanced-static clip={span}", f"4 static hadamard clip={span}")
    for span in (2.25, 2.5, 2.75, 3.0, 3.25, 3.5)
]
STATIC_RECIPE = load_kv_recipe("int4-static")
AS_BUILT = replace(
    next(scheme for scheme in SPANS if scheme.name.endswith(f" {STATIC_SPAN}")),
    name="int4-static as built",
    policy=PagePolicy(STATIC_RECIPE.sink_pages, STATIC_RECIPE.recent_pages),
)
BIAS = [
    FP16,
    scheme("int8", "8 token", "8 token"),
    scheme("int4", "4 page", "4 token hadamard"),
    scheme("int4, biased channels 8 bits", "4 page none wide", "4 token hadamard"),
    scheme("int4-balanced", "4 page balanced", "4 token hadamard"),
    *(
        replace(scheme(f"{name}, bias subtracted", k, v), subtract=True)
        for name, k, v in (
            ("int4", "4 page", "4 token hadamard"),
            ("int4-balanced", "4 page balanced", "4 token hadamard"),
            ("fp16", "16 none", "16 none"),
            ("int8", "8 token", "8 token"),
        )
    ),
    scheme("fp8 per tensor", "8 fp8", "8 fp8", None),
    scheme("k8v4", "8 page", "4 token hadamard"),
]
BUILT_UNDER_BIAS = {  # by format; subtract is the measurement's to set
    "int4": replace(scheme("int4 as built", "4 page balanced", "4 token hadamard"), one_remedy=True),
    "k8v4": scheme("k8v4 as built", "8 page", "4 token hadamard"),
    "int8": scheme("int8 as built", "8 token", "8 token"),
    "int8-page": scheme("int8-page", "8 page", "8 token"),
}
UNDONE = {"int4": "int4-balanced", "k8v4": "k8v4", "int8": "int8"}  # the same without the pre-flight's remedy
SETS: dict[str, list[Scheme]] = {
    "peers": PEERS,
    "ours": OURS,
    "research": RESEARCH,
    "static": STATIC,
    "spans": SPANS,
    "built": [AS_BUILT],
    "long": [OURS[-1], OURS[1], PEERS[0]],
    "long-rest": [AS_BUILT, OURS[3], PEERS[1]],
}
