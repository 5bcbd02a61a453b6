"""Assertions of the suite are told in full, and the servers are started once a session."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("sentences")
