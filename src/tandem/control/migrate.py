"""Bring a database to this release's tables, by the scripts in migrations/versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from tandem.errors import StoreError


def migrate(connection: sa.Connection) -> None:
    """Upgrade in one transaction. StoreError if a newer release made the database: no upgrade is ever undone."""
    config = Config()
    config.set_main_option("script_location", "tandem.control:migrations")
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
