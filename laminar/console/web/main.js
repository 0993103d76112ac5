// The frame of all pages: who is signed in, where one is, the keyboard.

import { html, render, useEffect, useErrorBoundary, useState } from "./preact-htm.js";
import { allows, get, IDLE_MS, isSignedIn, leftMs, onSignOut, Problem, signIn, signOut, touch } from "./api.js";
import { Dialog, Input, Trouble, go, href, useAction } from "./parts.js";
import { Overview } from "./overview.js";
import { Pick, Topics } from "./topics.js";
import { TopicPage } from "./topic.js";
import { AllConsumers, ConsumerPage } from "./consumers.js";
import { AllChannels, ChannelPage } from "./channels.js";
import { RecordPage } from "./records.js";
import { Cluster } from "./cluster.js";
import { Access } from "./access.js";

// By first part of the address: its title, the key after `g`.
const PLACES = [
  ["overview", "Overview", "o"],
  ["topics", "Topics", "t"],
  ["records", "Records", "r"],
  ["consumers", "Consumers", "c"],
  ["channels", "Channels", "h"],
  ["routes", "Routes", "u"],
  ["cluster", "Cluster", "n"],
  ["access", "Access", "a"],
];
const SHORTCUTS = "laminar-shortcuts";
const WARN_MS = 60_000;

function where() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decoded);
  return parts.length ? parts : ["overview"];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function page(parts, me) {
  const may = (what, name) => allows(me.grants, what, name);
  const [first, topic, tab, name, more, last] = parts;
  if (first === "topics" && tab === "consumers" && name) return html`<${ConsumerPage} topic=${topic} cursor=${name} may=${may} />`;
  if (first === "topics" && tab === "channels" && name) return html`<${ChannelPage} topic=${topic} channel=${name} tab=${more} may=${may} />`;
  if (first === "topics" && tab === "partitions" && more === "records") return html`<${RecordPage} topic=${topic} partition=${name} offset=${last} />`;
  if (first === "topics" && topic) return html`<${TopicPage} topic=${topic} tab=${tab || "partitions"} partition=${name} may=${may} />`;
  switch (first) {
    case "overview": return html`<${Overview} may=${may} />`;
    case "topics": return html`<${Topics} may=${may} />`;
    case "records": return html`<${Pick} title="Records" tab="records" may=${may} />`;
    case "routes": return html`<${Pick} title="Routes" tab="routes" may=${may} />`;
    case "consumers": return html`<${AllConsumers} may=${may} />`;
    case "channels": return html`<${AllChannels} may=${may} />`;
    case "cluster": return html`<${Cluster} may=${may} />`;
    case "access": return html`<${Access} me=${me} may=${may} tab=${topic || "tokens"} />`;
    default: return html`<div><h1>There is no such page</h1><p><a href=${href("overview")}>Overview</a></p></div>`;
  }
}

function SignIn({ reason, onDone }) {
  const [text, setText] = useState("");
  const [run, busy, problem] = useAction(async () => {
    signIn(text);
    await onDone();
  });
  const submit = (event) => {
    event.preventDefault();
    run();
  };
  useEffect(() => document.querySelector(".sign-in input")?.focus(), []);
  return html`<main class="sign-in">
    <h1>Laminar</h1>
    <form onSubmit=${submit}>
      ${reason && !problem && html`<div class="trouble" role="alert">${reason}</div>`}
      <${Input} label="Token" type="password" value=${text} onChange=${setText} placeholder="lam_…"
        hint="Kept in this tab until it is closed, for half an hour without use at most." />
      <${Trouble} problem=${problem} />
      <div class="buttons"><button type="submit" class="primary" disabled=${busy || !text.trim()}>Sign in</button></div>
    </form>
    <p class="quiet">The first token is in the file admin-token in the data folder of a node.</p>
  </main>`;
}

function Help({ onClose, shortcuts, setShortcuts }) {
  return html`<${Dialog} title="Keyboard" onClose=${onClose}>
    <table class="keys"><caption class="hidden">Keys</caption><tbody>
      <tr><th scope="row"><kbd>/</kbd></th><td>Go to the filter of the page</td></tr>
      ${PLACES.map(([, title, key]) => html`<tr><th scope="row"><kbd>g</kbd> <kbd>${key}</kbd></th><td>${title}</td></tr>`)}
      <tr><th scope="row"><kbd>?</kbd></th><td>This help</td></tr>
      <tr><th scope="row"><kbd>Esc</kbd></th><td>Close a dialog</td></tr>
    </tbody></table>
    <label class="check"><input type="checkbox" checked=${shortcuts} onChange=${(event) => setShortcuts(event.target.checked)} /> Shortcuts of one key are on</label>
    <div class="buttons"><button type="button" class="primary" onClick=${onClose}>Close</button></div>
  <//>`;
}

function useKeys(isOn, help) {
  useEffect(() => {
    let went = 0;
    const press = (event) => {
      if (!isOn || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
      if (went && event.timeStamp - went < 1500) {
        went = 0;
        const place = PLACES.find(([, , key]) => key === event.key);
        if (place) {
          event.preventDefault();
          go(place[0]);
        }
        return;
      }
      went = event.key === "g" ? event.timeStamp : 0;
      if (event.key === "?") help();
      if (event.key === "/") {
        const filter = document.querySelector("main [data-filter]");
        if (filter) {
          event.preventDefault();
          filter.focus();
        }
      }
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }, [isOn]);
}

/** Forget the token after half an hour without a person; say so a minute before. */
function useIdle(isActive) {
  const [warned, setWarned] = useState(false);
  useEffect(() => {
    if (!isActive || !isSignedIn()) return undefined;
    const note = () => {
      if (leftMs() < IDLE_MS - 1000) touch();
      setWarned(false);
    };
    const timer = setInterval(() => {
      const left = leftMs();
      if (left <= 0) signOut("You were signed out after half an hour without use.");
      else setWarned(left < WARN_MS);
    }, 1000);
    document.addEventListener("pointerdown", note);
    document.addEventListener("keydown", note);
    return () => {
      clearInterval(timer);
      document.removeEventListener("pointerdown", note);
      document.removeEventListener("keydown", note);
    };
  }, [isActive]);
  return warned;
}

function Shown({ parts, me }) {
  const [error, reset] = useErrorBoundary();
  if (error) {
    return html`<div><h1>This page failed</h1><${Trouble} problem=${error} /><button type="button" onClick=${reset}>Try again</button></div>`;
  }
  return page(parts, me);
}

function App() {
  const [parts, setParts] = useState(where());
  const [me, setMe] = useState(null);
  const [reason, setReason] = useState(null);
  const [problem, setProblem] = useState(null);
  const [helping, setHelping] = useState(false);
  const [shortcuts, setShortcuts] = useState(localStorage.getItem(SHORTCUTS) !== "off");
  const load = async () => {
    try {
      setMe(await get("/v1/whoami"));
      setReason(null);
      setProblem(null);
    } catch (found) {
      if (found instanceof Problem && found.status === 401) setReason((known) => known || "");
      else setProblem(found);
      throw found;
    }
  };
  useEffect(() => {
    const moved = () => setParts(where());
    addEventListener("hashchange", moved);
    moved(); // the address may have changed since the first rendering
    onSignOut((why) => {
      setMe(null);
      setReason(why);
    });
    load().catch(() => {});
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    if (me || reason !== null || !problem) return undefined;
    const timer = setTimeout(() => load().catch(() => {}), 5000);
    return () => clearTimeout(timer);
  }, [me, reason, problem]);
  useKeys(shortcuts && me !== null, () => setHelping(true));
  const warned = useIdle(me !== null);
  const turn = (on) => {
    localStorage.setItem(SHORTCUTS, on ? "on" : "off");
    setShortcuts(on);
  };
  if (me === null && reason !== null) return html`<${SignIn} reason=${reason} onDone=${load} />`;
  if (me === null) return html`<main class="sign-in"><h1>Laminar</h1><${Trouble} problem=${problem} />${!problem && html`<p role="status">Loading …</p>`}</main>`;
  const current = parts[0];
  const skip = (event) => {
    event.preventDefault();
    document.querySelector("main h1")?.focus();
  };
  return html`
    <a class="skip" href="#/${parts.map(encodeURIComponent).join("/")}" onClick=${skip}>Go to the page</a>
    <nav class="side" aria-label="Console">
      <a class="name" href=${href("overview")}><img src="icon.svg" alt="" width="22" height="22" /> Laminar</a>
      <ul>${PLACES.map(([place, title]) => html`<li><a href=${href(place)} aria-current=${place === current ? "page" : undefined}>${title}</a></li>`)}</ul>
      <div class="who"><span title="Who you are to the cluster">${me.principal}</span>
        ${isSignedIn() && html`<button type="button" onClick=${() => signOut("You have signed out.")}>Sign out</button>`}
        <button type="button" onClick=${() => setHelping(true)}>Keyboard</button>
        <a href="../docs">API</a></div>
    </nav>
    <main>
      ${warned && html`<div class="trouble" role="alert">You will be signed out in a minute. Press a key or click to stay.</div>`}
      <${Shown} key=${parts.join("/")} parts=${parts} me=${me} />
    </main>
    ${helping && html`<${Help} onClose=${() => setHelping(false)} shortcuts=${shortcuts} setShortcuts=${turn} />`}
  `;
}

render(html`<${App} />`, document.getElementById("app"));
