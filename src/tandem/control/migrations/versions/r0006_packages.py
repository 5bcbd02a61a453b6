"""Environments as packages: names, each of one org, and versions, whose bytes never change."""

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0006", "0005", None, None


def upgrade() -> None:
    op.create_table(
        "packages",
        sa.Column("id", sa.String(120), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("project", sa.String(40), nullable=False),
        sa.Column("title", sa.String(130), nullable=False),
        sa.Column("skeleton", sa.String(120), nullable=False, unique=True),
        sa.Column("at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "package_versions",
        sa.Column("package", sa.String(120), sa.ForeignKey("packages.id"), primary_key=True),
        sa.Column("version", sa.String(60), primary_key=True),
        sa.Column("org", sa.String(40), sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("file", sa.String(200), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("metadata_text", sa.LargeBinary, nullable=False),
        sa.Column("told", sa.JSON, nullable=False),
        sa.Column("provenance", sa.JSON, nullable=False),
        sa.Column("pushed_by", sa.String(40), nullable=False),
        sa.Column("yanked_at", sa.BigInteger, nullable=False),
        sa.Column("yanked_why", sa.String(300), nullable=False),
    )
