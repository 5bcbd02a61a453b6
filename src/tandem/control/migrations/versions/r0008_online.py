"""The online server behind a name."""

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0008", "0007", None, None


def upgrade() -> None:
    op.add_column("deployments", sa.Column("online", sa.String(120), nullable=False, server_default=""))
