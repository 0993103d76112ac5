// One topic: its partitions, with leader, replicas and bounds, its settings, its end.

import { html, useState } from "./preact-htm.js";
import { get, getTagged, send } from "./api.js";
import { bytes, number, time } from "./format.js";
import { Choice, Confirm, Dialog, Figures, Head, Input, Loaded, Status, Table, Tabs, Trouble, go, href, useAction, usePoll } from "./parts.js";
import { isLive } from "./topics.js";
import { Records } from "./records.js";
import { Produce } from "./produce.js";
import { ConsumersTab } from "./consumers.js";
import { ChannelsTab } from "./channels.js";
import { RoutesTab } from "./routes.js";

const TABS = [["partitions", "Partitions"], ["records", "Records"], ["produce", "Produce"], ["consumers", "Consumers"], ["channels", "Channels"], ["routes", "Routes"], ["settings", "Settings"]];

export function TopicPage({ topic, tab, partition, may }) {
  const state = usePoll(() => getTagged("/v1/topics/{topic}", { topic }), [topic], 0);
  const shown = TABS.filter(([name]) => (name === "produce" ? may("write", topic) : ["records", "consumers"].includes(name) ? may("read", topic) : true));
  return html`<div><${Head} title=${topic} crumbs=${[["Topics", href("topics")]]} />
    <${Tabs} label="Of this topic" current=${tab} tabs=${shown.map(([name, title]) => [name, href("topics", topic, name), title])} />
    ${tab === "partitions" && html`<${PartitionsTab} topic=${topic} may=${may} />`}
    ${tab === "records" && html`<${Records} topic=${topic} partition=${partition} />`}
    ${tab === "produce" && html`<${Produce} topic=${topic} />`}
    ${tab === "consumers" && html`<${ConsumersTab} topic=${topic} />`}
    ${tab === "channels" && html`<${ChannelsTab} topic=${topic} may=${may} />`}
    ${tab === "routes" && html`<${RoutesTab} topic=${topic} may=${may} />`}
    ${tab === "settings" && html`<${Loaded} state=${state}>${(found) => html`<${SettingsTab} topic=${topic} found=${found} reload=${state.reload} may=${may} />`}<//>`}</div>`;
}

function replica(each) {
  const kind = each.state === "failed" || each.state === "lost" ? "bad" : each.in_sync ? "good" : "warning";
  const parts = [each.in_sync ? "in sync" : each.reason || each.state];
  if (each.lag) parts.push(`${number(each.lag)} behind`);
  if (!each.reachable) parts.push("no answer");
  return html`<div><${Status} kind=${kind}>${each.node}: ${parts.join(", ")}<//></div>`;
}

const records = (row) => (row.end_offset === null || row.start_offset === null ? null : row.end_offset - row.start_offset);
const sum = (rows, of) => rows.reduce((total, row) => total + (of(row) || 0), 0);

function PartitionsTab({ topic, may }) {
  const state = usePoll((signal) => get("/v1/topics/{topic}/partitions", { topic }, {}, { signal }), [topic]);
  const [trimming, setTrimming] = useState(null);
  const [recovering, setRecovering] = useState(null);
  const canChange = may("admin", topic) && !topic.startsWith("_");
  return html`<${Loaded} state=${state}>${({ partitions }) => {
    const lacking = partitions.filter((row) => !row.leader && row.state === "live").length;
    const behind = partitions.filter((row) => row.replicas.some((each) => !each.in_sync)).length;
    return html`
    <${Figures} figures=${[
      ["Records", number(sum(partitions, records))],
      ["Size of one replica", bytes(sum(partitions, (row) => row.bytes))],
      ["Partitions", number(partitions.length), lacking ? html`<${Status} kind="bad">${lacking} without a leader<//>` : html`<${Status} kind="good">all have a leader<//>`],
      ["Replicas", behind ? html`<${Status} kind="warning">${behind} partitions not in sync<//>` : html`<${Status} kind="good">in sync<//>`],
    ]} />
    <${Table} caption="Partitions" rows=${partitions} keyOf=${(row) => row.partition} columns=${[
      { title: "Partition", is: "number", by: (row) => row.partition, cell: (row) => (may("read", topic) ? html`<a href=${href("topics", topic, "records", row.partition)} title="Its records">${row.partition}</a>` : row.partition) },
      { title: "Leader", by: (row) => row.leader?.node || "", cell: (row) => (row.leader ? row.leader.node : html`<${Status} kind="bad">none<//>`) },
      { title: "Replicas", cell: (row) => html`${row.replicas.map(replica)}${row.leaving.map((each) => html`<div><${Status} kind="idle">${each.node}: leaving, ${each.why}<//></div>`)}` },
      { title: "First offset", is: "number", cell: (row) => number(row.start_offset) },
      { title: "End offset", is: "number", by: (row) => row.end_offset || 0, cell: (row) => number(row.end_offset) },
      { title: "Records", is: "number", by: (row) => records(row) || 0, cell: (row) => number(records(row)) },
      { title: "Size", is: "number", by: (row) => row.bytes || 0, cell: (row) => bytes(row.bytes) },
      { title: "State", cell: (row) => html`${row.state === "live" ? row.status : row.state}${row.damaged.map((each) => html`<div><${Status} kind="bad">damaged on ${each.node}: ${number(each.first_offset)} to ${number(each.next_offset)}<//></div>`)}` },
      ...(canChange ? [{ title: "Actions", is: "do", cell: (row) => html`
        <button type="button" aria-label=${`Trim partition ${row.partition}`} onClick=${() => setTrimming(row)}>Trim</button>
        ${!row.leader && html`<button type="button" aria-label=${`Recover partition ${row.partition}`} onClick=${() => setRecovering(row)}>Recover</button>`}` }] : []),
    ]} />
    ${trimming && html`<${Trim} topic=${topic} row=${trimming} onClose=${() => { setTrimming(null); state.reload(); }} />`}
    ${recovering && html`<${Recover} topic=${topic} row=${recovering} onClose=${() => { setRecovering(null); state.reload(); }} />`}`;
  }}<//>`;
}

function Trim({ topic, row, onClose }) {
  const [before, setBefore] = useState("");
  const [plan, setPlan] = useState(null);
  const partition = row.partition;
  const [look, busy, problem] = useAction(async () => {
    setPlan(await send("DELETE", "/v1/topics/{topic}/partitions/{partition}/records", { topic, partition }, { query: { before, dry_run: true } }));
  });
  const submit = (event) => {
    event.preventDefault();
    look();
  };
  if (plan && plan.deleted > 0) {
    const act = () => send("DELETE", "/v1/topics/{topic}/partitions/{partition}/records", { topic, partition }, { query: { before: plan.before } });
    return html`<${Confirm} title=${`Trim partition ${partition}`} name=${topic} verb="Delete records" act=${act} onClose=${onClose}>
      <p><b>${number(plan.deleted)} records</b> are deleted for good, from offset ${number(plan.from_offset)} to before ${number(plan.start_offset)}.</p>
      ${plan.rounded_down && html`<p>A batch is deleted as a whole: that is fewer than asked for.</p>`}
      ${plan.held_back_by.length > 0 && html`<p>Held back by ${plan.held_back_by.join(", ")}.</p>`}
    <//>`;
  }
  return html`<${Dialog} title=${`Trim partition ${partition}`} onClose=${onClose}><form onSubmit=${submit}>
    <p>It has the offsets from ${number(row.start_offset)} to before ${number(row.end_offset)}.</p>
    <${Input} label="Delete the records before offset" type="number" min="0" value=${before} onChange=${setBefore} required />
    ${plan && html`<p role="status">Nothing would be deleted.${plan.held_back_by.length > 0 ? ` Held back by ${plan.held_back_by.join(", ")}.` : ""}</p>`}
    <${Trouble} problem=${problem} />
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
      <button type="submit" class="primary" disabled=${busy || before === ""}>Show what is deleted</button></div>
  </form><//>`;
}

function Recover({ topic, row, onClose }) {
  const partition = row.partition;
  const params = { topic, partition };
  const state = usePoll(() => send("POST", "/v1/topics/{topic}/partitions/{partition}/recover", params), [], 0);
  if (!state.data) {
    return html`<${Dialog} title=${`Recover partition ${partition}`} onClose=${onClose}>
      <${Loaded} state=${state}>${() => ""}<//>
      <div class="buttons"><button type="button" onClick=${onClose}>Close</button></div><//>`;
  }
  const report = state.data;
  const act = () => send("POST", "/v1/topics/{topic}/partitions/{partition}/recover", params, { query: { accept_loss: true } });
  return html`<${Confirm} title=${`Recover partition ${partition}`} name=${topic} verb="Accept the loss" act=${act} onClose=${onClose}>
    <p>The partition goes on from ${report.goes_on_from}. What only ${report.absent.join(", ") || "absent nodes"} hold <b>is lost</b>, if they ever come back.</p>
    <p>Committed up to ${number(report.committed_offset)}; kept up to ${number(report.kept_offset)}.</p>
  <//>`;
}

// Settings of a topic: what they are, and what holds where they are not set.
const SETTINGS = [
  ["flush", "when an append is acknowledged", "commit", ["commit", "interval"]],
  ["flush_interval_ms", "with interval: synced within, in ms", "500"],
  ["flush_interval_records", "with interval: records after which a sync begins", "never"],
  ["min_replicas", "replicas in sync that an append needs", "a majority"],
  ["retention_ms", "age at which records are deleted, in ms", "never"],
  ["retention_bytes", "size beyond which records are deleted", "no bound"],
  ["order", "of each key while partitions change", "strict", ["strict", "weak"]],
  ["split_bytes_per_s", "load at which a partition is split", "never"],
  ["index", "what searches find by an index, with commas", "key,trace_id"],
];

function SettingsTab({ topic, found, reload, may }) {
  const record = found.document;
  const [editing, setEditing] = useState(false);
  const [deleting, setDeleting] = useState(false);
  const known = new Set(SETTINGS.map(([name]) => name));
  const others = Object.keys(record.settings).filter((name) => !known.has(name)).map((name) => [name, "", ""]);
  const canChange = may("admin", topic);
  return html`<div>
    <${Figures} figures=${[["State", isLive(record)], ["Partitions", number(record.partitions)], ["Replicas", number(record.replicas)], ["Created", time(record.created)]]} />
    <${Table} caption="Settings" rows=${[...SETTINGS, ...others]} keyOf=${([name]) => name} columns=${[
      { title: "Setting", cell: ([name]) => html`<code>${name}</code>` },
      { title: "Value", cell: ([name, , otherwise]) => (record.settings[name] === undefined ? otherwise : String(record.settings[name])) },
      { title: "From", cell: ([name]) => (record.settings[name] === undefined ? html`<span class="quiet">default</span>` : "this topic") },
      { title: "What it is", cell: ([, help]) => help },
    ]} />
    ${canChange && html`<div class="bar">
      <button type="button" class="primary" onClick=${() => setEditing(true)}>Change</button>
      ${!topic.startsWith("_") && html`<button type="button" class="danger" onClick=${() => setDeleting(true)}>Delete topic</button>`}</div>`}
    ${editing && html`<${Edit} topic=${topic} found=${found} onClose=${() => { setEditing(false); reload(); }} />`}
    ${deleting && html`<${Delete} topic=${topic} etag=${found.etag} may=${may} onClose=${() => { setDeleting(false); reload(); }} />`}</div>`;
}

function Edit({ topic, found, onClose }) {
  const record = found.document;
  const first = Object.fromEntries(SETTINGS.map(([name]) => [name, record.settings[name] === undefined ? "" : String(record.settings[name])]));
  const [values, setValues] = useState(first);
  const [replicas, setReplicas] = useState(String(record.replicas));
  const [run, busy, problem] = useAction(async () => {
    const settings = {};
    for (const [name, , , choices] of SETTINGS) {
      if (values[name] !== first[name]) settings[name] = values[name] === "" ? null : choices ? values[name] : Number(values[name]);
    }
    const json = { settings };
    if (Number(replicas) !== record.replicas) json.replicas = Number(replicas);
    await send("PATCH", "/v1/topics/{topic}", { topic }, { json, ifMatch: found.etag });
    onClose();
  });
  const set = (name) => (value) => setValues({ ...values, [name]: value });
  const submit = (event) => {
    event.preventDefault();
    run();
  };
  return html`<${Dialog} title=${`Settings of ${topic}`} onClose=${onClose}><form onSubmit=${submit}>
    <${Input} label="Replicas" type="number" min="1" value=${replicas} onChange=${setReplicas} required />
    ${SETTINGS.map(([name, help, otherwise, choices]) => (choices
      ? html`<${Choice} label=${`${name}: ${help}`} value=${values[name]} onChange=${set(name)} options=${[["", `not set: ${otherwise}`], ...choices.map((choice) => [choice, choice])]} />`
      : html`<${Input} label=${`${name}: ${help}`} type="number" min="0" value=${values[name]} onChange=${set(name)} placeholder=${`not set: ${otherwise}`} />`))}
    <p class="quiet">A shorter retention deletes records within a minute, for good.</p>
    <${Trouble} problem=${problem} />
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${busy}>Change</button></div>
  </form><//>`;
}

function Delete({ topic, etag, onClose }) {
  const state = usePoll(async () => {
    const [parts, cursors, channels] = await Promise.all([
      get("/v1/topics/{topic}/partitions", { topic }),
      get("/v1/topics/{topic}/cursors", { topic }),
      get("/v1/topics/{topic}/channels", { topic }),
    ]);
    return { parts: parts.partitions, cursors: cursors.cursors, channels: channels.channels };
  }, [], 0);
  const act = () => send("DELETE", "/v1/topics/{topic}", { topic }, { ifMatch: etag });
  return html`<${Confirm} title=${`Delete ${topic}`} name=${topic} verb="Delete topic" act=${act} onClose=${onClose} onDone=${() => go("topics")}>
    <${Loaded} state=${state}>${({ parts, cursors, channels }) => html`
      <p><b>${number(sum(parts, records))} records</b> in ${number(parts.length)} partitions are deleted.</p>
      ${cursors.length > 0 && html`<p>Consumers that read it: ${cursors.map((each) => each.cursor).join(", ")}.</p>`}
      ${channels.length > 0 && html`<p>Channels with it: ${channels.map((each) => each.channel).join(", ")}.</p>`}`}<//>
  <//>`;
}
