"""Stop strings: text is held back for as long as it could still become part of one.

One matcher a request, fed by the core with each token's text. A stop string may cross any number of token borders.
"""

from __future__ import annotations


class StopMatcher:
    """Passes text through until the first stop string, which it swallows with all that follows."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is now safe to send, and whether a stop string was completed."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            safe, self._held = self._held[: min(found)], ""
            return safe, True
        num_safe = len(self._held) - self._num_undecided()
        safe, self._held = self._held[:num_safe], self._held[num_safe:]
        return safe, False

    def flush(self) -> str:
        """The text still held back, when the output ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
