"""Which cores serve, which run trials, which drive load. Pure: the caller says which cores there are.

Serving, trials and client get disjoint sets. Where there are too few, sharing needs the policy's word, and what was
shared is said in the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.errors import ExperimentError

NUM_SLOTS = 3  # stable, canary, baseline


@dataclass(frozen=True, slots=True)
class CoreSets:
    """Core numbers for each use.

    ``slots`` has one set for each replica that may run at once (stable, canary, baseline; a trial engine takes a free
    one). ``shared`` says in words what shares cores, and is ``None`` when the slots and the client are disjoint.
    """

    slots: tuple[tuple[int, ...], ...]
    trial: tuple[int, ...] | None  # None: a free slot
    client: tuple[int, ...]
    shared: str | None


def core_sets(cores: Sequence[int], per_replica: int, *, share: bool) -> CoreSets:
    """Divides ``cores``.

    A rollout needs three replicas (stable, canary, baseline) and a core for the client; a trial needs one replica
    and the client beside the stable one.

    Raises:
        ExperimentError: too few cores, and the policy does not say ``share: true``.
    """
    ordered = tuple(sorted(cores))
    needed = NUM_SLOTS * per_replica + 1
    if len(ordered) >= needed:
        slots = tuple(ordered[i * per_replica : (i + 1) * per_replica] for i in range(NUM_SLOTS))
        return CoreSets(slots, None, ordered[NUM_SLOTS * per_replica :], None)
    if not share:
        raise ExperimentError(
            f"{len(ordered)} cores do not give three replicas of {per_replica} and a load client {needed} disjoint"
            " ones; accepted: more cores, fewer resources.cpus, or share: true in the policy"
        )
    client = ordered[-1:]
    trial = ordered[:-1][:per_replica] or ordered
    told = "stable, canary and baseline share all cores"
    told += "; an idle stable replica shares the trial engine's cores during a search"
    if set(trial) & set(client):
        told += "; the load client shares the trial engine's core"
    return CoreSets((ordered,) * NUM_SLOTS, trial, client, told)
