"""Bring a database to this release's tables, by the scripts in migrations/versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from tandem.errors import StoreError


def head() -> str:
    """Return the revision of this release's tables."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def revision(connection: sa.Connection) -> str:
    """Return the revision of a database; empty if it has no tables yet."""
    return MigrationContext.configure(connection).get_current_revision() or ""


def migrate(connection: sa.Connection) -> None:
    """Upgrade in one transaction. StoreError if a newer release made the database: no upgrade is ever undone."""
    config = _config()
    config.attributes["connection"] = connection
    scripts = ScriptDirectory.from_config(config)
    head = scripts.get_current_head()
    with connection.begin():
        found = MigrationContext.configure(connection).get_current_revision()
        if found not in (None, *(script.revision for script in scripts.walk_revisions())):
            raise StoreError(
                f"the control plane's database has revision '{found}', and this Tandem knows revisions up to '{head}'; "
                "start the newer Tandem that made it, or restore a backup from before"
            )
        if found != head:
            command.upgrade(config, "head")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "tandem.control:migrations")
    return config
