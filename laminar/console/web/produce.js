// One record, appended by hand.

import { html, useState } from "./preact-htm.js";
import { newKey, send } from "./api.js";
import { Choice, Command, Field, Input, Trouble, href, useAction } from "./parts.js";
import { number } from "./format.js";

const ENVELOPE = "application/vnd.laminar.records+json";

function envelope({ kind, value, key, tag, trace, headers, delay }) {
  const record = {};
  if (kind === "base64") record.value_base64 = value;
  else record.value = value;
  if (kind === "json") JSON.parse(value);
  if (key) record.key = key;
  if (tag) record.tag = tag;
  if (trace) record.trace_id = trace;
  if (delay) record.delay_ms = Math.round(Number(delay) * 1000);
  const given = headers.split("\n").filter((line) => line.trim());
  if (given.length) {
    record.headers = Object.fromEntries(given.map((line) => {
      const at = line.indexOf(":");
      if (at < 1) throw new Error(`a header is NAME: VALUE, not ${line}`);
      return [line.slice(0, at).trim(), line.slice(at + 1).trim()];
    }));
  }
  return { records: [record] };
}

export function Produce({ topic }) {
  // The same key until it is known what became of the record: sent again, it is appended once.
  const [name, setName] = useState(newKey);
  const [form, setForm] = useState({ kind: "text", value: "", key: "", tag: "", trace: "", headers: "", delay: "", partition: "" });
  const [sent, setSent] = useState("");
  const [receipt, setReceipt] = useState(null);
  const [run, busy, problem] = useAction(async () => {
    setReceipt(null);
    setSent(name);
    const body = JSON.stringify(envelope(form));
    const options = { body, key: name, headers: { "Content-Type": ENVELOPE } };
    const done = form.partition === ""
      ? await send("POST", "/v1/topics/{topic}/records", { topic }, options)
      : await send("POST", "/v1/topics/{topic}/partitions/{partition}/records", { topic, partition: form.partition }, options);
    setReceipt(done);
    setName(newKey());
  });
  const set = (field) => (value) => {
    setForm({ ...form, [field]: value });
    setName(newKey()); // another record is another request
  };
  const isUnknown = problem && problem.status !== undefined && problem.body?.outcome !== "not_applied" && name === sent;
  const submit = (event) => {
    event.preventDefault();
    run();
  };
  const placed = receipt?.placed?.[0];
  return html`<form class="wide" onSubmit=${submit}>
    <div class="bar">
      <${Choice} label="Value is" value=${form.kind} onChange=${set("kind")} options=${[["text", "text"], ["json", "JSON"], ["base64", "bytes, as base64"]]} />
      <${Input} label="Key" value=${form.key} onChange=${set("key")} />
      <${Input} label="Partition" type="number" min="0" value=${form.partition} onChange=${set("partition")} hint="Empty: by key." />
      <${Input} label="Tag" value=${form.tag} onChange=${set("tag")} />
      <${Input} label="Trace id" value=${form.trace} onChange=${set("trace")} hint="32 hexadecimal digits" />
      <${Input} label="Delay, in s" type="number" min="0" step="any" value=${form.delay} onChange=${set("delay")} />
    </div>
    <${Field} label="Value"><textarea rows="8" spellcheck=${false} value=${form.value} onInput=${(event) => set("value")(event.target.value)}></textarea><//>
    <${Field} label="Headers" hint="NAME: VALUE, one a line"><textarea rows="3" spellcheck=${false} value=${form.headers} onInput=${(event) => set("headers")(event.target.value)}></textarea><//>
    <${Trouble} problem=${problem} />
    ${isUnknown && html`<p role="status">It is not known whether the record was appended. Sent again unchanged, it is there once.</p>`}
    ${receipt && html`<p role="status">${placed
      ? html`Appended at <a href=${href("topics", topic, "partitions", placed.partition, "records", placed.offset)}>partition ${placed.partition}, offset ${number(placed.offset)}</a>, on ${receipt.durable.replicas} replicas.`
      : html`Scheduled: ${(receipt.scheduled || []).join(", ")}.`}</p>`}
    <div class="buttons start"><button type="submit" class="primary" disabled=${busy}>${isUnknown ? "Send again" : "Append"}</button></div>
    <p class="quiet">Many at once:</p><${Command} text=${`laminar produce ${topic} FILE`} />
  </form>`;
}
