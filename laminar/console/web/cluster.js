// The nodes, what is under way, and taking a node out.

import { html, useState } from "./preact-htm.js";
import { get, send } from "./api.js";
import { number } from "./format.js";
import { Confirm, Dialog, Figures, Head, Input, Loaded, Status, Table, Trouble, useAction, usePoll } from "./parts.js";

const PAGE = 100;
// The other kinds end by a change of what asks for them.
const CANCELLED = ["drain", "pin"];
const alive = (row) => (row.alive ? html`<${Status} kind="good">${row.status}<//>` : html`<${Status} kind="bad">${row.status || "no answer"}<//>`);

export function Cluster({ may }) {
  const isAdmin = may("admin");
  const [pages, setPages] = useState([undefined]);
  const after = pages[pages.length - 1];
  const state = usePoll(async (signal) => {
    const cluster = await get("/v1/cluster", {}, {}, { signal });
    if (!isAdmin) return { cluster, nodes: cluster.nodes, operations: [] };
    const [{ nodes }, { operations, next, total }] = await Promise.all([
      get("/v1/admin/nodes", {}, {}, { signal }), get("/v1/admin/operations", {}, { limit: PAGE, after }, { signal }),
    ]);
    return { cluster, nodes, operations, next, total };
  }, [after]);
  const [asked, setAsked] = useState(null);
  const close = () => {
    setAsked(null);
    state.reload();
  };
  return html`<div><${Head} title="Cluster" />
    <${Loaded} state=${state}>${({ cluster, nodes, operations, next, total }) => html`
      <${Figures} figures=${[
        ["Nodes", number(nodes.length), nodes.every((row) => row.alive) ? html`<${Status} kind="good">all alive<//>` : html`<${Status} kind="bad">${nodes.filter((row) => !row.alive).length} dead<//>`],
        ["Leader of the catalog", cluster.catalog_leader || "none"],
        ["Code version", number(cluster.code_version)],
        ["Cluster", html`<code>${cluster.cluster_id}</code>`],
      ]} />
      <h2>Nodes</h2>
      <${Table} caption="Nodes" rows=${nodes} keyOf=${(row) => row.node} columns=${[
        { title: "Node", by: (row) => row.node, cell: (row) => row.node },
        { title: "State", cell: (row) => html`${alive(row)}${row.draining ? html`<div><${Status} kind="warning">draining${row.safe_to_stop ? ": safe to stop" : ""}<//></div>` : ""}` },
        { title: "Address", cell: (row) => html`<code>${row.url}</code>` },
        { title: "Weight", is: "number", cell: (row) => row.weight },
        { title: "Code version", is: "number", cell: (row) => row.code_version },
        ...(isAdmin ? [
          { title: "Zone", cell: (row) => row.zone || html`<span class="quiet">none</span>` },
          { title: "Leads", is: "number", by: (row) => row.leads || 0, cell: (row) => number(row.leads) },
          { title: "Replicas", is: "number", by: (row) => row.replicas, cell: (row) => number(row.replicas) },
          { title: "Drain waits for", cell: (row) => [...row.drain_waits_for, ...row.drain_blocked_by].slice(0, 5).map((text) => html`<div>${text}</div>`) },
          { title: "Actions", is: "do", cell: (row) => html`<button type="button" aria-label=${`${row.draining ? "Undrain" : "Drain"} ${row.node}`} onClick=${() => setAsked({ what: row.draining ? "undrain" : "drain", row })}>${row.draining ? "Undrain" : "Drain"}</button>
            <button type="button" aria-label=${`Weight of ${row.node}`} onClick=${() => setAsked({ what: "weight", row })}>Weight</button>` },
        ] : []),
      ]} />
      ${isAdmin && html`<h2>Under way</h2>
      ${operations.length === 0 && pages.length === 1 ? html`<p class="quiet">All is as it should be: nothing is under way.</p>` : html`
      <${Table} caption="Operations" rows=${operations} keyOf=${(row) => row.id} columns=${[
        { title: "What", cell: (row) => `${row.kind} ${row.what}` },
        { title: "Done", is: "number", cell: (row) => html`<progress max=${row.total || 1} value=${row.done} aria-label="Done"></progress> ${number(row.done)} of ${number(row.total)}` },
        { title: "Why", cell: (row) => row.why },
        { title: "Blocked by", cell: (row) => row.blocked_by.map((text) => html`<div><${Status} kind="bad">${text}<//></div>`) },
        { title: "Actions", is: "do", cell: (row) => CANCELLED.includes(row.kind) && html`<button type="button" aria-label=${`Cancel ${row.kind} ${row.what}`} onClick=${() => setAsked({ what: "cancel", row })}>Cancel</button>` },
      ]} />${(pages.length > 1 || next) && html`<div class="bar">
        <button type="button" disabled=${pages.length === 1} onClick=${() => setPages(pages.slice(0, -1))}>Previous</button>
        <button type="button" disabled=${!next} onClick=${() => setPages([...pages, next])}>Next</button>
        <span class="quiet">Page ${number(pages.length)}${total === undefined ? "" : ` of ${number(Math.ceil(total / PAGE))}: ${number(total)} are under way`}</span></div>`}`}`}
      ${asked?.what === "drain" && html`<${Confirm} title=${`Drain ${asked.row.node}`} name=${asked.row.node} verb="Drain" onClose=${close} act=${() => send("POST", "/v1/admin/nodes/{node}/drain", { node: asked.row.node })}>
        <p>Its ${number(asked.row.leads)} leaders and ${number(asked.row.replicas)} replicas go to other nodes. Nothing is lost; it can be undone.</p><//>`}
      ${asked?.what === "undrain" && html`<${Confirm} title=${`Undrain ${asked.row.node}`} verb="Undrain" onClose=${close} act=${() => send("POST", "/v1/admin/nodes/{node}/undrain", { node: asked.row.node })}>
        <p>It may hold replicas and lead again.</p><//>`}
      ${asked?.what === "weight" && html`<${Weight} row=${asked.row} onClose=${close} />`}
      ${asked?.what === "cancel" && html`<${Confirm} title="Cancel" verb="Cancel it" onClose=${close} act=${() => send("DELETE", "/v1/admin/operations/{operation}", { operation: asked.row.id })}>
        <p>${asked.row.cancel}</p><//>`}
    `}<//></div>`;
}

function Weight({ row, onClose }) {
  const [weight, setWeight] = useState(String(row.weight));
  const [run, busy, problem] = useAction(async () => {
    const json = { weight: weight === "" ? null : Number(weight) };
    await send("PATCH", "/v1/admin/nodes/{node}", { node: row.node }, { json, ifMatch: `"${row.version}"` });
    onClose();
  });
  const submit = (event) => {
    event.preventDefault();
    run();
  };
  return html`<${Dialog} title=${`Weight of ${row.node}`} onClose=${onClose}><form onSubmit=${submit}>
    <${Input} label="Weight" type="number" min="0" max="1000" step="any" value=${weight} onChange=${setWeight} hint=${`Its share of replicas. Empty: ${row.announced_weight}, as the node is set.`} />
    <${Trouble} problem=${problem} />
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${busy}>Set</button></div>
  </form><//>`;
}
