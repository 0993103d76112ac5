// Channels: what waits, what is out, what failed; and what an operator does about it.

import { html, useState } from "./preact-htm.js";
import { get, getTagged, send } from "./api.js";
import { duration, number, time } from "./format.js";
import { Choice, Confirm, Dialog, Empty, Figures, Head, Input, Loaded, Status, Table, Tabs, Trouble, go, href, useAction, usePoll } from "./parts.js";
import { OfTopics } from "./topics.js";

const NONE = "There is no channel yet. A channel gives each record to one of its consumers, until it is done:";

function state(row) {
  if (row.settings?.paused) return html`<${Status} kind="idle">paused<//>`;
  if (row.unanswered?.length) return html`<${Status} kind="bad">no answer of partitions ${row.unanswered.join(", ")}<//>`;
  if (row.opening?.length) return html`<${Status} kind="idle">opening<//>`;
  return row.blocked ? html`<${Status} kind="bad">blocked<//>` : html`<${Status} kind="good">open<//>`;
}

const dead = (row) => (row.dead ? html`<${Status} kind="bad">${number(row.dead)}<//>` : "0");
const COUNTS = [
  { title: "Waiting", is: "number", by: (row) => row.depth, cell: (row) => number(row.depth) },
  { title: "Out", is: "number", by: (row) => row.out, cell: (row) => number(row.out) },
  { title: "To try again", is: "number", by: (row) => row.aside, cell: (row) => number(row.aside) },
  { title: "Dead", is: "number", by: (row) => row.dead, cell: dead },
  { title: "Oldest", is: "number", by: (row) => row.oldest_age_ms || 0, cell: (row) => duration(row.oldest_age_ms) },
];
const COLUMNS = [
  { title: "Channel", by: (row) => row.channel, cell: (row) => html`<a href=${href("topics", row.topic, "channels", row.channel)}>${row.channel}</a>` },
  { title: "State", cell: state },
  ...COUNTS,
];
const channelsOf = async (topic, signal) => (await get("/v1/topics/{topic}/channels", { topic }, { limit: 1000 }, { signal })).channels;

export function AllChannels() {
  return html`<${OfTopics} title="Channels" having="channels" load=${channelsOf} none=${NONE} command="laminar channel create TOPIC NAME"
    columns=${[COLUMNS[0], { title: "Topic", cell: (row) => html`<a href=${href("topics", row.topic)}>${row.topic}</a>` }, ...COLUMNS.slice(1)]} />`;
}

export function ChannelsTab({ topic, may }) {
  const found = usePoll((signal) => channelsOf(topic, signal), [topic]);
  const [creating, setCreating] = useState(false);
  return html`<div>${may("admin", topic) && !topic.startsWith("_") && html`<div class="bar"><button type="button" class="primary" onClick=${() => setCreating(true)}>New channel</button></div>`}
    <${Loaded} state=${found}>${(channels) => (channels.length === 0
      ? html`<${Empty} command=${`laminar channel create ${topic} NAME`}>${NONE}<//>`
      : html`<${Table} caption="Channels" rows=${channels} keyOf=${(row) => row.channel} columns=${COLUMNS} />`)}<//>
    ${creating && html`<${NewChannel} topic=${topic} onClose=${() => setCreating(false)} />`}</div>`;
}

function NewChannel({ topic, onClose }) {
  const [name, setName] = useState("");
  const [order, setOrder] = useState("none");
  const [start, setStart] = useState("earliest");
  const [run, busy, problem] = useAction(async () => {
    await send("PUT", "/v1/topics/{topic}/channels/{channel}", { topic, channel: name }, { json: { settings: { order, start } } });
    go("topics", topic, "channels", name);
  });
  const submit = (event) => {
    event.preventDefault();
    run();
  };
  return html`<${Dialog} title="New channel" onClose=${onClose}><form onSubmit=${submit}>
    <${Input} label="Name" value=${name} onChange=${setName} required />
    <${Choice} label="Order" value=${order} onChange=${setOrder} options=${[["none", "none: each record for itself"], ["key", "of each key, one at a time"]]} />
    <${Choice} label="Begins at" value=${start} onChange=${setStart} options=${[["earliest", "the earliest record"], ["latest", "what comes from now on"]]} />
    <${Trouble} problem=${problem} />
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${busy || !name}>Create</button></div>
  </form><//>`;
}

export function ChannelPage({ topic, channel, tab = "partitions", may }) {
  const found = usePoll(() => getTagged("/v1/topics/{topic}/channels/{channel}", { topic, channel }), [topic, channel]);
  const [asked, setAsked] = useState(null);
  const close = () => {
    setAsked(null);
    found.reload();
  };
  const paused = found.data?.document.settings.paused === true;
  const canRead = may("read", topic);
  const canChange = may("admin", topic);
  const base = ["topics", topic, "channels", channel];
  const tabs = [["partitions", "Partitions"], ...(canRead ? [["aside", "To try again"], ["dead", "Dead"]] : []), ["settings", "Settings"]];
  return html`<div><${Head} title=${channel} crumbs=${[["Topics", href("topics")], [topic, href("topics", topic)], ["Channels", href("topics", topic, "channels")]]}>
      ${canChange && found.data && html`<button type="button" onClick=${() => setAsked("pause")}>${paused ? "Resume" : "Pause"}</button>`}
      ${canRead && html`<button type="button" onClick=${() => setAsked("seek")}>Seek</button>`}
      ${canChange && found.data && html`<button type="button" class="danger" onClick=${() => setAsked("delete")}>Delete</button>`}
    <//>
    <${Loaded} state=${found}>${({ document: it, etag }) => html`
      <${Figures} figures=${[["State", state(it)], ["Waiting", number(it.depth)], ["Out", number(it.out)], ["To try again", number(it.aside)], ["Dead", dead(it)], ["Oldest", duration(it.oldest_age_ms)]]} />
      <${Tabs} label="Of this channel" current=${tab} tabs=${tabs.map(([name, title]) => [name, href(...base, name), title])} />
      ${tab === "partitions" && html`<${Table} caption="Partitions" rows=${Object.entries(it.partitions || {}).map(([partition, row]) => ({ partition: Number(partition), ...row }))} keyOf=${(row) => row.partition} columns=${[
        { title: "Partition", is: "number", by: (row) => row.partition, cell: (row) => row.partition },
        { title: "State", cell: state },
        { title: "Next offset", is: "number", cell: (row) => number(row.next) },
        { title: "End offset", is: "number", cell: (row) => number(row.end) },
        ...COUNTS,
        { title: "Lost to retention", is: "number", cell: (row) => number(row.lost) },
      ]} />`}
      ${tab === "settings" && html`<${Table} caption="Settings" rows=${Object.entries(it.settings)} keyOf=${([name]) => name} columns=${[
        { title: "Setting", cell: ([name]) => html`<code>${name}</code>` },
        { title: "Value", cell: ([, value]) => html`<code>${JSON.stringify(value)}</code>` },
      ]} /><p class="quiet">What is not here has its default. To change one: <code>laminar channel set ${topic} ${channel}</code></p>`}
      ${asked === "pause" && html`<${Confirm} title=${paused ? `Resume ${channel}` : `Pause ${channel}`} verb=${paused ? "Resume" : "Pause"} onClose=${close}
        act=${() => send("PATCH", "/v1/topics/{topic}/channels/{channel}", { topic, channel }, { json: { settings: { paused: !paused } }, ifMatch: etag })}>
        <p>${paused ? "Records are given out again." : "Nothing is given out until it is resumed; what is out can be acknowledged."}</p><//>`}
      ${asked === "seek" && html`<${Seek} topic=${topic} it=${it} onClose=${close} />`}
      ${asked === "delete" && html`<${Confirm} title=${`Delete ${channel}`} name=${channel} verb="Delete channel" onClose=${close} onDone=${() => go("topics", topic, "channels")}
        act=${() => send("DELETE", "/v1/topics/{topic}/channels/{channel}", { topic, channel }, { ifMatch: etag })}>
        <p>It forgets which records are done. <b>${number(it.depth + it.out + it.aside)} that are not done yet, and ${number(it.dead)} dead ones</b>, go to no one. The records themselves stay in the topic.</p><//>`}
    `}<//>
    ${tab === "aside" && canRead && html`<${Aside} topic=${topic} channel=${channel} />`}
    ${tab === "dead" && canRead && html`<${Dead} topic=${topic} channel=${channel} onDone=${found.reload} />`}</div>`;
}

function Seek({ topic, it, onClose }) {
  const [to, setTo] = useState("earliest");
  const [at, setAt] = useState("");
  const [drop, setDrop] = useState(false);
  const act = () => send("PUT", "/v1/topics/{topic}/channels/{channel}/position", { topic, channel: it.channel }, { json: { at: to === "time" ? at.trim() : to, drop } });
  return html`<${Confirm} title=${`Seek ${it.channel}`} name=${it.channel} verb="Move the channel" act=${act} onClose=${onClose}>
    <${Choice} label="To" value=${to} onChange=${setTo} options=${[["earliest", "the earliest record: all again"], ["latest", "the end: skip all that waits"], ["time", "a time"]]} />
    ${to === "time" && html`<${Input} label="Time" value=${at} onChange=${setAt} placeholder="2026-01-31T12:00:00Z" required />`}
    <label class="check"><input type="checkbox" checked=${drop} onChange=${(event) => setDrop(event.target.checked)} /> Also end what is out or waits to be tried again</label>
    <p>${to === "latest" ? html`<b>${number(it.depth)} records that wait are skipped.</b>` : "What comes after the new place is given out again, also what was done."}
      ${drop && html` <b>${number(it.out + it.aside)} that are out or failed are dropped.</b>`}</p>
  <//>`;
}

function useJobs(load, key, tag, reason, dependencies) {
  const [pages, setPages] = useState([undefined]);
  const after = pages[pages.length - 1];
  const found = usePoll((signal) => load({ limit: 100, after, key, tag, reason }, signal), [after, key, tag, reason, ...dependencies]);
  const pager = (page) => (pages.length > 1 || page.next) && html`<div class="bar">
    <button type="button" disabled=${pages.length === 1} onClick=${() => setPages(pages.slice(0, -1))}>Previous</button>
    <button type="button" disabled=${!page.next} onClick=${() => setPages([...pages, page.next])}>Next</button></div>`;
  return [found, pager, () => setPages([undefined])];
}

const JOB_COLUMNS = (topic) => [
  { title: "Record", cell: (row) => html`<a href=${href("topics", topic, "partitions", row.partition, "records", row.offset)}>${row.partition}/${row.offset}</a>` },
  { title: "Key", cell: (row) => html`<code>${row.unreadable ? "cannot be read" : row.key ?? (row.key_base64 ? `base64:${row.key_base64}` : "")}</code>` },
  { title: "Tag", cell: (row) => row.tag },
  { title: "Attempts", is: "number", cell: (row) => number(row.attempts) },
];

function Filters({ filters, setFilters, reset }) {
  const set = (field) => (value) => {
    reset();
    setFilters({ ...filters, [field]: value });
  };
  return html`<div class="bar">
    <${Input} label="Reason contains" type="search" value=${filters.reason} onChange=${set("reason")} data-filter />
    <${Input} label="Key is" value=${filters.key} onChange=${set("key")} />
    <${Input} label="Tag is" value=${filters.tag} onChange=${set("tag")} /></div>`;
}

function Aside({ topic, channel }) {
  const [filters, setFilters] = useState({ key: "", tag: "", reason: "" });
  const load = (query, signal) => get("/v1/topics/{topic}/channels/{channel}/aside", { topic, channel }, query, { signal });
  const [found, pager, reset] = useJobs(load, filters.key, filters.tag, filters.reason, []);
  return html`<div><${Filters} filters=${filters} setFilters=${setFilters} reset=${reset} />
    <${Loaded} state=${found}>${(page) => html`${page.jobs.length === 0
      ? html`<p>${page.next ? "None on this page; there may be more." : "Nothing waits to be tried again."}</p>`
      : html`<${Table} caption="To try again" rows=${page.jobs} keyOf=${(row) => row.token} columns=${[
        ...JOB_COLUMNS(topic),
        { title: "Again at", cell: (row) => (row.waits_for_key ? "after an earlier one of its key" : time(row.at)) },
        { title: "Reason", cell: (row) => row.reason },
      ]} />`}${pager(page)}`}<//></div>`;
}

function Dead({ topic, channel, onDone }) {
  const [filters, setFilters] = useState({ key: "", tag: "", reason: "" });
  const load = (query, signal) => get("/v1/topics/{topic}/channels/{channel}/dead", { topic, channel }, query, { signal });
  const [found, pager, reset] = useJobs(load, filters.key, filters.tag, filters.reason, []);
  const [asked, setAsked] = useState(null);
  const change = (json) => send("POST", "/v1/topics/{topic}/channels/{channel}/dead", { topic, channel }, { json });
  const close = () => {
    setAsked(null);
    found.reload();
    onDone();
  };
  return html`<div><${Filters} filters=${filters} setFilters=${setFilters} reset=${reset} />
    <${Loaded} state=${found}>${(page) => html`${page.jobs.length === 0
      ? html`<p>${page.next ? "None on this page; there may be more." : "No record is dead."}</p>`
      : html`<div class="bar">
        <button type="button" onClick=${() => setAsked({ replay: page.jobs.map((row) => row.token) })}>Replay these ${number(page.jobs.length)}</button>
        <button type="button" class="danger" onClick=${() => setAsked({ drop: page.jobs.map((row) => row.token) })}>Drop these ${number(page.jobs.length)}</button></div>
      <${Table} caption="Dead records" rows=${page.jobs} keyOf=${(row) => row.token} columns=${[
        ...JOB_COLUMNS(topic),
        { title: "Died", is: "when", cell: (row) => time(row.at) },
        { title: "Reason", cell: (row) => row.reason },
        { title: "Actions", is: "do", cell: (row) => html`<button type="button" aria-label=${`Replay ${row.partition}/${row.offset}`} onClick=${() => setAsked({ replay: [row.token] })}>Replay</button>
          <button type="button" aria-label=${`Drop ${row.partition}/${row.offset}`} onClick=${() => setAsked({ drop: [row.token] })}>Drop</button>` },
      ]} />`}${pager(page)}`}<//>
    ${asked?.replay && html`<${Confirm} title="Replay" verb="Replay" act=${() => change(asked)} onClose=${close}><p>${number(asked.replay.length)} dead records are given out again, as if they had never been tried.</p><//>`}
    ${asked?.drop && html`<${Confirm} title="Drop" name=${channel} verb="Drop" act=${() => change(asked)} onClose=${close}><p><b>${number(asked.drop.length)} dead records</b> of this channel count as done, and no consumer gets them. The records stay in the topic.</p><//>`}</div>`;
}
