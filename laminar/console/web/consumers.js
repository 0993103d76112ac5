// Consumers: cursors with their lag, the members of their groups, and going back.

import { html, useState } from "./preact-htm.js";
import { get, send } from "./api.js";
import { duration, number, time } from "./format.js";
import { Choice, Confirm, Empty, Figures, Head, Input, Loaded, Status, Table, go, href, usePoll } from "./parts.js";
import { OfTopics } from "./topics.js";

const NONE = "No consumer keeps its position here yet. The first record that a reader with a name acknowledges makes a cursor:";

export const lag = (cursor) => (cursor.overtaken
  ? html`<${Status} kind="bad">${number(cursor.total_lag)}, and retention took records that it had not read<//>`
  : cursor.total_lag === 0 ? html`<${Status} kind="good">0<//>` : html`<${Status} kind="warning">${number(cursor.total_lag)}<//>`);

const COLUMNS = [
  { title: "Consumer", by: (row) => row.cursor, cell: (row) => html`<a href=${href("topics", row.topic, "consumers", row.cursor)}>${row.cursor}</a>` },
  { title: "Lag in records", is: "number", by: (row) => row.total_lag, cell: lag },
  { title: "Partitions behind", is: "number", cell: (row) => number(Object.values(row.lag).filter((each) => each > 0).length) },
  { title: "Owners", is: "number", cell: (row) => number(new Set(Object.values(row.owners)).size) },
  { title: "Changed", is: "when", cell: (row) => time(row.changed) },
];
const cursorsOf = async (topic, signal) => (await get("/v1/topics/{topic}/cursors", { topic }, { limit: 1000 }, { signal })).cursors;

export function AllConsumers() {
  return html`<${OfTopics} title="Consumers" having="cursors" load=${cursorsOf} none=${NONE} command="laminar consume TOPIC --cursor NAME"
    columns=${[COLUMNS[0], { title: "Topic", cell: (row) => html`<a href=${href("topics", row.topic)}>${row.topic}</a>` }, ...COLUMNS.slice(1)]} />`;
}

export function ConsumersTab({ topic }) {
  const state = usePoll((signal) => cursorsOf(topic, signal), [topic]);
  return html`<${Loaded} state=${state}>${(cursors) => (cursors.length === 0
    ? html`<${Empty} command=${`laminar consume ${topic} --cursor NAME`}>${NONE}<//>`
    : html`<${Table} caption="Consumers" rows=${cursors} keyOf=${(row) => row.cursor} columns=${COLUMNS} />`)}<//>`;
}

export function ConsumerPage({ topic, cursor }) {
  const state = usePoll(async (signal) => {
    const found = await get("/v1/topics/{topic}/cursors/{cursor}", { topic, cursor }, {}, { signal });
    let group = null;
    try {
      group = cursor.length <= 90 ? await get("/v1/topics/{topic}/groups/{group}", { topic, group: cursor }, {}, { signal }) : null;
    } catch (problem) {
      if (problem.status === 0) throw problem;
    }
    return { found, members: group?.members || [] };
  }, [topic, cursor]);
  const [asked, setAsked] = useState(null);
  const close = () => {
    setAsked(null);
    state.reload();
  };
  return html`<div><${Head} title=${cursor} crumbs=${[["Topics", href("topics")], [topic, href("topics", topic)], ["Consumers", href("topics", topic, "consumers")]]}>
      <button type="button" onClick=${() => setAsked("rewind")}>Rewind</button>
      <button type="button" class="danger" onClick=${() => setAsked("delete")}>Delete</button>
    <//>
    <${Loaded} state=${state}>${({ found, members }) => html`
      <${Figures} figures=${[["Lag in records", lag(found)], ["Partitions", number(Object.keys(found.positions).length)], ["Members of its group", number(members.length)], ["Changed", time(found.changed)]]} />
      <${Table} caption="Positions" rows=${Object.keys(found.positions)} keyOf=${(row) => row} columns=${[
        { title: "Partition", is: "number", by: Number, cell: (row) => html`<a href=${href("topics", topic, "records", row)}>${row}</a>` },
        { title: "Position", is: "number", cell: (row) => number(found.positions[row]) },
        { title: "Lag in records", is: "number", by: (row) => found.lag[row] || 0, cell: (row) => html`${number(found.lag[row])}${found.overtaken_by[row] ? html` <${Status} kind="bad">${number(found.overtaken_by[row])} lost to retention<//>` : ""}` },
        { title: "Owner", cell: (row) => found.owners[row] || html`<span class="quiet">none</span>` },
        { title: "Waits for", cell: (row) => Object.entries(found.waits_for?.[row] || {}).map(([before, end]) => `partition ${before} up to ${number(end)} `) },
      ]} />
      ${members.length > 0 && html`<h2>Members of the group</h2><${Table} caption="Members" rows=${members} keyOf=${(row) => row.member} columns=${[
        { title: "Member", cell: (row) => row.member },
        { title: "Mode", cell: (row) => row.mode },
        { title: "Heard from", cell: (row) => `${duration(row.seen_ms_ago)} ago` },
      ]} />`}
      ${asked === "rewind" && html`<${Rewind} topic=${topic} found=${found} members=${members} onClose=${close} />`}
      ${asked === "delete" && html`<${Confirm} title=${`Delete ${cursor}`} name=${cursor} verb="Delete" onClose=${close} onDone=${() => go("topics", topic, "consumers")}
        act=${() => send("DELETE", "/v1/topics/{topic}/cursors/{cursor}", { topic, cursor })}>
        <p>Its positions are forgotten. The next reader of this name begins where it says.</p><//>`}
    `}<//></div>`;
}

function Rewind({ topic, found, members, onClose }) {
  const [to, setTo] = useState("earliest");
  const [at, setAt] = useState("");
  const place = to === "time" ? at.trim() : to;
  const plan = usePoll(async (signal) => {
    if (!place) return null;
    let again = 0;
    let skipped = 0;
    for (const partition of Object.keys(found.positions)) {
      const { offset } = await get("/v1/topics/{topic}/partitions/{partition}/offsets", { topic, partition }, { at: place }, { signal });
      const moved = offset - found.positions[partition];
      if (moved < 0) again -= moved;
      else skipped += moved;
    }
    return { again, skipped };
  }, [place], 0);
  const act = async () => {
    if (!place) throw new Error("a time is missing");
    await send("PUT", "/v1/topics/{topic}/cursors/{cursor}", { topic, cursor: found.cursor }, { json: { rewind: place } });
  };
  return html`<${Confirm} title=${`Rewind ${found.cursor}`} name=${found.cursor} verb="Rewind" act=${act} onClose=${onClose}>
    <${Choice} label="To" value=${to} onChange=${setTo} options=${[["earliest", "the earliest record"], ["latest", "the end: skip all"], ["time", "a time"]]} />
    ${to === "time" && html`<${Input} label="Time" value=${at} onChange=${setAt} placeholder="2026-01-31T12:00:00Z" required />`}
    <div role="status">${place && html`<${Loaded} state=${plan}>${(sum) => html`
      <p>${number(sum.again)} records are read again; <b>${number(sum.skipped)} are skipped</b>.</p>`}<//>`}</div>
    ${members.length > 0 && html`<p><${Status} kind="warning">${members.length} members are reading now.<//></p>`}
  <//>`;
}
