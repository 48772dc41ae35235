"""Whether a cron schedule has come due. Pure; times are Unix seconds, cron lines are read in UTC."""

from __future__ import annotations

from datetime import UTC, datetime

from croniter import croniter


def is_due(cron: str, last_unix_s: float, now_unix_s: float) -> bool:
    """Whether a time that ``cron`` names lies after ``last_unix_s`` and not after ``now_unix_s``."""
    following = croniter(cron, datetime.fromtimestamp(last_unix_s, UTC)).get_next(datetime)
    return bool(following.timestamp() <= now_unix_s)
