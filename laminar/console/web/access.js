// Who may do what: who you are, tokens, limits, and what was done.

import { html, useState } from "./preact-htm.js";
import { get, send } from "./api.js";
import { number, time } from "./format.js";
import { Choice, Confirm, Dialog, Empty, Field, Figures, Head, Input, Loaded, Status, Table, Tabs, Trouble, href, useAction, usePoll } from "./parts.js";

const LIMITS = ["requests_per_s", "bytes_in_per_s", "bytes_out_per_s", "connections", "topics", "partitions", "channels", "cursors", "sinks", "uploads", "producers"];
const grants = (row) => row.grants.map((each) => html`<div>${each.role} on ${each.prefix ? html`<code>${each.prefix}*</code>` : "everything"}</div>`);

export function Access({ me, may, tab }) {
  const isAdmin = may("admin");
  const tabs = [["tokens", "Tokens"], ["limits", "Limits"], ["audit", "Audit"]];
  return html`<div><${Head} title="Access" />
    <${Figures} figures=${[["You are", me.principal], ["You may", grants(me)], ["Until", me.expires ? time(me.expires) : "no end"]]} />
    ${isAdmin ? html`<${Tabs} label="Of access" current=${tab} tabs=${tabs.map(([name, title]) => [name, href("access", name), title])} />
      ${tab === "tokens" && html`<${TokensTab} />`}${tab === "limits" && html`<${LimitsTab} />`}${tab === "audit" && html`<${AuditTab} />`}`
      : html`<p class="quiet">Tokens, limits and the audit are for an admin of everything.</p>`}</div>`;
}

function TokensTab() {
  const state = usePoll((signal) => get("/v1/admin/tokens", {}, {}, { signal }), [], 0);
  const [creating, setCreating] = useState(false);
  const [revoking, setRevoking] = useState(null);
  const close = () => {
    setCreating(false);
    setRevoking(null);
    state.reload();
  };
  return html`<div><div class="bar"><button type="button" class="primary" onClick=${() => setCreating(true)}>New token</button></div>
    <${Loaded} state=${state}>${({ tokens }) => (tokens.length === 0
      ? html`<${Empty} command="laminar token create NAME --grant read:orders">There is no token. With access=open none is asked for:<//>`
      : html`<${Table} caption="Tokens" rows=${tokens} keyOf=${(row) => row.id} columns=${[
        { title: "Principal", by: (row) => row.name, cell: (row) => row.name },
        { title: "Id", cell: (row) => html`<code>${row.id}</code>` },
        { title: "May", cell: grants },
        { title: "Created", by: (row) => row.created, is: "when", cell: (row) => time(row.created) },
        { title: "Expires", cell: (row) => (row.expires ? (Date.parse(row.expires) < Date.now() ? html`<${Status} kind="idle">expired ${time(row.expires)}<//>` : time(row.expires)) : "never") },
        { title: "Certificate", cell: (row) => row.certificate },
        { title: "Actions", is: "do", cell: (row) => html`<button type="button" aria-label=${`Revoke ${row.id} of ${row.name}`} onClick=${() => setRevoking(row)}>Revoke</button>` },
      ]} />`)}<//>
    ${creating && html`<${NewToken} onClose=${close} />`}
    ${revoking && html`<${Confirm} title=${`Revoke a token of ${revoking.name}`} name=${revoking.name} verb="Revoke" onClose=${close} act=${() => send("DELETE", "/v1/admin/tokens/{token}", { token: revoking.id })}>
      <p>Whatever is sent with it from now on is refused.</p><//>`}</div>`;
}

function NewToken({ onClose }) {
  const [name, setName] = useState("");
  const [role, setRole] = useState("read");
  const [prefix, setPrefix] = useState("");
  const [days, setDays] = useState("");
  const [made, setMade] = useState(null);
  const [run, busy, problem] = useAction(async () => {
    const json = { name, grants: [{ role, prefix }] };
    if (days) json.expires = new Date(Date.now() + Number(days) * 86_400_000).toISOString();
    setMade(await send("POST", "/v1/admin/tokens", {}, { json }));
  });
  const submit = (event) => {
    event.preventDefault();
    run();
  };
  if (made) {
    return html`<${Dialog} title="The new token" onClose=${onClose}>
      <p>It is shown this once: the cluster keeps no copy.</p>
      <${Field} label="Token"><input readonly value=${made.token} onFocus=${(event) => event.target.select()} /><//>
      <div class="buttons"><button type="button" class="primary" onClick=${onClose}>I have it</button></div><//>`;
  }
  return html`<${Dialog} title="New token" onClose=${onClose}><form onSubmit=${submit}>
    <${Input} label="Principal" value=${name} onChange=${setName} required hint="A name: of a program, a person." />
    <${Choice} label="Role" value=${role} onChange=${setRole} options=${["read", "write", "admin", "metrics"].map((each) => [each, each])} />
    <${Input} label="On topics that begin with" value=${prefix} onChange=${setPrefix} hint="Empty: on everything." />
    <${Input} label="Expires after days" type="number" min="1" value=${days} onChange=${setDays} hint="Empty: never." />
    <${Trouble} problem=${problem} />
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${busy || !name}>Make it</button></div>
  </form><//>`;
}

function LimitsTab() {
  const state = usePoll((signal) => get("/v1/admin/limits", {}, {}, { signal }), [], 0);
  const [editing, setEditing] = useState(null);
  const close = () => {
    setEditing(null);
    state.reload();
  };
  return html`<div><div class="bar"><button type="button" class="primary" onClick=${() => setEditing({ principal: "", limits: {}, version: 0 })}>Set limits</button></div>
    <${Loaded} state=${state}>${({ principals }) => (principals.length === 0
      ? html`<${Empty} command="laminar limit set '*' connections=200">No principal has limits. For all that have none of their own:<//>`
      : html`<${Table} caption="Limits" rows=${principals} keyOf=${(row) => row.principal} columns=${[
        { title: "Principal", cell: (row) => (row.principal === "*" ? "* (all others)" : row.principal) },
        { title: "Limits", cell: (row) => Object.entries(row.limits).map(([name, value]) => html`<div><code>${name}</code> ${number(value)}</div>`) },
        { title: "Actions", is: "do", cell: (row) => html`<button type="button" aria-label=${`Change limits of ${row.principal}`} onClick=${() => setEditing(row)}>Change</button>` },
      ]} />`)}<//>
    ${editing && html`<${SetLimits} row=${editing} onClose=${close} />`}</div>`;
}

function SetLimits({ row, onClose }) {
  const [principal, setPrincipal] = useState(row.principal);
  const [values, setValues] = useState(Object.fromEntries(LIMITS.map((name) => [name, row.limits[name] === undefined ? "" : String(row.limits[name])])));
  const [run, busy, problem] = useAction(async () => {
    const json = Object.fromEntries(LIMITS.filter((name) => values[name] !== "").map((name) => [name, Number(values[name])]));
    await send("PUT", "/v1/admin/limits/{principal}", { principal }, { json, ifMatch: `"${row.version}"` });
    onClose();
  });
  const submit = (event) => {
    event.preventDefault();
    run();
  };
  return html`<${Dialog} title="Limits" onClose=${onClose}><form onSubmit=${submit}>
    <${Input} label="Principal" value=${principal} onChange=${setPrincipal} required readonly=${row.principal !== ""} hint="* is each that has none of its own." />
    ${LIMITS.map((name) => html`<${Input} label=${name} type="number" min="1" value=${values[name]} onChange=${(value) => setValues({ ...values, [name]: value })} placeholder="no limit" />`)}
    <${Trouble} problem=${problem} />
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${busy || !principal}>Set</button></div>
  </form><//>`;
}

function AuditTab() {
  const state = usePoll(async (signal) => {
    const topic = "_audit";
    try {
      const { partitions } = await get("/v1/topics/{topic}/partitions", { topic }, {}, { signal });
      const end = partitions[0].end_offset || 0;
      const offset = Math.max(partitions[0].start_offset || 0, end - 200);
      if (offset >= end) return [];
      const page = await get("/v1/topics/{topic}/partitions/{partition}/records", { topic, partition: 0 }, { offset, limit: 200, max_bytes: 1 << 20 }, { signal, headers: { Accept: "application/json" } });
      return page.records.map((record) => ({ offset: record.offset, ...JSON.parse(record.value) })).reverse();
    } catch (problem) {
      if (problem.code === "no_such_topic") return [];
      throw problem;
    }
  }, [], 0);
  return html`<div><div class="bar"><button type="button" onClick=${state.reload}>Refresh</button><span class="quiet">The newest 200.</span></div>
    <${Loaded} state=${state}>${(rows) => (rows.length === 0
      ? html`<${Empty} command="laminar audit --follow">Nothing is in the audit. With access=open there is none:<//>`
      : html`<${Table} caption="Audit" rows=${rows} keyOf=${(row) => row.offset} columns=${[
        { title: "Time", is: "when", cell: (row) => time(row.time) },
        { title: "Who", cell: (row) => row.principal || "" },
        { title: "From", cell: (row) => row.address },
        { title: "What", cell: (row) => html`<code>${row.method} ${row.path}</code>${row.count > 1 ? ` × ${number(row.count)}` : ""}` },
        { title: "Answer", cell: (row) => html`<${Status} kind=${row.status && row.status < 400 ? "good" : "bad"}>${row.status || "none"} ${row.code || ""}<//>` },
        { title: "Node", cell: (row) => row.node },
      ]} />`)}<//></div>`;
}
