"""Projects, keys, answered writes, and the generations of mirrored files."""

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0002", "0001", None, None


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("budget_usd", sa.Float, nullable=False),
        sa.Column("max_live_runs", sa.Integer, nullable=False),
        sa.UniqueConstraint("org", "name", name="one_project_a_name"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("project", sa.String(40), nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("revoked_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "answered",
        sa.Column("id", sa.String(200), primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("answer", sa.JSON, nullable=False),
    )
    op.create_index("ix_answered_at", "answered", ["at"])
    op.create_table(
        "streams",
        sa.Column("run", sa.String(40), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("file", sa.String(300), primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
    )
    for name, length in (("project", 40), ("group", 120), ("created_by", 40)):
        op.add_column("runs", sa.Column(name, sa.String(length), nullable=False, server_default=""))
    op.create_index("runs_by_project", "runs", ["project", "at"])
