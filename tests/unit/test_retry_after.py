"""What a server may write into Retry-After."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from tandem.io.retry_after import retry_after_s


@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("0", 0.0)])
def test_a_number_is_seconds_from_now(value: str, seconds: float):
    assert retry_after_s(value) == seconds


def test_a_date_is_the_time_until_then():
    now = datetime.now(UTC)
    assert 55 < (retry_after_s(format_datetime(now + timedelta(minutes=1), usegmt=True)) or 0) <= 60
    assert 55 < (retry_after_s(f"{now + timedelta(minutes=1):%a, %d %b %Y %H:%M:%S} -0000") or 0) <= 60
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


@pytest.mark.parametrize("value", ["", "soon", "nan", "inf", "2026-11-21"])
def test_what_is_neither_says_nothing(value: str):
    assert retry_after_s(value) is None
