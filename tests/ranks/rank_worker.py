"""One process that plays ranks: it takes one piece of work after another from a pipe and answers with what came out."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import torch
from rank_work import Outcome, Work


def outcome_of(work: Work) -> Outcome:
    """Do the work as the rank that it names."""
    os.environ.update(work.environment)
    rank = int(work.environment["RANK"])
    try:
        return Outcome(rank, value=work.function(**work.arguments))
    except Exception as error:  # noqa: BLE001  # whatever it is, the test that gave the work wants to know
        return Outcome(
            rank,
            error=type(error).__name__,
            message=str(error),
            exit_code=getattr(error, "exit_code", None),
            traceback=traceback.format_exc(),
        )


def serve(connection: Connection) -> None:
    """Work until the other end of the pipe is closed."""
    while True:
        try:
            packed = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(outcome_of(pickle.loads(packed))))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a rank that hangs is asked where
    torch.set_num_threads(1)
    serve(Connection(int(sys.argv[1])))
