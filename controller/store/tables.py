"""The state store's tables. Every column says what it holds; ``migrations/`` builds them.

Rows are the controller's memory across kills: a transition and the decision behind it are one transaction.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Boolean, Float, ForeignKey, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """All tables of the state store."""


class ProcessRow(Base):
    """A detached process that Trimtab started: an engine replica, a trial engine or Envoy."""

    __tablename__ = "processes"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    role: Mapped[str] = mapped_column(String(16))  # replica | trial | envoy
    label: Mapped[str] = mapped_column(String(64))  # for people: "canary of rollout 3"
    pid: Mapped[int] = mapped_column(Integer)
    start_ticks: Mapped[int] = mapped_column(Integer)
    nonce: Mapped[str] = mapped_column(String(32))
    log_path: Mapped[str] = mapped_column(Text)
    cpus: Mapped[list[int]] = mapped_column(JSON)
    base_url: Mapped[str] = mapped_column(Text)  # empty for Envoy
    admin_url: Mapped[str] = mapped_column(Text)  # empty for Envoy
    admin_token: Mapped[str] = mapped_column(Text)  # the file is 0600
    model: Mapped[str] = mapped_column(Text)
    configuration: Mapped[dict[str, Any]] = mapped_column(JSON)
    inject: Mapped[str | None] = mapped_column(Text)  # a labelled fault; None in every honest launch
    started_unix_s: Mapped[float] = mapped_column(Float)
    ended_unix_s: Mapped[float | None] = mapped_column(Float)  # None: not known to have ended


class TargetRow(Base):
    """The service that is tuned, its manifests and its one stable arm."""

    __tablename__ = "targets"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    target_manifest: Mapped[dict[str, Any]] = mapped_column(JSON)
    policy_manifest: Mapped[dict[str, Any]] = mapped_column(JSON)
    manifest_folder: Mapped[str] = mapped_column(Text)  # what relative paths in the policy are relative to
    stable_configuration: Mapped[dict[str, Any]] = mapped_column(JSON)
    stable_process_id: Mapped[int | None] = mapped_column(Integer)  # None: to be started
    envoy_process_id: Mapped[int | None] = mapped_column(Integer)  # None: to be started


class ExperimentRow(Base):
    """One search."""

    __tablename__ = "experiments"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    target: Mapped[str] = mapped_column(ForeignKey("targets.name"))
    state: Mapped[str] = mapped_column(
        String(16)
    )  # running | won (its winner waits for the loop) | finished | failed
    trigger: Mapped[str] = mapped_column(String(16))  # manual | schedule
    study: Mapped[str] = mapped_column(String(64))  # the Optuna study's name
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    report_path: Mapped[str | None] = mapped_column(Text)
    reason: Mapped[str | None] = mapped_column(Text)  # why it failed, or what it concluded
    started_unix_s: Mapped[float] = mapped_column(Float)
    ended_unix_s: Mapped[float | None] = mapped_column(Float)


class GateRow(Base):
    """The outcome of the offline gate for one configuration of one target on one model file."""

    __tablename__ = "gates"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    target: Mapped[str] = mapped_column(ForeignKey("targets.name"))
    configuration_id: Mapped[str] = mapped_column(String(12))
    key: Mapped[str] = mapped_column(Text)  # model, engine, hardware and demands: a change makes it stale
    passed: Mapped[bool] = mapped_column(Boolean)
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    checked_unix_s: Mapped[float] = mapped_column(Float)


class RolloutRow(Base):
    """One staged move of traffic; ``controller.rollout.machine`` gives its columns their meaning."""

    __tablename__ = "rollouts"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    target: Mapped[str] = mapped_column(ForeignKey("targets.name"))
    configuration: Mapped[dict[str, Any]] = mapped_column(JSON)
    inject: Mapped[str | None] = mapped_column(Text)
    origin: Mapped[str] = mapped_column(Text)  # "experiment 2", "a person"
    phase: Mapped[str] = mapped_column(String(16))
    step: Mapped[int] = mapped_column(Integer)
    paused: Mapped[bool] = mapped_column(Boolean)
    command: Mapped[str | None] = mapped_column(String(16))  # promote | abort, until acted upon
    sentence: Mapped[str] = mapped_column(Text)  # why it is where it is
    verdict: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # the last look
    canary_process_id: Mapped[int | None] = mapped_column(Integer)
    baseline_process_id: Mapped[int | None] = mapped_column(Integer)
    phase_entered_unix_s: Mapped[float] = mapped_column(Float)
    started_unix_s: Mapped[float] = mapped_column(Float)
    ended_unix_s: Mapped[float | None] = mapped_column(Float)


class DecisionRow(Base):
    """One decision with its inputs. Rows are appended, never changed: triggers in the database refuse it."""

    __tablename__ = "decisions"

    sequence: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    at_unix_s: Mapped[float] = mapped_column(Float)
    actor: Mapped[str] = mapped_column(String(32))  # loop | person | schedule
    subject: Mapped[str] = mapped_column(String(64))  # "rollout 3"
    kind: Mapped[str] = mapped_column(String(32))
    sentence: Mapped[str] = mapped_column(Text)
    inputs: Mapped[dict[str, Any]] = mapped_column(JSON)
    previous_hash: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64))
