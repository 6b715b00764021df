"""Pages of other origins: which are allowed, the answers to preflight requests, refused configurations."""

from pathlib import Path

import pytest

from saccade.errors import ConfigError
from saccade.serve.config import ServeConfig
from saccade.serve.cors import cors_headers, preflight_headers

KEYS = Path("keys.json")
APP = "https://app.example"
STAINLESS = b"authorization,content-type,x-stainless-arch,x-stainless-retry-count"


def preflight(origins, **headers):
    sent = {b"origin": APP.encode(), b"access-control-request-method": b"POST"}
    sent |= {name.replace("_", "-").encode(): value for name, value in headers.items()}
    found = preflight_headers(origins, "OPTIONS", sent)
    return found and {name: b", ".join(value for key, value in found if key == name) for name, _ in found}


def test_headers_that_a_browser_asks_for_are_allowed_by_name():
    found = preflight([APP], access_control_request_headers=STAINLESS)
    assert found[b"access-control-allow-headers"] == STAINLESS.replace(b",", b", ")
    assert found[b"access-control-allow-methods"] == b"GET, HEAD, POST"
    assert found[b"access-control-allow-origin"] == APP.encode()
    assert b"origin" in found[b"vary"]
    assert b"access-control-request-headers" in found[b"vary"]
    assert b"access-control-allow-credentials" not in found


@pytest.mark.parametrize("asked", [b"", b" , ", b"x y", b"a\r\nset-cookie: b", b"\xff", b"a," * 5000, b"x" * 5000])
def test_what_is_no_name_of_a_header_is_not_repeated(asked):
    found = preflight([APP], access_control_request_headers=asked)
    assert found[b"access-control-allow-headers"] == b"authorization, content-type"


def test_any_origin_may_be_allowed():
    assert dict(cors_headers(["*"], {b"origin": b"https://any.example"}))[b"access-control-allow-origin"] == b"*"
    assert preflight(["*"])[b"access-control-allow-origin"] == b"*"
    assert cors_headers(["*"], {}) == cors_headers([APP], {b"origin": b"null"}) == []
    assert preflight([APP], origin=b"https://evil.example") is None


@pytest.mark.parametrize(
    "origin",
    ["", "null", "app.example", "https://", "https://app.example/", "https://app.example/a", "https://*.example", "https://App.example",
     "https://app.example:", "https://app.example:99999", "https://user@app.example", "https://app.example?x", "https://ä.example",
     "https://app example", "https://app.example,https://b.example", "https://app.example:443", "http://app.example:80",
     3],
)  # fmt: skip
def test_what_no_browser_sends_as_an_origin_is_refused(origin):
    with pytest.raises(ConfigError, match=r"cors_origins has .*use https://") as refused:
        ServeConfig(cors_origins=(APP, origin))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "origin",
    [APP, "http://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:8080", "chrome-extension://abcdef", "app://obsidian.md"],
)  # fmt: skip
def test_origins_of_browsers_are_accepted(origin):
    assert ServeConfig(cors_origins=(origin,)).cors_origins == (origin,)


def test_any_origin_needs_keys_or_the_word_that_none_are_needed():
    with pytest.raises(ConfigError, match="every web page could use the server"):
        ServeConfig(cors_origins=("*",))
    assert ServeConfig(cors_origins=("*",), api_keys=KEYS).cors_origins == ("*",)
    assert ServeConfig(cors_origins=("*",), no_auth=True).cors_origins == ("*",)
