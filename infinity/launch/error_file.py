"""The file in which a rank leaves why it failed, for whoever started it: torch's launchers name one to each rank.

Its form is that of torch.distributed.elastic (error_handler.py), so that torchrun shows the message in its own report, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True, slots=True)
class RecordedError:
    """Why a rank failed, in its own words."""

    message: str
    remedy: str


def record_error(message: str, remedy: str, *, callstack: str = "", environment: Mapping[str, str] | None = None) -> None:
    """Write why this process fails into the file that its environment names; without one nothing happens.

    torchrun shows `callstack` where there is one, the message otherwise. A file that cannot be written is left alone: the
    error itself is shown all the same.
    """
    name = (os.environ if environment is None else environment).get(ERROR_FILE)
    if not name:
        return
    details = {"timestamp": str(int(time.time())), "remedy": remedy}
    if callstack:
        details["py_callstack"] = callstack
    with contextlib.suppress(OSError):
        Path(name).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}), encoding="utf-8")


def read_error(path: Path) -> RecordedError | None:
    """Return what a rank left at `path`; None where it left nothing that can be read."""
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))["message"]
        return RecordedError(str(recorded["message"]), str(recorded["extraInfo"].get("remedy", "")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, cut short, or another program's
        return None
