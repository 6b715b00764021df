"""Processes that start and end without collecting what torch imports: nothing else is skipped."""

import os
import subprocess
import sys

ENDS = """
import atexit, sys, threading, time
from saccade.workers.process import QuickExit
quick_exit = QuickExit()
class Kept:
    def __del__(self):
        print("finalized")
kept = Kept()
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
sys.stdout.write("buffered ")
quick_exit.status = {status}
{then}
"""

BUFFERED = os.environ | {"PYTHONUNBUFFERED": ""}


def end(status, then=""):
    return subprocess.run(
        [sys.executable, "-c", ENDS.format(status=status, then=then)],
        env=BUFFERED,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_quick_exit_waits_for_threads_runs_exit_handlers_and_writes_what_is_buffered():
    ended = end(3)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "buffered thread\nhandler\n", "")


def test_without_a_status_the_process_is_finalized():
    ended = end(None, "raise ValueError('a bug')")
    assert ended.returncode == 1
    assert ended.stdout == "buffered thread\nhandler\nfinalized\n"
    assert ended.stderr.endswith("ValueError: a bug\n")


def test_output_that_cannot_be_written_is_reported():
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS.format(status=0, then="")],
        env=BUFFERED,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 120
    assert b"BrokenPipeError" in errors


def test_collections_are_rare_until_nothing_more_is_imported():
    code = """
import gc
from saccade.workers.process import collect_rarely_while_importing
usual, callbacks = gc.get_threshold(), list(gc.callbacks)
collect_rarely_while_importing()
assert gc.get_threshold()[0] > 10 * usual[0]
import asyncio, email.message, json
kept = [[] for _ in range(200_000)]
assert gc.get_threshold() == usual
assert gc.callbacks == callbacks
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_an_interrupt_during_a_collection_is_not_lost():
    code = """
import ctypes, functools, gc, operator, signal, sys, time
from saccade.workers.process import collect_rarely_while_importing
signal.signal(signal.SIGINT, signal.default_int_handler)
hook = sys.unraisablehook
collect_rarely_while_importing()
interrupt = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGINT)  # no check for signals before the callback
try:
    list(map(operator.call, (interrupt, gc.collect)))
    time.sleep(300)
except KeyboardInterrupt:
    gc.collect()
    assert sys.unraisablehook is hook
    print("interrupted")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")
