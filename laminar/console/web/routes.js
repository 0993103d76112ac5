// Routes: which partition has which keys, and the changes of that.

import { html, useState } from "./preact-htm.js";
import { get, send } from "./api.js";
import { number, time } from "./format.js";
import { Choice, Confirm, Dialog, Input, Loaded, Status, Table, Trouble, useAction, usePoll } from "./parts.js";

const parts = (rows) => rows.map((row) => row.partition).join(", ");

export function RoutesTab({ topic, may }) {
  const state = usePoll((signal) => get("/v1/topics/{topic}/routes", { topic }, {}, { signal }), [topic]);
  const [changing, setChanging] = useState(false);
  const [cancelling, setCancelling] = useState(null);
  const close = () => {
    setChanging(false);
    setCancelling(null);
    state.reload();
  };
  const canChange = may("admin", topic) && !topic.startsWith("_");
  return html`<${Loaded} state=${state}>${(found) => {
    const route = found.routes[found.routes.length - 1];
    const share = (row) => `${((100 * (row.to - row.from)) / route.logical_partitions).toFixed(1)} %`;
    const { change } = found;
    return html`
      ${change && html`<div class="notice"><p><${Status} kind="warning">A change is ${change.state}<//>: partitions ${parts(change.inputs)} become ${parts(change.outputs)}, since ${time(change.begun)}.
        ${canChange && change.state === "preparing" && html` <button type="button" onClick=${() => setCancelling(change)}>Cancel it</button>`}</p></div>`}
      ${canChange && !change && html`<div class="bar"><button type="button" class="primary" onClick=${() => setChanging(true)}>Split, merge or move</button></div>`}
      <h2>Key ranges, version ${number(route.version)}</h2>
      <${Table} caption="Key ranges" rows=${route.ranges} keyOf=${(row) => row.from} columns=${[
        { title: "Logical partitions", cell: (row) => `${number(row.from)} to ${number(row.to - 1)}` },
        { title: "Share of the keys", is: "number", by: (row) => row.to - row.from, cell: share },
        { title: "Partition", is: "number", by: (row) => row.partition, cell: (row) => row.partition },
      ]} />
      <h2>Changes</h2>
      ${found.changes.length === 0 ? html`<p class="quiet">No change was made since the topic was created.</p>` : html`
      <${Table} caption="Changes" rows=${[...found.changes].reverse()} keyOf=${(row) => row.id} columns=${[
        { title: "Version", is: "number", cell: (row) => number(row.version) },
        { title: "From partitions", cell: (row) => parts(row.inputs) },
        { title: "To partitions", cell: (row) => parts(row.outputs) },
        { title: "Order", cell: (row) => row.order },
        { title: "State", cell: (row) => row.state },
        { title: "Begun", is: "when", cell: (row) => time(row.begun) },
      ]} />`}
      ${changing && html`<${Change} topic=${topic} route=${route} onClose=${close} />`}
      ${cancelling && html`<${Confirm} title="Cancel the change" verb="Cancel the change" onClose=${close}
        act=${() => send("DELETE", "/v1/topics/{topic}/routes/{version}", { topic, version: cancelling.version })}>
        <p>Partitions ${parts(cancelling.inputs)} stay as they are.</p><//>`}`;
  }}<//>`;
}

function Change({ topic, route, onClose }) {
  const [kind, setKind] = useState("split");
  const [inputs, setInputs] = useState("");
  const [into, setInto] = useState("2");
  const [run, busy, problem] = useAction(async () => {
    const numbers = inputs.split(/[\s,]+/).filter(Boolean).map(Number);
    if (numbers.some((each) => !Number.isInteger(each)) || !numbers.length) throw new Error("give numbers of partitions");
    if (kind === "merge" ? numbers.length < 2 : numbers.length !== 1) throw new Error(kind === "merge" ? "a merge is of two partitions or more" : `a ${kind} is of one partition`);
    const json = { after: route.version, inputs: numbers };
    if (kind === "split") json.into = Number(into);
    await send("POST", "/v1/topics/{topic}/routes", { topic }, { json });
    onClose();
  });
  const submit = (event) => {
    event.preventDefault();
    run();
  };
  return html`<${Dialog} title="Change the route" onClose=${onClose}><form onSubmit=${submit}>
    <${Choice} label="What" value=${kind} onChange=${setKind} options=${[["split", "split a partition"], ["merge", "merge neighbours"], ["move", "move to a new partition"]]} />
    <${Input} label=${kind === "merge" ? "Partitions" : "Partition"} value=${inputs} onChange=${setInputs} required hint=${`One of ${parts(route.ranges)}`} />
    ${kind === "split" && html`<${Input} label="Into parts" type="number" min="2" max="64" value=${into} onChange=${setInto} required />`}
    <p>The partition takes no more records; new ones follow it. The order of each key stays as the topic is set. A reader goes on by itself.</p>
    <${Trouble} problem=${problem} />
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${busy}>Begin</button></div>
  </form><//>`;
}
