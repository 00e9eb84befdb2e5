"""When to try again: at once after the first failure, then later and later, and not for ever.

A fault that comes back at every start must not turn into a loop that fills logs and burns a GPU; one that comes once a
day must cost no more than the restart itself.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from nibble.errors import NibbleError


@dataclass
class RestartPolicy:
    """Delays between restarts. most: restarts within `window_s` seconds before giving up."""

    what: str
    most: int = 6
    window_s: float = 300.0
    longest_s: float = 30.0
    _times: deque[float] = field(default_factory=deque)
    total: int = 0

    def next_delay_s(self, reason: str, now: float | None = None) -> float:
        """Count one restart; seconds to wait before it: 0, 1, 2, 4, ... Raises NibbleError when it is one too many."""
        now = time.monotonic() if now is None else now
        while self._times and now - self._times[0] > self.window_s:
            self._times.popleft()
        if len(self._times) >= self.most:
            raise NibbleError(f"gave up on {self.what} after {self.most} restarts in {self.window_s:.0f} s: {reason}")
        recent = len(self._times)
        self._times.append(now)
        self.total += 1
        return 0.0 if recent == 0 else min(self.longest_s, 2.0 ** (recent - 1))
