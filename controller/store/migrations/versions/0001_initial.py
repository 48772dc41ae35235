"""The first tables, and the triggers that keep decisions append-only."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "targets",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("target_manifest", sa.JSON, nullable=False),
        sa.Column("policy_manifest", sa.JSON, nullable=False),
        sa.Column("manifest_folder", sa.Text, nullable=False),
        sa.Column("stable_configuration", sa.JSON, nullable=False),
        sa.Column("stable_process_id", sa.Integer),
        sa.Column("envoy_process_id", sa.Integer),
    )
    op.create_table(
        "processes",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("start_ticks", sa.Integer, nullable=False),
        sa.Column("nonce", sa.String(32), nullable=False),
        sa.Column("log_path", sa.Text, nullable=False),
        sa.Column("cpus", sa.JSON, nullable=False),
        sa.Column("base_url", sa.Text, nullable=False),
        sa.Column("admin_url", sa.Text, nullable=False),
        sa.Column("admin_token", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("configuration", sa.JSON, nullable=False),
        sa.Column("inject", sa.Text),
        sa.Column("started_unix_s", sa.Float, nullable=False),
        sa.Column("ended_unix_s", sa.Float),
    )
    op.create_table(
        "experiments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("target", sa.String(63), sa.ForeignKey("targets.name"), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("trigger", sa.String(16), nullable=False),
        sa.Column("study", sa.String(64), nullable=False),
        sa.Column("progress", sa.JSON),
        sa.Column("result", sa.JSON),
        sa.Column("report_path", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("started_unix_s", sa.Float, nullable=False),
        sa.Column("ended_unix_s", sa.Float),
    )
    op.create_table(
        "gates",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("target", sa.String(63), sa.ForeignKey("targets.name"), nullable=False),
        sa.Column("configuration_id", sa.String(12), nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("passed", sa.Boolean, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("checked_unix_s", sa.Float, nullable=False),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("target", sa.String(63), sa.ForeignKey("targets.name"), nullable=False),
        sa.Column("configuration", sa.JSON, nullable=False),
        sa.Column("inject", sa.Text),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("command", sa.String(16)),
        sa.Column("sentence", sa.Text, nullable=False),
        sa.Column("verdict", sa.JSON),
        sa.Column("canary_process_id", sa.Integer),
        sa.Column("baseline_process_id", sa.Integer),
        sa.Column("phase_entered_unix_s", sa.Float, nullable=False),
        sa.Column("started_unix_s", sa.Float, nullable=False),
        sa.Column("ended_unix_s", sa.Float),
    )
    op.create_table(
        "decisions",
        sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at_unix_s", sa.Float, nullable=False),
        sa.Column("actor", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("sentence", sa.Text, nullable=False),
        sa.Column("inputs", sa.JSON, nullable=False),
        sa.Column("previous_hash", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
    )
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER decisions_no_{verb.lower()} BEFORE {verb} ON decisions "
            "BEGIN SELECT RAISE(ABORT, 'decisions are append-only'); END"
        )
