"""Secrets, and the names of those that a run needs."""

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0003", "0002", None, None


def upgrade() -> None:
    op.create_table(
        "secrets",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("project", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("changed_by", sa.String(40), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("master", sa.String(16), nullable=False),
        sa.Column("wrapped", sa.LargeBinary, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("org", "project", "name", name="one_secret_a_name"),
    )
    op.add_column("runs", sa.Column("secrets", sa.JSON, nullable=False, server_default="[]"))
