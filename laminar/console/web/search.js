// Where records come from: the search of a topic, a step at a time; or, of a node that has none, plain fetches.
//
// Both are the same to a page: `steps(topic, form)` yields what one request found and how far all have looked.

import { either, get, lacks, send } from "./api.js";

const MOST_PARTITIONS = 16;
const FETCH_BYTES = 1 << 20;

/** The body of a search that a form asks for. */
export function searchOf(form) {
  const where = {};
  if (form.key) where.key = form.key;
  if (form.contains) where.contains = form.contains;
  if (form.tag) where.tag = form.tag;
  if (form.trace) where.trace_id = form.trace;
  if (form.header) {
    const [name, ...value] = form.header.split("=");
    where.headers = { [name.trim()]: value.join("=").trim() };
  }
  if (form.path) where.json = { path: form.path, equals: jsonOf(form.equals) };
  const body = { where, order: form.order, limit: form.limit };
  if (form.partition !== "") body.partitions = [Number(form.partition)];
  if (form.from) body.from = placeOf(form.from, form.partition);
  if (form.to) body.to = placeOf(form.to, form.partition);
  return body;
}

function jsonOf(text) {
  try {
    const value = JSON.parse(text);
    return value === null || typeof value !== "object" ? value : text;
  } catch {
    return text;
  }
}

/** A place as people write it: a word, a time, or an offset of the one partition. */
function placeOf(text, partition) {
  const place = text.trim();
  if (!/^\d{1,16}$/.test(place)) return /^\d{4}-\d\d-\d\d$/.test(place) ? `${place}T00:00:00Z` : place;
  if (partition === "") throw new Error("an offset needs a partition: give its number, too");
  return { [partition]: Number(place) };
}

/** What is known of a search between its steps: with it the search goes on, also after a step that failed. */
export function memory() {
  return { after: null, left: null, total: { records: 0, bytes: 0, byIndex: 0, left: null, notSearched: [] } };
}

export async function* steps(topic, form, { valueBytes = 4096, known = memory() } = {}) {
  const { total } = known;
  const body = { ...searchOf(form), value_bytes: valueBytes };
  do {
    const json = known.after ? { ...body, after: known.after } : body;
    const step = await either("search", () => send("POST", "/v1/topics/{topic}/search", { topic }, { json }), () => null);
    if (step === null) {
      yield* fetched(topic, form, known);
      return;
    }
    total.records += step.searched.records;
    total.bytes += step.searched.bytes;
    total.byIndex += step.searched.segments_by_index;
    total.left = step.left;
    total.notSearched.push(...step.not_searched);
    known.after = step.after;
    yield { records: step.records, total, isDone: known.after === null };
  } while (known.after !== null);
}

const FOLLOW_WAIT_MS = 20_000;
const FOLLOW_LIMIT = 500;
const FOLLOW_PAUSE_MS = 500;

/**
 * What is appended from now on, or from the form's `from`, without end: each answer comes with the first records.
 *
 * It waits while the page is hidden; with `known` it goes on where it was, so nothing is left out.
 */
export async function* follow(topic, form, { known, signal }) {
  const { total } = known;
  const body = { ...searchOf({ ...form, to: "", from: form.from || "latest" }), follow: true, wait_ms: FOLLOW_WAIT_MS, limit: FOLLOW_LIMIT, value_bytes: 4096 };
  delete body.order;
  for (;;) {
    await shown(signal);
    const json = known.after ? { ...body, after: known.after } : body;
    const step = await send("POST", "/v1/topics/{topic}/search", { topic }, { json, signal });
    total.records += step.searched.records;
    total.notSearched.push(...step.not_searched);
    known.after = step.after;
    yield { records: step.records, total };
    if (step.records.length > 0) await new Promise((done) => setTimeout(done, FOLLOW_PAUSE_MS));
  }
}

/** Wait until the page is visible, or the wait is called off. */
function shown(signal) {
  if (!document.hidden || signal.aborted) return Promise.resolve();
  return new Promise((done) => {
    const end = () => {
      document.removeEventListener("visibilitychange", end);
      signal.removeEventListener("abort", end);
      done();
    };
    document.addEventListener("visibilitychange", end);
    signal.addEventListener("abort", end);
  });
}

export const isPlain = () => lacks("search");

async function* fetched(topic, form, known) {
  const { total } = known;
  known.left ||= await ranges(topic, form, total);
  const { left } = known;
  const newest = form.order === "newest";
  const share = Math.max(1, Math.ceil(form.limit / Math.max(1, left.length)));
  const remaining = () => left.reduce((sum, each) => sum + Math.max(0, each.to - each.from), 0);
  do {
    const found = [];
    const moves = [];
    for (const each of left.filter(({ from, to }) => from < to)) {
      const first = newest ? Math.max(each.from, each.to - share) : each.from;
      const end = newest ? each.to : Math.min(each.to, first + share);
      try {
        const rows = await range(topic, each.partition, first, end, form.tag);
        found.push(...(newest ? rows.reverse() : rows));
        moves.push([each, first, end, null]);
      } catch (problem) {
        if (!problem.status) throw problem; // no answer: nothing of this step counts, and it can be repeated
        moves.push([each, first, end, problem.message]);
      }
    }
    for (const [each, first, end, why] of moves) {
      if (why === null) total.records += end - first;
      else total.notSearched.push({ partition: each.partition, from: first, to: end, why });
      if (newest) each.to = first;
      else each.from = end;
    }
    const order = (a, b) => (a.timestamp < b.timestamp ? -1 : a.timestamp > b.timestamp ? 1 : 0);
    found.sort((a, b) => (newest ? order(b, a) : order(a, b)));
    total.left = { records: remaining(), partitions: left.filter((each) => each.from < each.to).length };
    yield { records: found, total, isDone: remaining() === 0 };
  } while (remaining() > 0);
}

/** By partition the offsets that a form asks for; what is left out goes to `total.notSearched`. */
async function ranges(topic, form, total) {
  const { partitions } = await get("/v1/topics/{topic}/partitions", { topic });
  const wanted = partitions.filter((each) => form.partition === "" || each.partition === Number(form.partition));
  if (form.partition !== "" && wanted.length === 0) throw new Error(`the topic has no partition ${form.partition}`);
  const isOffset = (place) => /^\d{1,16}$/.test(place.trim());
  const place = async (each, text, otherwise) => {
    if (!text || text === "earliest" || text === "latest") return text === "earliest" ? each.start_offset : text === "latest" ? each.end_offset : otherwise;
    if (isOffset(text)) return placeOf(text, form.partition)[form.partition];
    const at = placeOf(text, form.partition);
    return (await get("/v1/topics/{topic}/partitions/{partition}/offsets", { topic, partition: each.partition }, { at })).offset;
  };
  const found = [];
  for (const [index, each] of wanted.entries()) {
    const gap = { partition: each.partition, from: each.start_offset ?? 0, to: each.end_offset ?? 0 };
    if (index >= MOST_PARTITIONS) total.notSearched.push({ ...gap, why: `only ${MOST_PARTITIONS} partitions are fetched: name one` });
    else if (each.end_offset === null || each.start_offset === null) total.notSearched.push({ ...gap, why: "it has no leader" });
    else {
      const from = Math.max(each.start_offset, await place(each, form.from, each.start_offset));
      found.push({ partition: each.partition, from, to: Math.min(each.end_offset, await place(each, form.to, each.end_offset)) });
    }
  }
  return found;
}

async function range(topic, partition, first, end, tag) {
  const rows = [];
  for (let at = first; at < end;) {
    const page = await get("/v1/topics/{topic}/partitions/{partition}/records", { topic, partition },
      { offset: at, to: end, limit: end - at, max_bytes: FETCH_BYTES, tag }, { headers: { Accept: "application/json" } });
    rows.push(...page.records.map((record) => asFound(record, partition)));
    if (page.next_offset <= at) break;
    at = page.next_offset;
  }
  return rows;
}

/** A record of a fetch, as a search would have found it. */
function asFound(record, partition) {
  const size = record.value_bytes ?? (record.value !== undefined ? new TextEncoder().encode(record.value).length : Math.floor(((record.value_base64 || "").replace(/=+$/, "").length * 3) / 4));
  return { ...record, partition, size, truncated: record.value_bytes !== undefined };
}
