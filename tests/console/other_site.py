"""A page of another site in Chromium, which tries to append to a node in every way that a page has.

`python other_site.py CHROMIUM PAGE REBOUND NODE TARGET`, by the Playwright of `build/browser`. PAGE is the
address of the page of another site. REBOUND is that of a page whose host, once it is loaded, leads to the
node: all that it asks of its own origin comes there. NODE is the node's address, TARGET the path to append
to. A line of JSON for each page: its name, and how each of its attempts ended; it goes on after a line.
"""

from __future__ import annotations

import json
import sys

# In build/browser.
from playwright.sync_api import sync_playwright

ATTEMPTS = """
async ([node, target]) => {
  const url = node + target, ended = {}
  const tried = async (name, ask) => {
    try { const got = await ask(); ended[name] = got === undefined ? 'sent' : got }
    catch (error) { ended[name] = 'failed' }
  }
  const ask = (options, at = url) => async () => {
    const answer = await fetch(at, { method: 'POST', body: 'evil', ...options })
    return answer.type === 'opaque' ? 'sent' : answer.status
  }
  const typed = type => ({ 'Content-Type': type })
  const bare = new Uint8Array([101, 118, 105, 108])
  for (const mode of ['cors', 'no-cors']) {
    await tried(mode + ' text', ask({ mode }))
    await tried(mode + ' no type', ask({ mode, body: bare }))
    await tried(mode + ' form', ask({ mode, body: new URLSearchParams({ a: 'evil' }) }))
    await tried(mode + ' no referrer', ask({ mode, body: bare, referrerPolicy: 'no-referrer' }))
  }
  await tried('preflight bytes', ask({ headers: typed('application/octet-stream') }))
  await tried('preflight JSON', ask({ headers: typed('application/json'), body: '{"value": "evil"}' }))
  await tried('preflight key', ask({ body: bare, headers: { 'Idempotency-Key': 'k' } }))
  const put = { method: 'PUT', body: '{}', headers: typed('application/json') }
  await tried('PUT', ask(put, node + '/v1/topics/evil'))
  const remove = { method: 'DELETE', body: undefined, headers: { 'If-Match': '*' } }
  await tried('DELETE', ask(remove, node + '/v1/topics/t'))
  await tried('read', ask({ method: 'GET', body: undefined }, node + '/v1/topics'))
  await tried('beacon', async () => { navigator.sendBeacon(url, new Blob([bare])) })
  await tried('socket', () => new Promise((done, fail) => {
    const socket = new WebSocket(url.replace('http', 'ws'))
    socket.onopen = () => done('open')
    socket.onerror = fail
  }))
  for (const type of ['text/plain', 'multipart/form-data', 'application/x-www-form-urlencoded']) {
    await tried('form ' + type, () => new Promise(done => {
      const frame = document.createElement('iframe'), form = document.createElement('form')
      frame.name = 'frame ' + type
      const field = document.createElement('input')
      Object.assign(field, { name: 'a', value: 'evil' })
      Object.assign(form, { method: 'POST', action: url, enctype: type, target: frame.name })
      form.append(field)
      document.body.append(frame, form)
      frame.onload = () => { if (form.sent) done() }
      form.sent = true
      form.submit()
    }))
  }
  return ended
}
"""


def main() -> None:
    """Tell how each attempt ended."""
    chromium, page_url, rebound_url, node, target = sys.argv[1:]
    rules = "MAP evil.example 127.0.0.1, MAP rebound.example 127.0.0.1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", f"--host-resolver-rules={rules}"],
        )
        for name, url, asked in (
            ("other site", page_url, node),
            ("rebound", rebound_url, rebound_url.rstrip("/")),
            ("own", f"{node}/console/", node),
        ):
            page = browser.new_page()
            page.goto(url)
            print(json.dumps({"page": name, "ended": page.evaluate(ATTEMPTS, [asked, target])}), flush=True)
            page.close()
            sys.stdin.readline()
        browser.close()


if __name__ == "__main__":
    main()
