"""Media by URL: from allowed hosts only, at public addresses only, without redirects, within bytes and time."""

import asyncio

import pytest
from aiohttp import web

from saccade.errors import ConfigError
from saccade.processor import MediaLimits
from saccade.serve.conversation import check_media_url
from saccade.serve.errors import ApiError
from saccade.serve.remote_media import RemoteMedia

LIMITS = MediaLimits(max_bytes=1000, max_request_bytes=2500)
ADDRESSES = {
    "loopback.example": ["127.0.0.1"],
    "private.example": ["10.1.2.3"],
    "metadata.example": ["169.254.169.254"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "nat64.example": ["64:ff9b::7f00:1"],
    "local6.example": ["::1"],
    "half.example": ["93.184.216.34", "127.0.0.1"],
}


async def resolve(host, port):
    if host not in ADDRESSES:
        raise OSError("unknown")
    return ADDRESSES[host]


class Site:
    """A web server on loopback that counts its requests."""

    def __init__(self):
        self.num_requests = 0

    async def serve(self, request):
        self.num_requests += 1
        kind = request.match_info["kind"]
        if kind == "redirect":
            raise web.HTTPFound("http://loopback.example/ok")
        if kind == "missing":
            raise web.HTTPNotFound
        if kind == "compressed":
            return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})
        if kind == "slow":
            await asyncio.sleep(60)
        if kind == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"x" * 100)
            return response
        return web.Response(body=b"x" * int(request.query.get("bytes", 3)))


async def with_site(ask, hosts=(), timeout_s=60.0):
    site, app = Site(), web.Application()
    app.router.add_get("/{kind}", site.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", 0)
    await listening.start()
    port = runner.addresses[0][1]
    media = RemoteMedia([*hosts, f"loopback.example:{port}"], limits=LIMITS, timeout_s=timeout_s, resolve=resolve)
    try:
        return await ask(media, f"http://loopback.example:{port}"), site.num_requests
    finally:
        await media.close()
        await runner.cleanup()


def conversation(*urls, kind="image_url"):
    return [
        {"role": "user", "content": [{"type": "text", "text": "see"}, *({"type": kind, kind: url} for url in urls)]}
    ]


def fetched(path, *, hosts=(), timeout_s=60.0):
    async def ask(media, root):
        messages = conversation(path if "://" in path else f"{root}{path}")
        await media.fetch_all(messages)
        return messages[0]["content"][1]["image_url"]

    return asyncio.run(with_site(ask, hosts, timeout_s))


def test_an_allowed_host_is_fetched():
    assert fetched("/ok") == (b"xxx", 1)


def test_videos_frames_and_several_images_are_fetched_and_data_urls_stay():
    async def ask(media, root):
        frames = {"type": "video", "video": [f"{root}/ok?bytes=1", "data:image/png;base64,AA"]}
        messages = conversation(f"{root}/ok?bytes=2", "data:image/png;base64,AA") + conversation(
            f"{root}/ok?bytes=2000", kind="video_url"
        )
        messages[0]["content"].append(frames)
        await media.fetch_all(messages)
        assert [part.get("image_url") for part in messages[0]["content"][1:3]] == [b"xx", "data:image/png;base64,AA"]
        assert frames["video"] == [b"x", "data:image/png;base64,AA"]
        assert len(messages[1]["content"][1]["video_url"]) == 2000

    assert asyncio.run(with_site(ask))[1] == 3


def test_bytes_are_counted_as_they_arrive_and_a_refusal_ends_the_fetch():
    num_bytes = 0

    def count(num_new):
        nonlocal num_bytes
        num_bytes += num_new
        if num_bytes > 1000:
            raise ApiError(429, "the server is at its limit; try again later", code="overloaded")

    async def ask(media, root):
        with pytest.raises(ApiError, match="at its limit"):
            await media.fetch_all(conversation(f"{root}/ok?bytes=900", f"{root}/ok?bytes=900"), count)

    asyncio.run(with_site(ask))
    assert 1000 < num_bytes <= 1800


FAILING = {
    "/redirect": "it redirects, which is not followed",
    "/missing": "its host answered 404",
    "/compressed": "its body is compressed",
    "/slow": r"it did not arrive within 0\.3 s",
    "/endless": "it has more than 1000 bytes",
    "/ok?bytes=1001": "it has more than 1000 bytes",
}


@pytest.mark.parametrize("path", FAILING)
def test_what_a_host_may_not_send_fails_with_the_reason(path):
    with pytest.raises(ApiError, match=f"image 1: its URL cannot be fetched: {FAILING[path]}") as failed:
        fetched(path, timeout_s=0.3 if path == "/slow" else 60.0)
    assert (failed.value.status_code, failed.value.code) == (400, "remote_media_failed")


def test_the_bytes_of_a_request_are_bounded():
    async def ask(media, root):
        await media.fetch_all(conversation(*[f"{root}/ok?bytes=900"] * 3))

    with pytest.raises(ApiError, match="over the limit of 2500 per request"):
        asyncio.run(with_site(ask))


PRIVATE = [*ADDRESSES]
REFUSED = {
    **{f"http://{host}/x": "address not public" for host in PRIVATE},
    "http://other.example/x": "not allowed on this server",
    "http://loopback.example.other.example/x": "not allowed on this server",
    "http://unknown.example/x": "does not answer|unknown",
    "http://loopback.example:22/x": "port not allowed",
    "http://user:word@loopback.example/x": "credentials in url",
    "http://127.0.0.1/x": "address not public",
    "http://127.1/x": "bad url",
    "http://2130706433/x": "bad url",
    "http://0x7f000001/x": "bad url",
    "http://0177.0.0.1/x": "bad url",
    "http://[::1]/x": "address not public",
    "http://[::ffff:127.0.0.1]/x": "address not public",
    "http://[::ffff:7f00:1]/x": "address not public",
    "http://[64:ff9b::7f00:1]/x": "address not public",
    "http://169.254.169.254/latest/meta-data": "address not public",
    "http:///x": "bad url",
    "http://": "bad url",
    "http://loopback.example\\@other.example/x": "bad url|not allowed",
    "http://loopback.example#@other.example/x": "address not public",
    "https://LOOPBACK.example./x": "address not public|unknown",
}


@pytest.mark.parametrize("url", REFUSED)
def test_other_hosts_and_private_addresses_are_never_connected_to(url):
    hosts = [*PRIVATE, "unknown.example", "127.0.0.1", "[::1]"]
    hosts = [host for host in hosts if ":" not in host]

    async def ask(media, root):
        with pytest.raises(ApiError, match=REFUSED[url]):
            await media.fetch_all(conversation(url))

    assert asyncio.run(with_site(ask, hosts))[1] == 0


def test_hosts_are_checked_when_the_server_starts():
    for host in ("", "http://a", "a/b", ":80", "ü"):
        with pytest.raises(ConfigError, match="allow_remote_media"):
            RemoteMedia([host], limits=LIMITS, timeout_s=1)


def test_without_permission_a_remote_url_is_refused_by_name():
    with pytest.raises(ApiError) as refused:
        check_media_url("https://example.com/a.png", "messages[0].content[0].image_url.url")
    assert refused.value.code == "remote_url_not_allowed"
    for url in ("file:///etc/passwd", "/etc/passwd", "ftp://a/b", "gopher://a", "HTTP:/a", "", "\\\\host\\share"):
        for allows_remote in (False, True):
            with pytest.raises(ApiError) as refused:
                check_media_url(url, "x", allows_remote)
            assert refused.value.code == "invalid_media_url"
