"""Deployments: names, revisions and weights; and what a run serves, for the runs that are replicas."""

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0005", "0004", None, None


def upgrade() -> None:
    op.create_table(
        "deployments",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("project", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("before", sa.JSON, nullable=False),
        sa.UniqueConstraint("org", "name", name="one_deployment_a_name"),
    )
    op.create_table(
        "revisions",
        sa.Column("deployment", sa.String(40), sa.ForeignKey("deployments.id"), primary_key=True),
        sa.Column("n", sa.Integer, primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("run", sa.String(40), sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("replica", sa.String(40), sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("weight", sa.Integer, nullable=False),
    )
    op.add_column("runs", sa.Column("serves", sa.JSON, nullable=True))
