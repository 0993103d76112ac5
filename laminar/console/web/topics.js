// The list of topics, the choice of one, and a new one.

import { html, useState } from "./preact-htm.js";
import { either, get, lacks, send } from "./api.js";
import { bytes, duration, number, time } from "./format.js";
import { Choice, Dialog, Empty, Field, Head, Input, Loaded, Status, Table, Trouble, go, href, useAction, usePoll } from "./parts.js";

const PAGE = 100;
const TOPICS_AT_ONCE = 20;

/** Whether a node refused one of these parameters: it is older, and does not know it. */
const refused = (...names) => (problem) => problem.status === 422 && names.includes(problem.body.field);

/** A page of topics with sums where the node has them; without, in order of names. */
export async function listTopics({ filter = "", sort = "name", limit = PAGE, after }, signal) {
  const page = await either(
    "stats",
    () => get("/v1/topics", {}, { contains: filter, sort, limit, after, stats: true }, { signal }),
    () => get("/v1/topics", {}, { prefix: filter, limit, after }, { signal }),
    refused("stats", "sort", "contains"),
  );
  return { ...page, hasStats: !lacks("stats") };
}

/** A page of the topics that have `channels` or `cursors`; of all topics where the node can't tell. */
function listHaving(having, { filter, limit, after }, signal) {
  return either(
    "having",
    () => get("/v1/topics", {}, { contains: filter, limit, after, having }, { signal }),
    () => listTopics({ filter, limit, after }, signal),
    refused("having", "contains"),
  );
}

export const isLive = (topic) => (topic.state === "live"
  ? topic.replicas_placed < topic.replicas
    ? html`<${Status} kind="warning">${topic.replicas_placed} of ${topic.replicas} replicas<//>`
    : html`<${Status} kind="good">live<//>`
  : html`<${Status} kind="idle">${topic.state}<//>`);

function useTopics(size = PAGE) {
  const [filter, setFilter] = useState("");
  const [sort, setSort] = useState("name");
  const [pages, setPages] = useState([undefined]);
  const after = pages[pages.length - 1];
  const state = usePoll((signal) => listTopics({ filter, sort, limit: size, after }, signal), [filter, sort, after]);
  const filtered = (text) => {
    setPages([undefined]);
    setFilter(text);
  };
  const sorted = (by) => {
    setPages([undefined]);
    setSort(by);
  };
  const controls = html`<div class="bar">
    <${Input} label=${lacks("stats") ? "Name begins with" : "Name contains"} value=${filter} onChange=${filtered} type="search" data-filter />
    ${!lacks("stats") && html`<${Choice} label="Sort by" value=${sort} onChange=${sorted} options=${[["name", "name"], ["records", "records"], ["bytes", "size"], ["appended_bytes", "appended bytes"], ["fetched_bytes", "fetched bytes"]]} />`}
    ${state.data?.total !== undefined && html`<span class="quiet" role="status">${number(state.data.total)} ${state.data.total === 1 ? "topic" : "topics"}</span>`}
  </div>`;
  const pager = (page) => (pages.length > 1 || page.next) && html`<div class="bar">
    <button type="button" disabled=${pages.length === 1} onClick=${() => setPages(pages.slice(0, -1))}>Previous</button>
    <button type="button" disabled=${!page.next} onClick=${() => setPages([...pages, page.next])}>Next</button>
    <span class="quiet">Page ${number(pages.length)}${page.total === undefined ? "" : ` of ${number(Math.ceil(page.total / size))}`}</span></div>`;
  return { state, controls, pager, filter };
}

function Silent({ page, what }) {
  return page.silent?.length > 0 && html`<p><${Status} kind="warning">${what} what is led by ${page.silent.join(", ")}.<//></p>`;
}

const NONE = (filter) => (filter
  ? html`<p>No topic has such a name.</p>`
  : html`<${Empty} command="laminar topic create orders --partitions 4">There is no topic yet. Make the first:<//>`);

/** Whether no one has made a topic yet: those of the system begin with an underscore. */
export const isEmpty = (page) => page.topics.every((topic) => topic.topic.startsWith("_")) && !page.next;

export function Topics({ may }) {
  const { state, controls, pager, filter } = useTopics();
  const [creating, setCreating] = useState(false);
  return html`<div><${Head} title="Topics">
      ${may("write", "") || may("admin", "") ? html`<button type="button" class="primary" onClick=${() => setCreating(true)}>New topic</button>` : ""}
    <//>
    ${controls}
    <${Loaded} state=${state}>${(page) => html`<div>${isEmpty(page) && NONE(filter)}${page.topics.length > 0 && html`<div>
      <${Silent} page=${page} what="Sums lack" />
      <${Table} caption="Topics" rows=${page.topics} keyOf=${(row) => row.topic} columns=${[
        { title: "Topic", cell: (row) => html`<a href=${href("topics", row.topic)}>${row.topic}</a>` },
        { title: "State", cell: isLive },
        { title: "Partitions", is: "number", cell: (row) => number(row.partitions) },
        { title: "Replicas", is: "number", cell: (row) => number(row.replicas) },
        ...(page.hasStats ? [
          { title: "Records", is: "number", cell: (row) => html`${number(row.stats?.records)}${row.stats && !row.stats.complete ? " +" : ""}` },
          { title: "Size", is: "number", cell: (row) => bytes(row.stats?.bytes) },
        ] : []),
        { title: "Retention", cell: (row) => retention(row.settings) },
        { title: "Created", is: "when", cell: (row) => time(row.created) },
      ]} />
      ${pager(page)}</div>`}</div>`}<//>
    ${creating && html`<${NewTopic} onClose=${() => setCreating(false)} />`}</div>`;
}

function retention(settings) {
  const parts = [];
  if (settings.retention_ms !== undefined) parts.push(duration(settings.retention_ms));
  if (settings.retention_bytes !== undefined) parts.push(bytes(settings.retention_bytes));
  return parts.join(", ") || "kept for ever";
}

function NewTopic({ onClose }) {
  const [name, setName] = useState("");
  const [partitions, setPartitions] = useState("1");
  const [replicas, setReplicas] = useState("");
  const [fewer, setFewer] = useState(false);
  const [run, busy, problem] = useAction(async () => {
    const json = { partitions: Number(partitions), allow_fewer_replicas: fewer };
    if (replicas) json.replicas = Number(replicas);
    await send("PUT", "/v1/topics/{topic}", { topic: name }, { json });
    go("topics", name);
  });
  const submit = (event) => {
    event.preventDefault();
    run();
  };
  return html`<${Dialog} title="New topic" onClose=${onClose}><form onSubmit=${submit}>
    <${Input} label="Name" value=${name} onChange=${setName} required />
    <${Input} label="Partitions" type="number" min="1" value=${partitions} onChange=${setPartitions} required />
    <${Input} label="Replicas" type="number" min="1" value=${replicas} onChange=${setReplicas} hint="Empty: as the nodes are set." />
    <label class="check"><input type="checkbox" checked=${fewer} onChange=${(event) => setFewer(event.target.checked)} /> Also with fewer nodes than replicas</label>
    <${Trouble} problem=${problem} />
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
      <button type="submit" class="primary" disabled=${busy || !name}>Create</button></div>
  </form><//>`;
}

/** The choice of a topic, for what belongs to one. */
export function Pick({ title, tab }) {
  const { state, controls, pager, filter } = useTopics();
  return html`<div><${Head} title=${title} />
    ${controls}
    <${Loaded} state=${state}>${(page) => html`<div>${isEmpty(page) && NONE(filter)}${page.topics.length > 0 && html`<div>
      <${Table} caption="Topics" rows=${page.topics} keyOf=${(row) => row.topic} columns=${[
        { title: `${title} of topic`, cell: (row) => html`<a href=${href("topics", row.topic, tab)}>${row.topic}</a>` },
        { title: "Partitions", is: "number", cell: (row) => number(row.partitions) },
        ...(page.hasStats ? [{ title: "Records", is: "number", cell: (row) => number(row.stats?.records) }] : []),
      ]} />${pager(page)}</div>`}</div>`}<//></div>`;
}

/**
 * The `channels` or `cursors` of 20 topics at a time, of those that have any: `load(topic, signal)` returns rows.
 *
 * A node that can't tell which topics have any lists all. Then a page without rows says nothing about the others.
 */
export function OfTopics({ title, having, load, columns, none, command }) {
  const [filter, setFilter] = useState("");
  const [pages, setPages] = useState([undefined]);
  const after = pages[pages.length - 1];
  const state = usePoll(async (signal) => {
    const page = await listHaving(having, { filter, limit: TOPICS_AT_ONCE, after }, signal);
    const rows = [];
    const failed = [];
    const left = [...page.topics];
    const work = async () => {
      for (let topic = left.shift(); topic; topic = left.shift()) {
        try {
          rows.push(...await load(topic.topic, signal));
        } catch (problem) {
          if (problem.status !== 403) failed.push(`${topic.topic}: ${problem.message}`);
        }
      }
    };
    await Promise.all([work(), work(), work(), work()]);
    rows.sort((a, b) => (a.topic < b.topic ? -1 : 1));
    return { page, rows, failed };
  }, [filter, after], 15_000);
  const filtered = (text) => {
    setPages([undefined]);
    setFilter(text);
  };
  const missing = (page) => (pages.length > 1 || page.next
    ? html`<p>None of these topics has any.</p>`
    : filter ? html`<p>No topic with such a name has any.</p>` : html`<${Empty} command=${command}>${none}<//>`);
  const place = (page) => (lacks("having")
    ? `${TOPICS_AT_ONCE} topics at a time, in order of their names.`
    : `Page ${number(pages.length)} of ${number(Math.ceil(page.total / TOPICS_AT_ONCE))}: ${number(page.total)} topics have any.`);
  return html`<div><${Head} title=${title}><button type="button" onClick=${state.reload}>Refresh</button><//>
    <div class="bar"><${Input} label=${lacks("stats") ? "Topic begins with" : "Topic contains"} value=${filter} onChange=${filtered} type="search" data-filter /></div>
    <${Loaded} state=${state}>${({ page, rows, failed }) => html`
      <${Silent} page=${page} what="The list lacks" />
      ${failed.map((text) => html`<p><${Status} kind="warning">${text}<//></p>`)}
      ${rows.length === 0
        ? missing(page)
        : html`<${Table} caption=${title} rows=${rows} columns=${columns} keyOf=${(row) => `${row.topic}/${row.cursor || row.channel}`} />`}
      ${(pages.length > 1 || page.next) && html`<div class="bar">
        <button type="button" disabled=${pages.length === 1} onClick=${() => setPages(pages.slice(0, -1))}>Previous topics</button>
        <button type="button" disabled=${!page.next} onClick=${() => setPages([...pages, page.next])}>Next topics</button>
        <span class="quiet">${place(page)}</span></div>`}
    `}<//></div>`;
}
