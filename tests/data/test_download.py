"""The downloader, against a real server on loopback and names that lie."""

import asyncio
import socket
import ssl
import subprocess
import threading
import time

import pytest
from data.loopback import Site
from data.making import make_jpeg, make_png

from saccade.data.download import Downloaded, Downloader, DownloadOptions, Failed, has_opted_out
from saccade.data.download_queue import download_as_completed
from saccade.data.url_policy import is_public
from saccade.errors import ConfigError


@pytest.fixture
def site():
    site = Site()
    yield site
    site.close()


def options_for(site, **changes):
    fields = {"timeout_s": 60.0, "backoff_s": 0.01, "num_retries": 0, "host_delay_s": 0.0, "max_bytes": 100_000}
    return DownloadOptions(**{**fields, "allow_hosts": frozenset({f"127.0.0.1:{site.port}"}), **changes})


def fetch(url, options, resolve=None):
    async def run():
        async with Downloader(options, resolve) as fetcher:
            return await fetcher.download(url)

    return asyncio.run(run())


def test_an_image_arrives_as_the_server_has_it(site):
    assert fetch(site.url("img7"), options_for(site)) == Downloaded(make_jpeg(seed=7))


def test_what_counts_is_the_first_bytes_not_the_stated_type(site):
    assert fetch(site.url("png"), options_for(site)) == Downloaded(make_png())
    assert fetch(site.url("page"), options_for(site)) == Failed("not an image")
    assert fetch(site.url("empty"), options_for(site)) == Failed("not an image")


def test_we_say_who_we_are_and_ask_for_no_compression(site):
    fetch(site.url("img"), options_for(site, user_agent="saccade/9 (us@example.org)"))
    [headers] = site.headers
    assert headers["User-Agent"] == "saccade/9 (us@example.org)"
    assert headers["Accept-Encoding"] == "identity"
    assert "Cookie" not in headers


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing-here", "http 404"),
        ("moved-away", "address not public"),
        ("moved-to-number", "bad url"),
        ("moved-to-file", "bad url"),
        ("moved-to-port", "port not allowed"),
        ("moved-nowhere", "bad redirect"),
        ("moved-in-circles", "too many redirects"),
        ("boasts", "too large"),
        ("endless", "too large"),
        ("zipped", "encoded body"),
        ("noai", "opted out"),
        ("reserved", "opted out"),
        ("cut", "connection failed"),
    ],
)
def test_what_cannot_be_used_has_one_reason(site, name, reason):
    assert fetch(site.url(name), options_for(site)) == Failed(reason)


def test_redirects_are_followed_and_every_target_passes_the_url_policy(site):
    assert fetch(site.url("moved"), options_for(site)) == Downloaded(make_jpeg(seed=0))
    assert site.seen == {"moved": 1, "img": 1}
    fetch(site.url("moved-in-circles"), options_for(site, max_redirects=3))
    assert site.seen["moved-in-circles"] == 4
    assert fetch(site.url("moved"), options_for(site, max_redirects=0)) == Failed("too many redirects")


def test_a_redirect_to_a_name_of_this_network_is_refused(site):
    """The name of the first request is allowed, the one it redirects to resolves to a private address."""
    looked_up = []

    async def resolve(host, port):
        looked_up.append(host)
        return ["127.0.0.1"]

    options = options_for(site, allow_hosts=frozenset({f"shop.example:{site.port}"}), ports=frozenset({site.port}))
    assert fetch(site.url("moved-to-name", "shop.example"), options, resolve) == Failed("address not public")
    assert looked_up == ["shop.example", "inside.example"]
    assert site.seen == {"moved-to-name": 1}


@pytest.mark.parametrize("name", ["slow", "drip"])
def test_the_timeout_holds_for_a_slow_server(site, name):
    assert fetch(site.url(name), options_for(site, timeout_s=0.3)) == Failed("timeout")


def test_opting_out_may_be_set_aside_only_explicitly(site):
    assert isinstance(fetch(site.url("noai"), options_for(site, respect_opt_out=False)), Downloaded)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["noai"], True),
        (["all", "NOINDEX"], True),
        (["max-image-preview: large, noimageai"], True),
        (["none"], True),
        (["saccade: noindex"], True),
        (["otherbot: noindex"], False),
        (["otherbot: nofollow, noai"], False),
        (["nofollow, noarchive"], False),
        (["unavailable_after: 25 Jun 2030 15:00:00 PST"], False),
        ([], False),
    ],
)
def test_robots_tags_are_read_for_everyone_and_for_us(tags, expected):
    assert has_opted_out(tags, "saccade") is expected


def test_transient_errors_are_retried_and_others_are_not(site):
    assert isinstance(fetch(site.url("flapping"), options_for(site, num_retries=2)), Downloaded)
    assert site.seen["flapping"] == 3
    assert fetch(site.url("broken"), options_for(site, num_retries=2)) == Failed("http 503")
    assert site.seen["broken"] == 3
    fetch(site.url("gone"), options_for(site, num_retries=2))
    assert site.seen["gone"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"HTTP/1.1 200 OK\r\n" + b"X-Many: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
)
def test_what_answers_but_speaks_no_http_is_a_reason_too(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)
                time.sleep(0.1)

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        options = DownloadOptions(num_retries=0, timeout_s=30, allow_hosts=frozenset({f"127.0.0.1:{port}"}))
        outcome = fetch(f"http://127.0.0.1:{port}/", options)
        thread.join()
    assert outcome in (Failed("bad response"), Failed("connection failed"))


def test_a_certificate_nobody_vouches_for_is_refused(tmp_path):
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]
    subject = ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*made, *subject], cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    site = Site(ssl_context=context)
    try:
        outcome = fetch(site.url("img").replace("http:", "https:"), options_for(site, num_retries=2))
        assert outcome == Failed("bad certificate")
        assert not site.seen
    finally:
        site.close()


# ------------------------------------------------------------------ where a link may lead


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://example.com/a.jpg", "bad url"),
        ("file:///etc/passwd", "bad url"),
        ("data:image/png;base64,AAAA", "bad url"),
        ("example.com/a.jpg", "bad url"),
        ("http:///a.jpg", "bad url"),
        ("http://", "bad url"),
        ("", "bad url"),
        ("http://a b.com/", "bad url"),
        ("http://exa%6dple.com/", "bad url"),
        ("http://example.com\\@127.0.0.1/", "bad url"),
        ("http://example.com:99999/", "bad url"),
        ("http://example.com/" + "a" * 5000, "bad url"),
        ("http://me:secret@example.com/a.jpg", "credentials in url"),
        ("http://me@example.com/a.jpg", "credentials in url"),
        ("http://example.com:22/", "port not allowed"),
        ("https://example.com:8443/", "port not allowed"),
        ("http://127.0.0.1/", "address not public"),
        ("http://10.1.2.3/", "address not public"),
        ("http://169.254.169.254/latest/meta-data/", "address not public"),
        ("http://[::1]/", "address not public"),
        ("http://[::ffff:127.0.0.1]/", "address not public"),
        ("http://[::ffff:7f00:1]/", "address not public"),
        ("http://[::ffff:8.8.8.8]/", "address not public"),
        ("http://[64:ff9b::7f00:1]/", "address not public"),
        ("http://[fe80::1%25eth0]/", "address not public"),
        ("http://\uff11\uff12\uff17.0.0.1/", "address not public"),
    ],
)
def test_a_url_outside_of_the_policy_is_refused_before_anything_is_sent(url, reason):
    async def never(host, port):
        raise AssertionError("looked up")

    assert fetch(url, DownloadOptions(num_retries=0), never) == Failed(reason)


@pytest.mark.parametrize(
    "host",
    [
        *("127.1", "127.0.1", "0x7f.1", "2130706433", "0x7f000001", "017700000001", "0177.0.0.1", "127.0.0.1."),
        *("1.2.3.4.5", "1.2.3.4.", "1.2.3.256", "example.1", "example.com.0x", "example.0xA9FEA9FE", "127.0.0.1.."),
        "\uff11\uff12\uff17.1",
    ],
)
def test_a_host_whose_last_label_is_a_number_is_refused_without_a_lookup(host):
    async def never(host, port):
        raise AssertionError("looked up")

    outcome = fetch(f"http://{host}/", DownloadOptions(num_retries=0), never)
    assert outcome in (Failed("bad url"), Failed("address not public"))


def test_names_of_this_machine_are_refused():
    outcome = fetch("http://localhost/", DownloadOptions(num_retries=0))
    assert outcome in (Failed("address not public"), Failed("unknown host"))


NOT_PUBLIC = [
    *(
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.8.8.8",
        "168.63.129.16",
        "169.254.169.254",
    ),
    *(
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.7",
    ),
    *("203.0.113.9", "224.0.0.1", "224.0.1.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
    *(
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "64:ff9b::7f00:1",
        "64:ff9b::808:808",
        "64:ff9b:1::1",
    ),
    *(
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:808:808::1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
    ),
    *("fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1"),
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_of_the_open_internet(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450::1"])
def test_addresses_that_are(address):
    assert is_public(address)


def test_a_name_that_resolves_to_a_private_address_is_never_connected_to(site):
    async def lies(host, port):
        return ["127.0.0.1"]

    options = options_for(site, allow_hosts=frozenset(), ports=frozenset({site.port}), num_retries=2)
    assert fetch(site.url("img", "public.example"), options, lies) == Failed("address not public")
    assert not site.seen


def test_one_private_address_among_public_ones_condemns_the_name(site):
    async def mixes(host, port):
        return ["93.184.216.34", "127.0.0.1"]

    options = options_for(site, allow_hosts=frozenset(), ports=frozenset({site.port}))
    assert fetch(site.url("img", "public.example"), options, mixes) == Failed("address not public")
    assert not site.seen


def site_and_its_port_elsewhere(host, other):
    """A site, and a socket that listens on the same port of another address, if no other process has that port."""
    while True:
        site = Site(host)
        try:
            return site, socket.create_server((other, site.port))
        except OSError:
            site.close()


def test_dns_rebinding_after_the_check_gains_nothing():
    """127.0.0.2, allowed, stands for a public address; the same name means 127.0.0.1 when it is asked again."""
    public, private = site_and_its_port_elsewhere("127.0.0.2", "127.0.0.1")
    lookups = []

    async def rebinds(host, port):
        lookups.append(host)
        return ["127.0.0.2"] if len(lookups) == 1 else ["127.0.0.1"]

    try:
        with private:
            private.settimeout(0.2)
            options = options_for(
                public, allow_hosts=frozenset({f"127.0.0.2:{public.port}"}), ports=frozenset({public.port})
            )

            async def run():
                async with Downloader(options, rebinds) as fetcher:
                    first = await fetcher.download(public.url("img", "rebind.example"))
                    num_lookups = len(lookups)
                    await asyncio.sleep(1.5)  # until the connection is no longer kept
                    return first, num_lookups, await fetcher.download(public.url("img", "rebind.example"))

            first, num_lookups, second = asyncio.run(run())
            assert isinstance(first, Downloaded)
            assert num_lookups == 1, "the name was looked up again after the check"
            assert second == Failed("address not public")
            with pytest.raises(TimeoutError):
                private.accept()
    finally:
        public.close()


def test_a_name_nobody_knows_is_a_reason_of_its_own():
    async def unknown(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    assert fetch("http://nowhere.example/a.jpg", DownloadOptions(num_retries=3), unknown) == Failed("unknown host")


def test_allowed_hosts_are_named_with_their_port():
    with pytest.raises(ConfigError, match=r"10\.0\.0\.5:8080"):
        DownloadOptions(allow_hosts=frozenset({"127.0.0.1"}))
    with pytest.raises(ConfigError, match="max_per_host"):
        DownloadOptions(max_per_host=0)
    with pytest.raises(ConfigError, match="user_agent"):
        DownloadOptions(user_agent="me\r\nHost: you")


# ------------------------------------------------------------------ many at once


def fetch_all(urls, options):
    return [outcome for _, outcome in download_as_completed(urls, lambda url: url, options)]


def test_every_link_has_one_outcome(site):
    names = ["work0", "img1", "nothing", "work3", "img4", "flapping"] * 5
    links = list(enumerate(site.url(name) for name in names))
    outcomes = dict(download_as_completed(links, lambda link: link[1], options_for(site, num_retries=2)))
    assert outcomes.keys() == set(links)
    for (number, _), outcome in outcomes.items():
        seed = {1: 1, 4: 4}.get(number % 6, 0)
        assert outcome == (Failed("http 404") if number % 6 == 2 else Downloaded(make_jpeg(seed=seed)))


def test_items_without_a_link_pass_through_at_once(site):
    items = [None, site.url("work"), None, None]
    outcomes = [outcome for _, outcome in download_as_completed(items, lambda url: url, options_for(site))]
    assert outcomes.count(None) == 3
    assert outcomes[0] is None
    assert Downloaded(make_jpeg()) in outcomes


def test_a_dead_link_holds_back_no_other(site):
    urls = [site.url("slow"), *[site.url(f"img{number}") for number in range(16)]]
    options = options_for(site, timeout_s=4.0, max_concurrent=4, max_per_host=4)
    ended = [url for url, _ in download_as_completed(urls, lambda url: url, options)]
    assert ended[-1] == urls[0]
    assert sorted(ended) == sorted(urls)


def test_requests_to_one_host_and_in_all_stay_within_their_limits(site):
    hosts = [f"127.0.0.{n}" for n in range(1, 5)]
    wide = Site("0.0.0.0")
    try:
        urls = [wide.url("work", host) for _ in range(6) for host in hosts]
        allow = frozenset(f"{host}:{wide.port}" for host in hosts)
        outcomes = fetch_all(urls, options_for(wide, allow_hosts=allow, max_per_host=2, max_concurrent=5))
        assert all(isinstance(outcome, Downloaded) for outcome in outcomes)
        assert max(wide.most_active[host] for host in hosts) == 2
        assert 2 < wide.most_active["all"] <= 5
    finally:
        wide.close()


def test_requests_to_one_host_start_at_a_distance(site):
    fetch_all([site.url("img")] * 4, options_for(site, host_delay_s=0.3))
    starts = site.starts["127.0.0.1"]
    assert max(starts) - min(starts) > 0.5


def test_downloads_wait_when_the_memory_limit_is_reached(site):
    options = options_for(site, max_concurrent=8, max_per_host=8, max_held_bytes=3 * len(make_jpeg()))
    outcomes = download_as_completed([site.url("img")] * 100, lambda url: url, options)
    next(outcomes)
    time.sleep(0.4)  # whoever takes the images is busy
    assert site.seen["img"] < 20, "32 links were begun"
    assert sum(isinstance(outcome, Downloaded) for _, outcome in outcomes) == 99


def test_leaving_early_ends_the_thread_and_the_requests(site):
    outcomes = download_as_completed([site.url("img"), *[site.url("slow")] * 20], lambda url: url, options_for(site))
    assert isinstance(next(outcomes)[1], Downloaded)
    start = time.monotonic()
    outcomes.close()
    assert time.monotonic() - start < 20, "the slow ones take 30 s"
    assert not [thread for thread in threading.enumerate() if thread.name == "fetch"]
