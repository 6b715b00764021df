"""A web server on loopback that misbehaves in every way a downloader meets, and counts what it is asked."""

import asyncio
import threading
import time
from collections import Counter, defaultdict

from aiohttp import web
from data.making import make_jpeg, make_png


class Site:
    """A web server in a thread that counts what it is asked."""

    def __init__(self, host="127.0.0.1", ssl_context=None):
        self.seen = Counter()
        self.active, self.most_active = Counter(), Counter()
        self.starts = defaultdict(list)
        self.headers = []
        self._ready = threading.Event()
        self._host, self._ssl_context = host, ssl_context
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _serve(self):
        self.loop = asyncio.new_event_loop()
        app = web.Application()
        app.router.add_get("/{name:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self.loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, self._host, 0, ssl_context=self._ssl_context)
        self.loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())
        self.loop.close()

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def url(self, name, host="127.0.0.1"):
        return f"http://{host}:{self.port}/{name}"

    async def _answer(self, request):
        name, host = request.match_info["name"], request.host.partition(":")[0]
        self.seen[name] += 1
        self.headers.append(request.headers)
        self.starts[host].append(time.monotonic())
        for key in (host, "all"):
            self.active[key] += 1
            self.most_active[key] = max(self.most_active[key], self.active[key])
        try:
            return await self._page(name, request)
        finally:
            self.active[host] -= 1
            self.active["all"] -= 1

    async def _page(self, name, request):
        image = make_jpeg(seed=int(name[3:]) if name[3:].isdigit() else 0)
        if name == "png":
            return web.Response(body=make_png(), content_type="text/plain")
        if name == "page":
            return web.Response(text="<html>", content_type="image/jpeg")
        if name == "empty":
            return web.Response(body=b"", content_type="image/jpeg")
        if name == "moved":
            raise web.HTTPFound("/img")
        if name.startswith("moved-"):
            targets = {
                "moved-away": "http://169.254.169.254/latest/meta-data/",
                "moved-to-number": "http://2130706433/",
                "moved-to-file": "file:///etc/passwd",
                "moved-to-port": "http://example.com:22/",
                "moved-to-name": f"http://inside.example:{self.port}/img",
                "moved-in-circles": "/moved-in-circles",
            }
            return web.Response(status=307, headers={"Location": targets[name]} if name in targets else {})
        if name == "slow":
            await asyncio.sleep(30)
        if name == "drip":
            response = web.StreamResponse()
            await response.prepare(request)
            for byte in image:
                await response.write(bytes([byte]))
                await asyncio.sleep(0.05)
            return response
        if name == "endless":
            response = web.StreamResponse()
            response.enable_chunked_encoding()
            await response.prepare(request)
            while True:
                await response.write(image)
        if name == "boasts":
            return web.Response(body=image + bytes(200_000))
        if name == "zipped":
            return web.Response(body=image, headers={"Content-Encoding": "gzip"})
        if name == "noai":
            return web.Response(body=image, headers={"X-Robots-Tag": "noai, nofollow"})
        if name == "reserved":
            return web.Response(body=image, headers={"TDM-Reservation": "1"})
        if name == "flapping" and self.seen[name] < 3:
            raise web.HTTPServiceUnavailable
        if name == "broken":
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "0"})
        if name == "cut":
            request.transport.abort()
        if name.startswith("img"):
            return web.Response(body=image)
        if name.startswith("work"):
            await asyncio.sleep(0.1)
            return web.Response(body=image)
        if name == "flapping":
            return web.Response(body=image)
        raise web.HTTPNotFound
