"""Real signals to this process."""

import os
import signal

import pytest

from dflash_offline import stopping
from dflash_offline.stopping import StopRequest


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No need to wait for a request to count as another one."""
    monkeypatch.setattr(stopping, "_ONE_REQUEST_SECONDS", 0.0)


def test_signals_that_come_together_are_one_request(monkeypatch):
    monkeypatch.setattr(stopping, "_ONE_REQUEST_SECONDS", 60.0)
    with StopRequest("saving") as stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.asked


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_request_waits_and_the_second_does_not(number, capsys):
    with StopRequest("saving") as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        assert "asked to stop: saving; once more stops at once" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_handlers_are_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest("saving"):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_request_goes_through_the_handler_that_was_there():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *given: seen.append(given[0]))
    try:
        with StopRequest("saving"):
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
