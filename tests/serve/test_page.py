"""The chat page in headless Chromium: used by hand, by keyboard alone, and with hostile texts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import EXECUTABLE, Chromium
from page_stub import PAGE, PageStub
from patience import patient

browser_test = [
    pytest.mark.clients,
    pytest.mark.skipif(not EXECUTABLE, reason="there is no Chromium on this machine"),
]
ANSWER = "document.querySelector('.assistant .text')?.textContent"
DONE = "document.querySelector('.assistant .note') && !document.querySelector('.busy')"


@pytest.fixture
def stub() -> Iterator[PageStub]:
    with PageStub() as made:
        yield made


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture
def page(stub: PageStub, browser: Chromium) -> Iterator[Chromium]:
    """The page, loaded from the stub and ready."""
    browser.call("Page.navigate", url=stub.url)
    browser.wait_for("document.querySelector('#model')?.disabled === false")
    yield browser
    assert not browser.errors
    assert all(url.startswith((stub.url, "data:")) for url in browser.urls), browser.urls


def test_the_page_is_one_file_that_sets_text_as_text() -> None:
    page = PAGE.decode()
    assert len(PAGE) < 64 * 1024
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", page)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", page)
    outside = set(re.findall(r"https?://[^\s'\"<]+", page)) - {"http://www.w3.org/2000/svg"}
    assert not outside and not re.search(r"<script[^>]+src|<link[^>]+href=\"(?!data:)|@import|url\(", page)


def test_every_field_has_a_label() -> None:
    page = PAGE.decode()
    labelled = set(re.findall(r'<label for="(\w+)"', page))
    assert set(re.findall(r'<(?:input|select|textarea)[^>]* id="(\w+)"', page)) == labelled


class TestInBrowser:
    """What needs Chromium."""

    pytestmark = browser_test

    def test_type_send_and_watch(self, stub: PageStub, page: Chromium) -> None:
        stub.pause = 0.08
        page.point("#message", click=True)
        page.write("Tell me")
        page.point("#send", click=True)
        page.wait_for(f"({ANSWER} ?? '').startsWith('The quick')")
        early = page.js(ANSWER)
        assert page.js("document.querySelector('#send').disabled && !document.querySelector('#stop').disabled")
        page.wait_for(DONE)
        assert page.js(ANSWER) == "".join(stub.tokens) != early
        assert re.match(
            r"10 tokens · [\d.]+ tokens/s · first after \d+ ms · stop",
            page.js("document.querySelector('.assistant .note').textContent"),
        )
        assert stub.requests[0]["messages"] == [{"role": "user", "content": "Tell me"}]
        assert (stub.requests[0]["stream"], stub.requests[0]["model"]) == (True, "octavo-tiny")

    def test_stop_ends_the_stream(self, stub: PageStub, page: Chromium) -> None:
        stub.tokens, stub.pause = ["word "] * 500, 0.03
        page.write("Go on")
        page.press("Enter")
        page.wait_for(f"({ANSWER} ?? '').length > 20")
        page.point("#stop", click=True)
        page.wait_for(DONE)
        length = len(page.js(ANSWER))
        assert stub.left.wait(patient(5))
        assert length == len(page.js(ANSWER)) < 2500
        assert page.js("document.querySelector('#status').textContent") == "Stopped"
        assert page.js("document.activeElement.id") == "message"

    def test_the_keyboard_is_enough(self, stub: PageStub, page: Chromium) -> None:
        """Nothing here touches the mouse, nor sets the focus by script."""
        assert page.js("document.activeElement.id") == "message"
        order = []
        for _ in range(12):
            page.press("Tab")
            order.append(page.js("document.activeElement.id"))
        settings = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed", "logprobs", "key"]
        assert order[:9] == ["send", *settings]
        page.press("Tab", shift=True)  # from the top of the page back into it, whatever the browser's own stops are
        for _ in range(20):
            if page.js("document.activeElement.id") == "temperature":
                break
            page.press("Tab")
        page.press("ArrowRight")
        assert page.js("document.querySelector('output[for=temperature]').textContent") == "0.75"
        for _ in range(20):
            if page.js("document.activeElement.id") == "message":
                break
            page.press("Tab", shift=True)
        page.write("one")
        page.press("Enter", shift=True)
        page.write("two")
        stub.tokens, stub.pause = ["w "] * 300, 0.02
        page.press("Enter")
        page.wait_for(f"({ANSWER} ?? '').length > 10")
        page.press("Escape")
        page.wait_for(DONE)
        assert stub.left.wait(patient(5))
        assert stub.requests[0]["messages"][-1]["content"] == "one\ntwo"
        assert stub.requests[0]["temperature"] == 0.75
        page.press("Tab", shift=True)  # the answer: arrow keys go through its tokens
        for _ in range(2):
            page.press("ArrowRight")
        assert "log-probability" in page.wait_for("document.querySelector('#card').innerText")
        page.press("Escape")
        assert page.js("getComputedStyle(document.querySelector('#card')).display") == "none"

    def test_probabilities_on_hover(self, stub: PageStub, page: Chromium) -> None:
        page.write("x")
        page.press("Enter")
        page.wait_for(DONE)
        page.point(".token:nth-child(4)")
        lines = page.wait_for("document.querySelector('#card').innerText").split("\n")
        assert (
            lines[-1].startswith("log-probability -1.66") and '"fox "' in lines and any("%" in line for line in lines)
        )
        colour = "getComputedStyle(document.querySelector('.token:nth-child({})')).backgroundColor"
        assert page.js(colour.format(1)) != page.js(colour.format(8))

    def test_hostile_texts_stay_text(self, stub: PageStub, page: Chromium) -> None:
        hostile = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
        stub.tokens, stub.reasoning = [hostile, "&amp;"], hostile
        page.write(hostile)
        page.press("Enter")
        page.wait_for(DONE)
        page.point(".token")
        assert page.js(ANSWER) == hostile + "&amp;"
        assert page.js("document.querySelector('details div').textContent") == hostile
        assert page.js("document.title") == "Octavo"
        assert page.js("document.querySelectorAll('main img, main script, #card img').length") == 0

    def test_settings_reach_the_server(self, stub: PageStub, page: Chromium) -> None:
        page.js("""for (const [id, value] of Object.entries({system: "Be brief.", top_p: "0.5", top_k: "40",
            max_tokens: "64", seed: "18446744073709551615", model: "other"})) {
            const field = document.getElementById(id); field.value = value;
            field.dispatchEvent(new Event("input", {bubbles: true})); }""")
        page.write("x")
        page.press("Enter")
        page.wait_for(DONE)
        body = stub.requests[0]
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
        wanted = {"top_p": 0.5, "top_k": 40, "max_tokens": 64, "seed": 2**64 - 1, "model": "other"}
        assert {name: body[name] for name in wanted} == wanted

    def test_a_conversation_goes_on_and_begins_anew(self, stub: PageStub, page: Chromium) -> None:
        for number in (1, 2):
            page.write(f"m{number}")
            page.press("Enter")
            page.wait_for(f"document.querySelectorAll('.assistant .note').length === {number}")
        assert [message["role"] for message in stub.requests[1]["messages"]] == ["user", "assistant", "user"]
        page.point("#clear", click=True)
        page.write("m3")
        page.press("Enter")
        page.wait_for(DONE)
        assert len(stub.requests[2]["messages"]) == 1

    def test_an_error_in_the_stream_is_shown(self, stub: PageStub, page: Chromium) -> None:
        stub.error = "the engine was restarted"
        page.write("x")
        page.press("Enter")
        page.wait_for("document.querySelector('.problem')")
        assert page.js("document.querySelector('.problem').textContent") == stub.error
        assert page.js("!document.querySelector('#send').disabled")

    def test_a_key_is_asked_for_and_kept_in_the_page_only(self, stub: PageStub, browser: Chromium) -> None:
        stub.key = "a-key-of-some-length"
        browser.call("Page.navigate", url=stub.url)
        browser.wait_for("document.querySelector('#status')?.textContent.includes('invalid API key')")
        assert browser.js("document.activeElement.id") == "key"
        browser.write(stub.key)
        browser.press("Enter")
        browser.press("Tab")
        browser.wait_for("document.querySelector('#model').disabled === false")
        assert browser.js("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        assert stub.key not in browser.js("location.href + document.documentElement.outerHTML")

    def test_dark_and_light(self, page: Chromium) -> None:
        colours = set()
        for _ in range(2):
            colours.add(page.js("getComputedStyle(document.body).backgroundColor"))
            page.point("#theme", click=True)
        assert len(colours) == 2

    def test_a_screenshot_while_it_streams(self, stub: PageStub, page: Chromium, tmp_path: Path) -> None:
        """For people to look at: PAGE_SCREENSHOT names the file to keep."""
        stub.tokens, stub.pause = stub.tokens * 12, 0.01
        stub.reasoning = "They want a sentence with every letter."
        for text in ("Write a pangram, please.", "And more of them!"):
            page.wait_for("!document.querySelector('.busy')")
            page.write(text)
            page.press("Enter")
        page.wait_for("document.querySelectorAll('.assistant')[1]?.querySelectorAll('.token').length > 60")
        page.js("document.querySelectorAll('.token')[9].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
        path = Path(os.environ.get("PAGE_SCREENSHOT", tmp_path / "page.png"))
        page.screenshot(path)
        assert path.stat().st_size > 10_000

    def test_the_real_server_is_spoken_to(self, server: Any, browser: Chromium) -> None:
        """octavo-tiny answers, its policy lets the page work, and a stop in the middle ends the request."""
        browser.call("Page.navigate", url=f"{server.url}/")
        browser.wait_for("document.querySelector('#model')?.disabled === false")
        browser.js("document.querySelector('#max_tokens').value = 1500")
        browser.write("class HTTPServer:\n    def __init__(self, address):")
        browser.press("Enter")
        browser.wait_for("document.querySelectorAll('.token').length > 3", seconds=60)
        browser.press("Escape")
        browser.wait_for(DONE)
        assert "tokens" in browser.js("document.querySelector('.assistant .note').textContent")
        assert browser.js("document.querySelector('.problem') === null")
        assert not browser.errors
        assert {url.removeprefix(server.url) for url in browser.urls} == {"/", "/v1/models", "/v1/chat/completions"}

    def test_nothing_moves_out_of_sight_on_a_phone(self, stub: PageStub, page: Chromium) -> None:
        size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        stub.tokens = ["long" * 60]
        page.write("x")
        page.press("Enter")
        page.wait_for(DONE)
        assert page.js("document.documentElement.scrollWidth") <= 390
        assert page.js("document.querySelector('#send').getBoundingClientRect().right") <= 390
        assert page.js("document.querySelector('#message').getBoundingClientRect().bottom") <= 844
