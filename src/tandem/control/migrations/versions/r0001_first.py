"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0001", None, None, None


def upgrade() -> None:
    op.create_table(
        "orgs",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("name", sa.String(120), nullable=False, unique=True),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("spec_toml", sa.Text, nullable=False),
        sa.Column("target", sa.String(120), nullable=False),
        sa.Column("usd_per_hour", sa.Float, nullable=False),
        sa.Column("max_cost_usd", sa.Float, nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("retries_left", sa.Integer, nullable=False),
        sa.Column("want", sa.String(10), nullable=False),
        sa.Column("wanted_at", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("wait_until", sa.BigInteger, nullable=False),
        sa.Column("attempt_n", sa.Integer, nullable=False),
        sa.Column("event_n", sa.Integer, nullable=False),
        sa.Column("rev", sa.Integer, nullable=False),
        sa.Column("ended_at", sa.BigInteger, nullable=False),
    )
    op.create_index("runs_by_state", "runs", ["state"])
    op.create_index("runs_by_org", "runs", ["org", "at"])
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("run", sa.String(40), sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("name", sa.String(120), nullable=False, unique=True),
        sa.Column("target", sa.String(120), nullable=False),
        sa.Column("usd_per_hour", sa.Float, nullable=False),
        sa.Column("handle", sa.JSON),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("claimed_by", sa.String(120), nullable=False),
        sa.Column("claimed_at", sa.BigInteger, nullable=False),
        sa.Column("lease_until", sa.BigInteger, nullable=False),
        sa.Column("ticks", sa.BigInteger, nullable=False),
        sa.Column("moved_at", sa.BigInteger, nullable=False),
        sa.Column("limit_ms", sa.BigInteger, nullable=False),
        sa.Column("end", sa.JSON),
        sa.Column("ended_at", sa.BigInteger, nullable=False),
        sa.Column("closed_at", sa.BigInteger, nullable=False),
        sa.Column("closed_why", sa.Text, nullable=False),
        sa.UniqueConstraint("run", "n", name="one_attempt_a_number"),
    )
    op.create_table(
        "events",
        sa.Column("run", sa.String(40), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("n", sa.Integer, primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
    )
    op.create_table(
        "usage",
        sa.Column("key", sa.String(120), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("run", sa.String(40), sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("began", sa.BigInteger, nullable=False),
        sa.Column("ended", sa.BigInteger, nullable=False),
        sa.Column("usd", sa.Float, nullable=False),
    )
    op.create_index("ix_usage_run", "usage", ["run"])
