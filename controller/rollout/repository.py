"""Reads and writes rollouts in the store, between the row's columns and the machine's types."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from trimtab.controller.rollout.machine import FINAL, Arm, Phase, RolloutCommand, RolloutState, Transition, begin
from trimtab.controller.store.decisions import DecisionNote
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import RolloutRow, TargetRow
from trimtab.engine.contract import Configuration, KnobCatalogue
from trimtab.errors import RolloutError
from trimtab.policies.judge import Verdict


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A rollout to be: which configuration, who asked, and a labelled fault (``None`` in every honest one)."""

    configuration: Configuration
    origin: str
    actor: str
    inject: str | None = None


class Rollouts:
    """The rollouts of one target."""

    def __init__(self, store: Store, target: str, catalogue: KnobCatalogue) -> None:
        self._store = store
        self._target = target
        self._catalogue = catalogue

    def active(self) -> RolloutRow | None:
        """The rollout that is under way; there is at most one."""
        with self._store.read() as session:
            return self._active(session)

    def latest(self) -> RolloutRow | None:
        with self._store.read() as session:
            rows = select(RolloutRow).where(RolloutRow.target == self._target).order_by(RolloutRow.id.desc())
            return session.scalars(rows.limit(1)).first()

    def get(self, rollout_id: int) -> RolloutRow:
        with self._store.read() as session:
            row = session.get(RolloutRow, rollout_id)
            if row is None:
                ids = session.scalars(select(RolloutRow.id).order_by(RolloutRow.id)).all()
                raise RolloutError(f"no rollout {rollout_id}; there are: {', '.join(map(str, ids)) or 'none'}")
            return row

    def all(self) -> list[RolloutRow]:
        with self._store.read() as session:
            rows = select(RolloutRow).where(RolloutRow.target == self._target).order_by(RolloutRow.id)
            return list(session.scalars(rows))

    def start(self, request: RolloutRequest) -> int:
        """Creates a rollout in its first state and returns its id.

        Raises:
            RolloutError: one is under way, or the configuration is the stable one already.
        """
        state = begin(self._store.now())
        note = DecisionNote(
            request.actor,
            f"target {self._target}",
            "rollout_started",
            f"Rollout of {request.configuration.id} started ({request.origin}).",
            {"configuration": dict(request.configuration), "inject": request.inject},
        )
        with self._store.write(note) as session:
            active = self._active(session)
            if active is not None:
                raise RolloutError(f"rollout {active.id} is {active.phase}; abort it or wait for its end")
            target = session.get_one(TargetRow, self._target)
            stable = self._catalogue.configuration(target.stable_configuration)
            if stable == request.configuration:
                raise RolloutError(f"configuration {stable.id} is the stable one already")
            row = RolloutRow(
                target=self._target,
                configuration=dict(request.configuration),
                inject=request.inject,
                origin=request.origin,
                phase=state.phase,
                step=0,
                paused=False,
                command=None,
                sentence="Canary and baseline are starting.",
                verdict=None,
                canary_process_id=None,
                baseline_process_id=None,
                phase_entered_unix_s=state.entered_unix_s,
                started_unix_s=state.started_unix_s,
                ended_unix_s=None,
            )
            session.add(row)
            session.flush()
            return row.id

    def command(self, rollout_id: int, verb: str) -> None:
        """Applies a person's ``pause``, ``resume``, ``promote`` or ``abort``.

        Raises:
            RolloutError: the rollout has ended, or the verb does not fit its phase.
        """
        note = DecisionNote(
            "person", f"rollout {rollout_id}", verb, f"A person asked to {verb} rollout {rollout_id}."
        )
        self.get(rollout_id)
        with self._store.write(note) as session:
            row = session.get_one(RolloutRow, rollout_id)
            phase = Phase(row.phase)
            if phase in FINAL or phase is Phase.ROLLING_BACK:
                raise RolloutError(f"rollout {rollout_id} is {phase}: it can no longer be asked to {verb}")
            if verb != "abort" and phase is not Phase.STEPPING:
                raise RolloutError(f"rollout {rollout_id} is {phase}: only abort is possible now")
            match verb:
                case "pause" | "resume":
                    row.paused = verb == "pause"
                    row.sentence = "Paused by a person." if row.paused else "Resumed by a person."
                case "promote" | "abort":
                    row.command = RolloutCommand(verb)
                case _:
                    raise RolloutError(f"{verb!r} is no command; accepted: pause, resume, promote, abort")

    def look(self, rollout_id: int, verdict: Verdict) -> None:
        """Stores the last look, so that people see it; no decision is made."""
        with self._store.write() as session:
            row = session.get_one(RolloutRow, rollout_id)
            row.verdict = asdict(verdict)
            if not row.paused:
                row.sentence = verdict.sentence

    def transition(self, row: RolloutRow, change: Transition, verdict: Verdict | None) -> bool:
        """Writes the next state and its decision. On success the canary becomes stable in the same write.

        Returns whether it did: a person may have asked for something since ``row`` was read, and comes first.
        """
        now = self.get(row.id)
        if (now.command, now.paused) != (row.command, row.paused):
            return False
        state = change.state
        note = DecisionNote(
            "loop",
            f"rollout {row.id}",
            change.kind,
            change.sentence,
            {
                "from": row.phase,
                "to": state.phase,
                "step": state.step,
                "verdict": asdict(verdict) if verdict else None,
            },
        )
        with self._store.write(note) as session:
            stored = session.get_one(RolloutRow, row.id)
            stored.phase, stored.step, stored.paused = state.phase, state.step, state.paused
            stored.phase_entered_unix_s, stored.command = state.entered_unix_s, state.command
            # The end keeps the sentence that led to it: people ask why, not that.
            if state.phase not in FINAL:
                stored.sentence = change.sentence
            if state.phase in FINAL:
                stored.ended_unix_s = state.entered_unix_s
            if state.phase is Phase.SUCCEEDED:
                target = session.get_one(TargetRow, self._target)
                target.stable_configuration = stored.configuration
                target.stable_process_id = stored.canary_process_id
        return True

    def _active(self, session: Session) -> RolloutRow | None:
        rows = select(RolloutRow).where(RolloutRow.target == self._target, RolloutRow.phase.not_in(FINAL))
        return session.scalars(rows).first()


def state_of(row: RolloutRow) -> RolloutState:
    return RolloutState(
        Phase(row.phase),
        row.step,
        row.paused,
        RolloutCommand(row.command) if row.command else None,
        row.phase_entered_unix_s,
        row.started_unix_s,
    )


def process_ids(target: TargetRow, rollout: RolloutRow | None) -> dict[Arm, int | None]:
    """The process that each arm has; ``None`` where one is to be started."""
    return {
        Arm.STABLE: target.stable_process_id,
        Arm.CANARY: rollout.canary_process_id if rollout else None,
        Arm.BASELINE: rollout.baseline_process_id if rollout else None,
    }
