// Records: search and browse, one record in full, and rows as a file.

import { html, useEffect, useRef, useState } from "./preact-htm.js";
import { get, getBytes } from "./api.js";
import { bytes, csvHead, csvRow, hex, keyOf, number, save, text, time, valueBytes } from "./format.js";
import { Choice, Command, Empty, Head, Input, Loaded, Status, Table, Trouble, go, href, useAction, usePoll } from "./parts.js";
import { follow, isPlain, memory, steps } from "./search.js";

const MOST_ROWS = 1000;
const MOST_EXPORT = 64 << 20;
const SHOWN_BYTES = 64 << 10;
const HISTORY_STEPS = 20;

const preview = (record) => {
  if (record.value === undefined && record.value_base64 === undefined) return html`<span class="quiet">${bytes(record.size)}</span>`;
  const shown = record.value ?? `base64: ${record.value_base64}`;
  return html`<code class="value">${shown.slice(0, 160)}</code>${record.truncated || shown.length > 160 ? html` <span class="quiet">… ${bytes(record.size)}</span>` : ""}`;
};

export function Records({ topic, partition = "" }) {
  const [form, setForm] = useState({ order: "newest", from: "", to: "", partition, key: "", contains: "", tag: "", trace: "", header: "", path: "", equals: "", limit: 50 });
  const [view, setView] = useState({ rows: [], total: null, busy: true, problem: null, isDone: false });
  const [open, setOpen] = useState(null);
  const running = useRef(null);
  const known = useRef(null);

  // Goes on until there are `limit` more rows, all is looked at, or a person stops it. What a step found is shown
  // also if it was stopped meanwhile: the next one begins behind it.
  const goOn = async (before) => {
    const run = { isStopped: false, isOver: false };
    running.current = run;
    let rows = before;
    const enough = before.length + form.limit;
    setView((now) => ({ ...now, rows, busy: true, problem: null }));
    try {
      for await (const step of steps(topic, form, { known: known.current })) {
        if (run.isOver) return;
        rows = [...rows, ...step.records];
        const isEnd = rows.length >= enough || rows.length >= MOST_ROWS || step.isDone || run.isStopped;
        setView({ rows, total: { ...step.total }, busy: !isEnd, problem: null, isDone: step.isDone });
        if (isEnd) return;
      }
    } catch (problem) {
      if (!run.isOver) setView((now) => ({ ...now, busy: false, problem }));
    }
  };
  // Goes on until a person stops it, the newest record first. Beyond `MOST_ROWS` the oldest rows are dropped.
  const tail = async (before) => {
    const run = { isStopped: false, isOver: false, abort: new AbortController() };
    running.current = run;
    let { rows, found } = before;
    const show = (more) => setView((now) => ({ ...now, rows, found, isTail: true, ...more }));
    show({ busy: true, problem: null, isDone: false });
    try {
      for await (const step of follow(topic, form, { known: known.current, signal: run.abort.signal })) {
        if (run.isOver) return;
        rows = [...[...step.records].reverse(), ...rows].slice(0, MOST_ROWS);
        found += step.records.length;
        show({ total: { ...step.total }, busy: !run.isStopped });
        if (run.isStopped) return;
      }
    } catch (problem) {
      if (!run.isOver) show({ busy: false, problem: run.isStopped ? null : problem });
    }
  };
  const leave = () => {
    if (!running.current) return;
    running.current.isOver = true;
    running.current.abort?.abort();
  };
  const beginTail = () => {
    leave();
    setOpen(null);
    known.current = memory();
    tail({ rows: [], found: 0 });
  };
  const begin = () => {
    leave();
    setOpen(null);
    setView({ rows: [], total: null, busy: true, problem: null, isDone: false });
    known.current = memory();
    goOn([]);
  };
  const stop = () => {
    running.current.isStopped = true;
    running.current.abort?.abort();
  };
  useEffect(() => {
    begin();
    return leave;
  }, [topic]);

  const set = (field) => (value) => setForm({ ...form, [field]: value });
  const submit = (event) => {
    event.preventDefault();
    begin();
  };
  const plain = isPlain();
  const { total } = view;
  const identity = (row) => `${row.partition}/${row.offset}`;
  return html`<div><form class="wide" onSubmit=${submit} role="search" aria-label="Records">
    <div class="bar">
      ${!plain && html`<${Input} label="Value contains" type="search" value=${form.contains} onChange=${set("contains")} data-filter />
      <${Input} label="Key is" value=${form.key} onChange=${set("key")} />`}
      <${Input} label="Tag is" value=${form.tag} onChange=${set("tag")} />
      <${Input} label="Partition" type="number" min="0" value=${form.partition} onChange=${set("partition")} placeholder="all" ...${plain ? { "data-filter": true } : {}} />
      <${Choice} label="Order" value=${form.order} onChange=${set("order")} options=${[["newest", "newest first"], ["oldest", "oldest first"]]} />
      <button type="submit" class="primary">${plain ? "Fetch" : "Search"}</button>
      ${!plain && html`<button type="button" onClick=${beginTail}>Follow</button>`}
    </div>
    <details><summary>More conditions</summary><div class="bar">
      <${Input} label="From" value=${form.from} onChange=${set("from")} placeholder="earliest" hint="earliest, a time, or an offset" />
      <${Input} label="To" value=${form.to} onChange=${set("to")} placeholder="latest" hint="latest, a time, or an offset" />
      ${!plain && html`
      <${Input} label="Header" value=${form.header} onChange=${set("header")} placeholder="name=value" />
      <${Input} label="Trace id" value=${form.trace} onChange=${set("trace")} />
      <${Input} label="JSON at" value=${form.path} onChange=${set("path")} placeholder="order.id" />
      <${Input} label="JSON is" value=${form.equals} onChange=${set("equals")} placeholder="7" />`}
    </div></details></form>
    ${plain && html`<p><${Status} kind="idle">This node has no search: records are fetched as they come, and only a tag can be asked for.<//></p>`}
    <${Trouble} problem=${view.problem} />
    <div class="bar searched" role="status">
      <span>${view.isTail
        ? html`${view.busy ? "Following" : "Followed"}: ${number(view.found)} found${view.found > view.rows.length ? `, the newest ${number(view.rows.length)} are shown` : ""}.`
        : total
        ? html`${number(view.rows.length)} found. ${plain ? "Fetched" : "Searched"} ${number(total.records)} of ${number(total.records + (total.left?.records || 0))} records${total.byIndex ? ` and ${number(total.byIndex)} segments by their index` : ""}${view.isDone ? ": that is all." : "."}`
        : view.busy ? "Searching …" : ""}</span>
      ${view.busy && html`<button type="button" onClick=${stop}>Stop</button>`}
      ${!view.busy && view.isTail && html`<button type="button" onClick=${() => tail(view)}>Go on</button>`}
      ${!view.busy && !view.isTail && !view.isDone && (total || view.problem) && view.rows.length < MOST_ROWS && html`<button type="button" onClick=${() => goOn(view.rows)}>Go on</button>`}
      ${!view.isTail && view.rows.length >= MOST_ROWS && html`<span class="quiet">No more than ${number(MOST_ROWS)} rows are kept. Narrow the search, or export.</span>`}
      <${Export} topic=${topic} form=${form} />
    </div>
    ${total?.notSearched.slice(0, 20).map((gap) => html`<p><${Status} kind="warning">Not searched: partition ${gap.partition}, offsets ${number(gap.from)} to before ${number(gap.to)}: ${gap.why}<//></p>`)}
    ${view.rows.length > 0 && html`<${Table} caption="Records" rows=${view.rows} keyOf=${identity} most=${MOST_ROWS} columns=${[
      { title: "Partition/offset", cell: (row) => html`<button type="button" class="link" aria-expanded=${open === identity(row)} aria-label=${`Record ${row.partition}/${row.offset}`} onClick=${() => setOpen(open === identity(row) ? null : identity(row))}>${row.partition}/${row.offset}</button>` },
      { title: "Time", is: "when", cell: (row) => time(row.timestamp) },
      { title: "Key", cell: (row) => html`<code class="key">${keyOf(row).slice(0, 60)}</code>` },
      { title: "Tag", cell: (row) => row.tag },
      { title: "Size", is: "number", cell: (row) => bytes(row.size) },
      { title: "Value", cell: preview },
    ]} below=${(row) => open === identity(row) && html`<${RecordView} topic=${topic} record=${row} />`} />`}
    ${view.isDone && view.rows.length === 0 && html`<${Empty} command=${`echo hi | laminar produce ${topic}`}>No record is there, or none of those fits. To append one:<//>`}</div>`;
}

/** A record in full: its value as text, JSON or bytes, and all else that it has. */
function RecordView({ topic, record }) {
  const [whole, setWhole] = useState(null);
  const [shown, setShown] = useState("text");
  const [history, setHistory] = useState(false);
  const params = { topic, partition: record.partition, offset: record.offset };
  const [load, busy, problem] = useAction(async () => {
    setWhole(await getBytes("/v1/topics/{topic}/partitions/{partition}/records/{offset}", params));
  });
  const [keep, , keepProblem] = useAction(async () => {
    const data = whole || (record.truncated ? await getBytes("/v1/topics/{topic}/partitions/{partition}/records/{offset}", params) : valueBytes(record));
    save(`${topic}-${record.partition}-${record.offset}.bin`, "application/octet-stream", [data]);
  });
  const data = whole || valueBytes(record);
  const plain = text(data.subarray(0, SHOWN_BYTES));
  const isWhole = whole !== null || !record.truncated;
  let pretty = null;
  if (isWhole && plain !== null && data.length <= SHOWN_BYTES) {
    try {
      pretty = JSON.stringify(JSON.parse(plain), null, 2);
    } catch { /* it is no JSON */ }
  }
  const ways = [...(plain === null ? [] : [["text", "Text"]]), ...(pretty === null ? [] : [["json", "JSON"]]), ["hex", "Bytes"]];
  const way = ways.some(([name]) => name === shown) ? shown : ways[0][0];
  const headers = [...Object.entries(record.headers || {}), ...Object.entries(record.headers_base64 || {}).map(([name, value]) => [name, `base64: ${value}`])];
  return html`<div class="record">
    <dl class="facts">
      <dt>Partition, offset</dt><dd><a href=${href("topics", topic, "partitions", record.partition, "records", record.offset)}>${record.partition}/${record.offset}</a></dd>
      <dt>Time</dt><dd>${time(record.timestamp)}</dd>
      <dt>Key</dt><dd><code>${keyOf(record) || "none"}</code></dd>
      ${record.tag !== undefined && html`<dt>Tag</dt><dd>${record.tag}</dd>`}
      ${record.trace_id && html`<dt>Trace id</dt><dd><code>${record.trace_id}</code></dd>`}
      ${record.deliver_at && html`<dt>Was delayed to</dt><dd>${time(record.deliver_at)}</dd>`}
      ${headers.map(([name, value]) => html`<dt>Header ${name}</dt><dd><code>${value}</code></dd>`)}
      <dt>Size</dt><dd>${number(record.size)} bytes</dd>
    </dl>
    <div class="bar">
      ${ways.map(([name, title]) => html`<button type="button" aria-pressed=${name === way} onClick=${() => setShown(name)}>${title}</button>`)}
      ${!isWhole && record.size <= MOST_EXPORT && html`<button type="button" disabled=${busy} onClick=${load}>Load all of it</button>`}
      ${record.size <= MOST_EXPORT && html`<button type="button" onClick=${keep}>Save as a file</button>`}
      <button type="button" aria-pressed=${history} onClick=${() => setHistory(!history)}>History</button>
    </div>
    <${Trouble} problem=${problem || keepProblem} />
    <pre tabindex="0" aria-label="Value">${way === "hex" ? hex(data) : way === "json" ? pretty : plain}</pre>
    ${(data.length > SHOWN_BYTES || !isWhole) && html`<p class="quiet">That is the beginning; ${bytes(record.size)} in all.</p>`}
    ${history && html`<${History} ...${params} />`}
  </div>`;
}

function History(params) {
  const state = usePoll(async (signal) => {
    const events = [];
    let after;
    for (let step = 0; ; step += 1) {
      const found = await get("/v1/topics/{topic}/partitions/{partition}/records/{offset}/history", params, { after }, { signal });
      events.push(...found.events);
      after = found.after;
      if (!after || step >= HISTORY_STEPS) return { ...found, events };
    }
  }, [], 0);
  if (state.problem?.isNoRoute) return html`<p class="quiet">This node keeps no history of records.</p>`;
  return html`<${Loaded} state=${state}>${(found) => html`
    ${Object.entries(found.now || {}).map(([channel, now]) => html`<p>In the channel ${channel} now: ${String(now)}</p>`)}
    ${found.after && html`<p><${Status} kind="warning">This is a part of it: ${number(found.left)} entries of the log are left. All of it: laminar record history<//></p>`}
    ${found.events.length === 0 ? !found.after && html`<p class="quiet">Nothing has happened to it since it was appended.</p>` : html`<${Table} caption="History" rows=${found.events} keyOf=${(row) => `${row.entry}/${row.event}/${row.channel}/${row.delivery}`} columns=${[
      { title: "Event", cell: (row) => row.event },
      { title: "At", is: "when", cell: (row) => time(row.at) },
      { title: "Channel or consumer", cell: (row) => row.channel || row.cursor },
      { title: "Attempt", is: "number", cell: (row) => row.attempt },
      { title: "Reason", cell: (row) => row.reason },
    ]} />`}
    ${found.complete === false && html`<p><${Status} kind="warning">A part of it is gone: retention took it.<//></p>`}`}<//>`;
}

function Export({ topic, form }) {
  const [state, setState] = useState(null);
  const stopped = useRef(false);
  const run = async (kind) => {
    stopped.current = false;
    const parts = [];
    let size = 0;
    let count = 0;
    let end = "all of it";
    const put = (part) => {
      size += part.length;
      parts.push(part);
    };
    if (kind === "csv") put(csvHead());
    setState({ count, size, busy: true });
    try {
      for await (const step of steps(topic, { ...form, limit: 1000 }, { valueBytes: SHOWN_BYTES })) {
        for (const record of step.records) {
          const part = kind === "csv" ? csvRow(record) : `${JSON.stringify(record)}\n`;
          if (size + part.length > MOST_EXPORT) {
            end = "the first 64 MiB";
            break;
          }
          put(part);
          count += 1;
        }
        setState({ count, size, busy: true });
        if (stopped.current) end = "until it was stopped";
        if (stopped.current || end !== "all of it") break;
      }
      save(`${topic}.${kind}`, kind === "csv" ? "text/csv" : "application/x-ndjson", parts);
      setState({ count, size, end, busy: false });
    } catch (problem) {
      setState({ count, size, problem, busy: false });
    }
  };
  useEffect(() => () => { stopped.current = true; }, []);
  return html`<span class="push">
    ${state && html`<span>${state.busy ? "Exporting" : state.problem ? "Export failed after" : "Exported"} ${number(state.count)} records, ${bytes(state.size)}${state.end ? ` (${state.end})` : ""} ${state.problem?.message || ""}</span>`}
    ${state?.busy ? html`<button type="button" onClick=${() => { stopped.current = true; }}>Stop export</button>` : html`
    <button type="button" onClick=${() => run("ndjson")}>Export NDJSON</button><button type="button" onClick=${() => run("csv")}>Export CSV</button>`}
    ${state?.end === "the first 64 MiB" && html`<${Command} text=${`laminar consume ${topic} --json > ${topic}.ndjson`} />`}
  </span>`;
}

/** One record by its address. */
export function RecordPage({ topic, partition, offset }) {
  const at = Number(offset);
  const state = usePoll(async (signal) => {
    const page = await get("/v1/topics/{topic}/partitions/{partition}/records", { topic, partition },
      { offset: at, to: at + 1, limit: 1, max_bytes: 1 << 20 }, { signal, headers: { Accept: "application/json" } });
    const [record] = page.records;
    if (!record) throw Object.assign(new Error("There is no record at this offset."), { code: "no_such_record", status: 404 });
    const size = record.value_bytes ?? valueBytes(record).length;
    return { ...record, partition: Number(partition), size, truncated: record.value_bytes !== undefined };
  }, [topic, partition, offset], 0);
  return html`<div><${Head} title=${`${partition}/${offset}`} crumbs=${[["Topics", href("topics")], [topic, href("topics", topic)], ["Records", href("topics", topic, "records", partition)]]}>
      <button type="button" disabled=${at === 0} onClick=${() => go("topics", topic, "partitions", partition, "records", at - 1)}>Record before</button>
      <button type="button" onClick=${() => go("topics", topic, "partitions", partition, "records", at + 1)}>Next record</button>
    <//>
    <${Loaded} state=${state}>${(record) => html`<${RecordView} topic=${topic} record=${record} />`}<//></div>`;
}
