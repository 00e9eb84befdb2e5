"""The gate before a server starts: is it proven what this engine's cache costs?

Without a valid certificate the engine's recipe decides (`on_uncertified`): refuse to start, serve with an fp16 cache,
or warn and serve. An operator may decide otherwise for one start: `CERTIFICATE=refuse|fallback|warn|ignore`. The
reason goes to the terminal and the server's log, the metric `nibble_certificate`, and, when the cache falls back to
fp16, to `kv_fallback_reason` of every answer.
"""

from __future__ import annotations

import os
from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from nibble.certificate import Standing, check_certificate
from nibble.errors import NibbleError
from nibble.manifest import read_manifest
from serve.settings import ServeSettings

ACTIONS = ("refuse", "fallback", "warn", "ignore")
FALLBACK_KV = "fp16"
GOOD = (Standing.VALID, Standing.UNNEEDED)


def pass_gate(settings: ServeSettings, action: str | None, console: Console) -> ServeSettings:
    """The settings to serve with. action: the operator's, None for the recipe's. NibbleError when it says refuse."""
    asked = action or os.environ.get("CERTIFICATE") or None
    if asked is not None and asked not in ACTIONS:
        raise NibbleError(f"CERTIFICATE: got {asked!r}, allowed {', '.join(ACTIONS)} or nothing (as the recipe says)")
    if settings.options.kv_fallback or asked == "ignore":
        return settings
    manifest = read_manifest(settings.engine_dir)
    standing, reason = check_certificate(settings.engine_dir, manifest)
    options = replace(settings.options, certificate=standing.value)
    if standing in GOOD:
        console.print(f"[green]certificate {standing.value}[/]: {escape(reason)}", soft_wrap=True)
        return replace(settings, options=options)
    decided = asked or manifest.kv.recipe.certificate.on_uncertified
    if decided == "refuse":
        raise NibbleError(
            f"certificate {standing.value}: {reason}; or serve all the same: CERTIFICATE=warn, KV_FALLBACK=fp16"
        )
    console.print(f"[bold yellow]certificate {standing.value}[/]: {escape(reason)}", soft_wrap=True)
    if decided == "fallback":
        console.print(f"[bold yellow]the cache is {FALLBACK_KV}[/] (CERTIFICATE=warn serves the engine as it is)")
        why = f"certificate {standing.value}: {reason}"
        options = replace(options, kv_fallback=FALLBACK_KV, kv_fallback_reason=why)
    return replace(settings, options=options)
