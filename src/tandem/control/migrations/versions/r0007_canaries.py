"""What each revision did, canaries, and how long a replica is kept that no request reaches."""

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0007", "0006", None, None


def upgrade() -> None:
    for column in (
        sa.Column("canary", sa.Float, nullable=False, server_default="0"),
        sa.Column("keep_s", sa.Integer, nullable=False, server_default="0"),
        sa.Column("why", sa.Text, nullable=False, server_default=""),
        sa.Column("counts", sa.JSON, nullable=False, server_default="{}"),
        sa.Column("beside", sa.JSON, nullable=False, server_default="{}"),
    ):
        op.add_column("revisions", column)
    op.create_table(
        "ratings",
        sa.Column("deployment", sa.String(40), sa.ForeignKey("deployments.id"), primary_key=True),
        sa.Column("answer", sa.String(200), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("value", sa.Float, nullable=False),
    )
