"""Scenes of the console in a real browser, run by the interpreter of `build/browser`, which has Playwright.

Apart from the tests, as Playwright has an environment of its own. It prints a line of JSON for each scene,
with what was wrong in it. A line `?WHAT` asks the test to do something to the node; it waits for a line then.
With a number of topics and the pids of the node's processes as last arguments it runs the one scene of very
many topics, and prints what each page took.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

# A page shows 100 topics of any number. 10,000 take minutes to make: they have a scene of their own.
MANY = 120
# How long a page or the node may take; only a hang reaches it.
PATIENCE_S = 60
PLACES = ("overview", "topics", "records", "consumers", "channels", "routes", "cluster", "access")
OF_TOPIC = ("partitions", "records", "produce", "consumers", "channels", "routes", "settings")


class Browser:
    """A page of the console, and all that was wrong with it since the last scene began."""

    def __init__(self, page: Page, url: str, token: str, axe: str) -> None:
        self.page, self.url, self.token, self.axe = page, url, token, axe
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", self._said)
        page.on("request", self._asked)
        page.set_default_timeout(PATIENCE_S * 1000)
        expect.set_options(timeout=PATIENCE_S * 1000)

    def _said(self, message: Any) -> None:
        if "Content Security Policy" in message.text or "Trusted" in message.text:
            self.wrong.append(f"policy: {message.text}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((f"{self.url}/", "blob:")):
            self.wrong.append(f"asked another host: {request.url}")

    def api(self, method: str, path: str, document: object = None, kind: str = "application/json") -> Any:
        """Ask the node, as another program would: again while the answer is 503."""
        body = None if document is None else json.dumps(document).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        request = urllib.request.Request(f"{self.url}{path}", body, headers, method=method)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    text = answer.read()
            except urllib.error.HTTPError as refused:
                if refused.code != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(float(refused.headers.get("Retry-After", 1)))
            else:
                return json.loads(text) if text else None

    def go(self, place: str) -> None:
        """Go to a page, and wait until nothing loads any more."""
        self.page.goto(f"{self.url}/console/#/{place}")
        expect(self.page.locator("main h1")).to_be_visible()
        expect(self.page.get_by_text("Loading …")).to_have_count(0)

    def sign_in(self, token: str) -> None:
        self.page.get_by_label("Token", exact=False).first.fill(token)
        self.page.get_by_role("button", name="Sign in").click()

    def check(self, what: str) -> None:
        """Note serious faults of accessibility, an error on the page, and a page that scrolls sideways."""
        # A colour is judged when its transition has ended.
        self.page.evaluate("Promise.allSettled(document.getAnimations().map((each) => each.finished))")
        if not self.page.evaluate("'axe' in window"):  # else it is parsed anew, as long as a check takes
            self.page.evaluate(self.axe)
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        for rule in found["violations"]:
            if rule["impact"] in ("serious", "critical"):
                self.wrong.append(f"{what}: {rule['id']} at {rule['nodes'][0]['target']}")
        trouble = self.page.locator(".trouble")
        try:
            expect(trouble).to_have_count(0)  # the page asks again where a node was busy
        except AssertionError:
            self.wrong += [f"{what}: {text}" for text in trouble.all_inner_texts()]
        if self.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            self.wrong.append(f"{what}: wider than the window")


def fill(browser: Browser, topic: str, partitions: int) -> None:
    """Make a topic with records, consumers and a channel with dead records."""
    browser.api("PUT", f"/v1/topics/{topic}", {"partitions": partitions, "replicas": 1})
    orders = [
        {"order": 1000 + k, "items": [{"sku": "A-17", "count": k % 4 + 1}], "total": k * 3.5}
        for k in range(120)
    ]
    records = [
        {"key": f"customer-{k % 17}", "value": json.dumps(each), "tag": "paid", "headers": {"source": "shop"}}
        for k, each in enumerate(orders)
    ]
    records.append({"key": "<b>key</b>", "value": "<img src=x onerror=alert(1)><script>alert(1)</script>"})
    browser.api(
        "POST", f"/v1/topics/{topic}/records", {"records": records}, "application/vnd.laminar.records+json"
    )
    browser.api("PUT", f"/v1/topics/{topic}/cursors/billing", {"begin": "earliest"})
    browser.api("PUT", f"/v1/topics/{topic}/cursors/search-index", {"begin": "latest"})
    # What is out stays out for all scenes, however slow they are: otherwise it would die, too.
    settings = {"max_attempts": 1, "timeout_ms": 600_000}
    browser.api("PUT", f"/v1/topics/{topic}/channels/mail", {"settings": settings})
    channel = f"/v1/topics/{topic}/channels/mail"
    jobs: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(jobs) < 6:  # an answer may have fewer, as those of one partition that was ready first
        assert time.monotonic() < deadline, f"{len(jobs)} jobs"
        jobs += browser.api("POST", f"{channel}/receive", {"max": 12, "wait_ms": 2000})["jobs"]
    nack = [{"token": job["token"], "reason": "the mail server said 550"} for job in jobs[:6]]
    browser.api("POST", f"{channel}/acks", {"nack": nack})
    # Which topics have cursors is known 10 s later at most.
    while not browser.api("GET", f"/v1/topics?having=cursors&prefix={topic}")["topics"]:
        assert time.monotonic() < deadline, "no topic has cursors"
        time.sleep(0.2)


# -- scenes, in their order ----------------------------------------------------------------------------------


def empty(browser: Browser, shots: Path) -> None:
    """A wrong token is refused in the server's words; each page of an empty cluster shows a first command."""
    page = browser.page
    page.goto(f"{browser.url}/console/")
    browser.check("sign-in")
    browser.sign_in("lam_0123456789abcdef_wrong")
    expect(page.locator(".trouble")).to_be_visible()
    browser.sign_in(browser.token)
    expect(page.locator("nav.side")).to_be_visible()
    for place in PLACES:
        browser.go(place)
        browser.check(place)
        if place not in ("cluster", "access"):
            assert page.locator(".command code").count() >= 1, f"{place} shows no command"


def one(browser: Browser, shots: Path) -> None:
    """A topic is made, each page of it is shown, a record is appended and found."""
    page = browser.page
    browser.go("topics")
    page.get_by_role("button", name="New topic").click()
    page.get_by_label("Name", exact=True).fill("first")
    page.get_by_role("spinbutton", name="Replicas").fill("1")
    browser.check("new topic")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.locator("main h1")).to_have_text("first")
    for tab in OF_TOPIC:
        browser.go(f"topics/first/{tab}")
        browser.check(tab)
    browser.go("topics/first/produce")
    page.get_by_label("Value", exact=True).fill("hello")
    page.get_by_role("button", name="Append").click()
    page.get_by_role("link", name="partition 0, offset 0").click()
    expect(page.locator("pre")).to_have_text("hello")
    browser.check("record")
    page.get_by_role("button", name="Bytes").click()
    expect(page.locator("pre")).to_contain_text("68 65 6c 6c 6f")


def clicks(browser: Browser, shots: Path) -> None:
    """Lag, a partition's leader and a record's value are three clicks away; a record is never markup."""
    page = browser.page
    fill(browser, "orders", 4)
    node = browser.api("GET", "/v1/nodes")["nodes"][0]["node"]
    side = page.locator("nav.side")
    browser.go("overview")
    side.get_by_role("link", name="Consumers").click()
    expect(page.get_by_role("row").filter(has_text="billing").first).to_contain_text("121")
    side.get_by_role("link", name="Topics").click()
    page.get_by_role("link", name="orders", exact=True).click()
    expect(page.get_by_role("row").nth(1).locator("td").first).to_have_text(node)
    page.screenshot(path=shots / "console-partitions.png")
    page.get_by_role("link", name="Records").last.click()
    expect(page.locator("tbody tr").first).to_contain_text("order")
    for _ in range(100):
        more = page.get_by_role("button", name="Go on")
        expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)
        if more.count() == 0:
            break
        more.click()
    expect(page.get_by_text("that is all")).to_be_visible()
    page.get_by_text("<img src=x").first.wait_for()
    assert page.locator("main img").count() == 0, "a record became markup"
    page.locator("tbody th button").nth(1).click()
    page.get_by_role("button", name="JSON", exact=True).click()
    page.get_by_role("button", name="History").click()
    page.get_by_role("region", name="History").or_(page.get_by_text("Nothing has happened to it")).wait_for()
    page.get_by_role("button", name="History").click()
    browser.check("records")
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=shots / "console-records.png")


def tail(browser: Browser, shots: Path) -> None:
    """What is appended is shown as it comes, but for a stop; what came meanwhile is not left out."""
    page = browser.page
    first = page.locator("tbody tr").first

    def append(*values: str, **more: str) -> None:
        records = {"records": [{"value": value, **more} for value in values]}
        browser.api("POST", "/v1/topics/tailed/records", records, "application/vnd.laminar.records+json")

    browser.api("PUT", "/v1/topics/tailed", {"partitions": 2, "replicas": 1})
    append("before")
    browser.go("topics/tailed/records")
    expect(first).to_contain_text("before")
    with page.expect_request("**/search") as asked:
        page.get_by_role("button", name="Follow", exact=True).click()
    assert json.loads(asked.value.post_data or "")["follow"] is True
    expect(page.get_by_text("Following: 0 found.")).to_be_visible()
    assert page.locator("tbody tr").count() == 0, "what was there before is shown"
    # The page says so before the node has the request, which follows from then on: by one key, so in order.
    for number in range(100):
        append(f"early {number}.", key="early")
        try:
            expect(page.get_by_text(f"early {number}.")).to_be_visible(timeout=2_000)
            break
        except AssertionError:
            continue
    early = page.locator("tbody tr").count()
    append("fresh <b>one</b>")
    expect(first).to_contain_text("fresh <b>one</b>")
    append("fresh two")
    expect(first).to_contain_text("fresh two")
    expect(page.get_by_text(f"Following: {early + 2} found.")).to_be_visible()
    browser.check("tail")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_text(f"Followed: {early + 2} found.")).to_be_visible()
    append("meanwhile")
    page.get_by_role("button", name="Go on").click()
    expect(first).to_contain_text("meanwhile")
    append(*(f"many {number}" for number in range(1_010)))
    expect(page.get_by_text(f"{early + 1_013:,} found, the newest 1,000 are shown")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(1_000)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.get_by_text("Searched", exact=False).first).to_be_visible()


def export(browser: Browser, shots: Path) -> None:
    """NDJSON and CSV have each record; a cell that a spreadsheet would calculate is text."""
    page = browser.page
    browser.api("PUT", "/v1/topics/sheet", {"replicas": 1})
    records = {"records": [{"key": "=1+1", "value": 'a,"b"'}, {"key": "plain", "value": "@SUM(A1)"}]}
    browser.api("POST", "/v1/topics/sheet/records", records, "application/vnd.laminar.records+json")
    browser.go("topics/sheet/records")
    kept = {}
    for kind in ("NDJSON", "CSV"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Export {kind}").click()
        kept[kind] = Path(download.value.path()).read_bytes().decode()
    lines = [json.loads(line) for line in kept["NDJSON"].splitlines()]
    assert {"=1+1", "plain"} == {line["key"] for line in lines}, kept
    assert ",'=1+1," in kept["CSV"] and ',"a,""b"""' in kept["CSV"] and ",'@SUM(A1)," in kept["CSV"], kept


def older(browser: Browser, shots: Path) -> None:
    """Of a node that has no search, health or sums yet the pages show what it has, and say what they lack."""
    page = browser.page

    def lacks(status: int, code: str, field: str) -> Callable[[Any], None]:
        problem = json.dumps({"status": status, "code": code, "field": field, "detail": "as an older node"})
        return lambda route: route.fulfill(
            status=status, body=problem, content_type="application/problem+json"
        )

    page.route("**/v1/health", lacks(404, "not_found", "path"))
    page.route("**/v1/topics/*/search", lacks(404, "not_found", "path"))
    page.route("**/v1/topics?*stats=true*", lacks(422, "invalid", "stats"))
    page.route("**/v1/topics?*having=*", lacks(422, "invalid", "having"))
    page.reload()
    for place in ("overview", "topics"):
        browser.go(place)
        expect(page.get_by_role("link", name="orders", exact=True)).to_be_visible()
    browser.go("consumers")
    expect(page.get_by_role("link", name="billing")).to_be_visible()
    browser.go("topics/orders/records")
    expect(page.get_by_text("This node has no search")).to_be_visible()
    expect(page.locator("tbody tr").first).to_contain_text("order")
    page.unroute_all()
    page.reload()


def channels(browser: Browser, shots: Path) -> None:
    """Dead records are replayed one by one; a channel is paused; what loses data wants the name typed."""
    page = browser.page
    browser.go("topics/orders/channels/mail/dead")
    expect(page.locator("tbody tr")).to_have_count(6)
    browser.check("dead")
    page.get_by_role("button", name="Replay", exact=False).nth(1).click()
    page.get_by_role("dialog").get_by_role("button", name="Replay", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(5)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.get_by_role("button", name="Drop these").click()
    drop = page.get_by_role("dialog").get_by_role("button", name="Drop", exact=True)
    assert drop.is_disabled(), "nothing was typed"
    browser.check("drop")
    page.get_by_label("Type mail").fill("mail")
    drop.click()
    expect(page.get_by_text("No record is dead.")).to_be_visible()


def trim(browser: Browser, shots: Path) -> None:
    """A trim shows what it deletes; a rewind what is read again; a deleted topic is gone."""
    page = browser.page
    browser.go("topics/sheet")
    page.get_by_role("button", name="Trim partition 0").click()
    page.get_by_label("before offset").fill("2")
    page.get_by_role("button", name="Show what is deleted").click()
    expect(page.get_by_text("2 records")).to_be_visible()
    page.get_by_label("Type sheet").fill("sheet")
    page.get_by_role("button", name="Delete records").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    browser.go("topics/orders/consumers/search-index")
    page.get_by_role("button", name="Rewind").click()
    expect(page.get_by_text("121 records are read again")).to_be_visible()
    page.get_by_label("Type search-index").fill("search-index")
    page.get_by_role("dialog").get_by_role("button", name="Rewind").click()
    expect(page.locator(".figures")).to_contain_text("121")
    browser.go("topics/sheet/settings")
    page.get_by_role("button", name="Delete topic").click()
    page.get_by_label("Type sheet").fill("sheet")
    page.get_by_role("dialog").get_by_role("button", name="Delete topic").click()
    expect(page.locator("main h1")).to_have_text("Topics")
    assert "sheet" not in {topic["topic"] for topic in browser.api("GET", "/v1/topics")["topics"]}


def many(browser: Browser, shots: Path) -> None:
    """Of many topics a page is shown, and the filter finds one; then each page once more."""
    page = browser.page
    for number in range(MANY):
        browser.api("PUT", f"/v1/topics/many-{number:05}", {"replicas": 1})
    browser.go("topics")
    expect(page.locator("tbody tr")).to_have_count(100)
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("Page 2")).to_be_visible()
    page.locator("[data-filter]").fill("many-00042")
    expect(page.locator("tbody tr")).to_have_count(1)
    for place in PLACES:
        browser.go(place)
    browser.check("access")


def keyboard(browser: Browser, shots: Path) -> None:
    """Everything by keys: places, the filter, a topic, its tabs, help, and that shortcuts can be off."""
    page = browser.page
    browser.go("overview")
    for _ in range(30):  # both within 1.5 s, or nothing happens
        page.keyboard.press("g")
        page.keyboard.press("t")
        try:
            expect(page.locator("main h1")).to_have_text("Topics", timeout=2_000)
            break
        except AssertionError:
            continue
    expect(page.locator("main h1")).to_have_text("Topics")
    expect(page.locator("main h1")).to_be_focused()
    page.keyboard.press("/")
    expect(page.locator("[data-filter]")).to_be_focused()
    with page.expect_response(lambda answer: "contains=ord" in answer.url):  # and not for "o", shown before
        page.keyboard.type("ord")
    expect(page.locator("tbody tr")).to_have_count(1)
    for _ in range(6):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "orders":
            break
    expect(page.get_by_role("link", name="orders", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("orders")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    browser.check("help")
    page.get_by_label("Shortcuts of one key are on").press(" ")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.evaluate("localStorage.clear()")


def dark(browser: Browser, shots: Path) -> None:
    """In dark colours, and on a narrow window, each page has contrast and fits."""
    page = browser.page
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    browser.go("topics/orders/consumers/billing")
    browser.check("dark")
    page.screenshot(path=shots / "console-dark.png")
    browser.go("topics/orders/channels/mail")
    browser.check("dark channel")
    page.set_viewport_size({"width": 420, "height": 800})
    for place in ("topics/orders", "topics/orders/records", "cluster"):
        browser.go(place)
        browser.check(f"narrow {place}")
    page.set_viewport_size({"width": 1280, "height": 760})
    page.emulate_media(color_scheme="light")


def stopped(browser: Browser, shots: Path) -> None:
    """A node that stops is said to be silent, what was shown stays; it comes back by itself."""
    page = browser.page
    browser.go("topics/orders")
    ask("stop")
    expect(page.get_by_text("The node does not answer.")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(4)
    ask("start")
    expect(page.get_by_text("The node does not answer.")).to_have_count(0)


def expired(browser: Browser, shots: Path) -> None:
    """A token that ends is forgotten, and so is one that no one uses for half an hour."""
    page = browser.page
    made = browser.api(
        "POST", "/v1/admin/tokens", {"name": "short", "grants": [{"role": "read", "prefix": "ord"}]}
    )
    page.get_by_role("button", name="Sign out").click()
    browser.sign_in(made["token"])
    browser.go("topics/orders")
    browser.check("reader")
    assert page.get_by_role("button", name="Trim").count() == 0, "a reader has no button to trim"
    browser.api("DELETE", f"/v1/admin/tokens/{made['id']}")
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    expect(page.locator(".trouble")).to_contain_text("token")
    assert page.evaluate("sessionStorage.getItem('laminar-token')") is None
    browser.sign_in(browser.token)
    expect(page.locator("nav.side")).to_be_visible()
    page.evaluate("sessionStorage.setItem('laminar-seen', String(Date.now() - 30 * 60_000 + 50_000))")
    expect(page.get_by_text("signed out in a minute")).to_be_visible()
    page.evaluate("sessionStorage.setItem('laminar-seen', '0')")
    expect(page.get_by_text("half an hour without use").first).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('laminar-token')") is None


def very_many(browser: Browser, shots: Path, topics: int, pids: list[int]) -> dict[str, dict[str, float]]:
    """Each page is bounded: in what it fetches, what it shows, and what it costs the node. Return all that.

    Every other topic lacks a replica, and the last has a consumer and a channel.
    """
    page = browser.page
    rows = page.locator("tbody tr")
    last, lacking = f"t{topics - 1:05}", topics // 2
    took = {}
    page.goto(f"{browser.url}/console/")
    browser.sign_in(browser.token)
    expect(page.locator("nav.side")).to_be_visible()
    for place in (*PLACES, "access/limits", "access/audit", *(f"topics/{last}/{tab}" for tab in OF_TOPIC)):
        took[place] = figures = opened_anew(browser, place, pids)
        # Twice what the largest page had when this was written; CPU time differs more, with the neighbours.
        for name, most in (("requests", 10), ("bytes", 200_000), ("elements", 4_200), ("cpu_s", 2.0)):
            if figures[name] > most:
                browser.wrong.append(f"{place}: {name} {figures[name]:,}, expected at most {most:,}")
        browser.check(place)
        page.screenshot(path=shots / f"very-many-{place.replace('/', '-')}.png")
    # A topic is found by its name and by its sums, and all pages of the list can be reached.
    browser.go("topics")
    expect(page.get_by_text(f"{topics + 1:,} topics")).to_be_visible()  # one is the audit
    expect(rows).to_have_count(100)
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text(f"Page 2 of {topics // 100 + 1}")).to_be_visible()
    page.get_by_label("Sort by").select_option("records")
    expect(rows.first).to_contain_text("_audit")
    page.locator("[data-filter]").fill(last)
    expect(rows).to_have_count(1)
    # Consumers and channels are shown wherever they are.
    browser.go("consumers")
    expect(page.get_by_role("link", name="the-only-consumer")).to_be_visible()
    browser.go("channels")
    expect(page.get_by_role("link", name="the-only-channel")).to_be_visible()
    # What all these topics lack is counted, and shown in part.
    browser.go("overview")
    expect(page.get_by_text(f"{2 * lacking:,} problems")).to_be_visible()
    problems = page.get_by_role("region", name="Problems").locator("tbody tr")
    expect(problems).to_have_count(20)
    page.get_by_role("button", name="Show 180 more").click()
    expect(problems).to_have_count(200)
    browser.check("all problems")
    browser.go("cluster")
    under_way = page.get_by_role("region", name="Operations").locator("tbody tr")
    expect(under_way).to_have_count(100)
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text(f"Page 2 of {lacking // 100}: {lacking:,} are under way")).to_be_visible()
    expect(under_way.first).to_contain_text("t00200")
    return took


def opened_anew(browser: Browser, place: str, pids: list[int]) -> dict[str, float]:
    """Open a page as if by its link, and return what that took: time, CPU, what was fetched."""
    page = browser.page
    page.goto("about:blank")
    before, began = cpu_s(pids), time.monotonic()
    page.goto(f"{browser.url}/console/#/{place}")
    expect(page.locator("main h1")).to_be_visible()
    shown_s = time.monotonic() - began
    expect(page.get_by_text("Loading …")).to_have_count(0)
    all_s = time.monotonic() - began
    asked = page.evaluate(
        "performance.getEntriesByType('resource').filter((each) => each.name.includes('/v1/'))"
        ".map((each) => each.encodedBodySize)"
    )
    return {
        "shown_s": round(shown_s, 2),
        "all_s": round(all_s, 2),
        "cpu_s": round(cpu_s(pids) - before, 2),
        "requests": len(asked),
        "bytes": sum(asked),
        "elements": page.evaluate("document.querySelectorAll('*').length"),
    }


def cpu_s(pids: list[int]) -> float:
    """CPU time that these processes have used."""
    ticks = 0
    for pid in pids:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


SCENES: tuple[Callable[[Browser, Path], None], ...] = (
    *(empty, one, clicks, export, older, channels, trim, tail, many, keyboard, dark, stopped, expired),
)


def ask(what: str) -> None:
    """Have the test do something to the node."""
    print(f"?{what}", flush=True)
    assert sys.stdin.readline(), "the test has ended"


@contextmanager
def opened(url: str, token: str, axe: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=sys.argv[3], args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page(viewport={"width": 1280, "height": 760})
        yield Browser(page, url, token, axe.read_text())
        chromium.close()


def main() -> None:
    url, token, _, axe, shots = sys.argv[1:6]
    topics, *pids = map(int, sys.argv[6:] or ["0"])
    with opened(url, token, Path(axe)) as browser:
        if topics:
            play(browser, Path(shots), "very_many", lambda: very_many(browser, Path(shots), topics, pids))
        else:
            for scene in SCENES:
                play(browser, Path(shots), scene.__name__, partial(scene, browser, Path(shots)))


def play(browser: Browser, shots: Path, name: str, scene: Callable[[], object]) -> None:
    """Run a scene, and print what was wrong in it and what it returned."""
    browser.wrong.clear()
    took = None
    try:
        took = scene()
    except Exception as error:  # noqa: BLE001 - whatever it is, the scene failed by it, and the next is tried
        browser.wrong.append(f"{type(error).__name__}: {error}; at {browser.page.url}")
        browser.page.screenshot(path=shots / f"failed-{name}.png")
    print(json.dumps({"scene": name, "wrong": browser.wrong, "took": took}), flush=True)


if __name__ == "__main__":
    main()
