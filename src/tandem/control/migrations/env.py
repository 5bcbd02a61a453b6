"""Alembic runs this file: it migrates on the connection that control/migrate.py passes, within its transaction."""

from alembic import context

from tandem.control.tables import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, transactional_ddl=True
)
context.run_migrations()
