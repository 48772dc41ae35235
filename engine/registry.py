"""Which engines there are: adapters by name."""

from __future__ import annotations

from trimtab.engine.adapters.embedded import EmbeddedAdapter
from trimtab.engine.adapters.interface import EngineAdapter
from trimtab.engine.contract import KnobCatalogue
from trimtab.errors import EngineError


def adapters() -> dict[str, EngineAdapter]:
    """Every adapter by its engine's name."""
    return {"embedded": EmbeddedAdapter()}


def adapter(name: str) -> EngineAdapter:
    """The adapter of one engine. Raises ``EngineError`` naming the known ones."""
    known = adapters()
    if name not in known:
        raise EngineError(f"{name!r} is not an engine; accepted: {', '.join(known)}")
    return known[name]


def catalogues() -> dict[str, KnobCatalogue]:
    """Every engine's knobs by its name."""
    return {name: known.catalogue for name, known in adapters().items()}
