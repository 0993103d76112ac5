// How the cluster is, and what to do about it.

import { html, useRef, useState } from "./preact-htm.js";
import { either, get, Problem } from "./api.js";
import { bytes, number, time } from "./format.js";
import { Command, Empty, Figures, Head, Loaded, Status, Table, href, usePoll } from "./parts.js";
import { isEmpty, listTopics } from "./topics.js";

const FIRST_OF_A_KIND = 10;
const KINDS = { well: "good", warning: "warning", critical: "bad" };

/** The health of the cluster, by what an older node tells where this one lacks `/v1/health`. */
function health(signal) {
  return either("health", () => get("/v1/health", {}, {}, { signal }), () => olderHealth(signal));
}

async function olderHealth(signal) {
  const { nodes } = await get("/v1/nodes", {}, {}, { signal });
  const silent = nodes.filter((node) => !node.alive).map((node) => node.node);
  const problems = silent.map((node) => ({ severity: "warning", subject: node, text: "The node does not answer.", do: [] }));
  let ready;
  try {
    ready = await get("/readyz", {}, {}, { signal });
  } catch (problem) {
    if (!(problem instanceof Problem) || problem.status !== 503 || !problem.body.reasons) throw problem;
    ready = { node: problem.body.node, warnings: [], reasons: problem.body.reasons };
  }
  for (const text of ready.reasons || []) problems.push({ severity: "critical", subject: ready.node, text, do: [] });
  for (const text of ready.warnings) problems.push({ severity: "warning", subject: ready.node, text, do: [] });
  const worst = problems.some((problem) => problem.severity === "critical") ? "critical" : problems.length ? "warning" : "well";
  return { status: worst, problems, silent, nodes: nodes.map((node) => ({ node: node.node, answers: node.alive })), left_out: {} };
}

const leftOut = (found) => Object.entries(found.left_out || {});

/** How many problems there are, also those that the node only counts. */
const problemsOf = (found) => leftOut(found).reduce((sum, [, count]) => sum + count, found.problems.length);

/** The first problems of each kind, as a trouble of many topics is the same for all; the others on request. */
function Problems({ found }) {
  const [isAll, setAll] = useState(false);
  const counts = new Map();
  const first = found.problems.filter(({ code }) => {
    counts.set(code, (counts.get(code) || 0) + 1);
    return counts.get(code) <= FIRST_OF_A_KIND;
  });
  const hidden = found.problems.length - first.length;
  return html`<div>
    ${found.problems.length > 0 && html`<${Table} caption="Problems" rows=${isAll ? found.problems : first} keyOf=${(row) => `${row.code}/${row.subject}/${row.text}`} columns=${[
      { title: "About", cell: (row) => row.subject },
      { title: "State", cell: (row) => html`<${Status} kind=${KINDS[row.severity] || "warning"}>${row.severity}<//>` },
      { title: "What", cell: (row) => row.text },
      { title: "Since", is: "when", cell: (row) => time(row.since) },
      { title: "What to do", cell: (row) => row.do.map((step) => html`<div>${step.text}${step.command && html`<${Command} text=${step.command} />`}</div>`) },
    ]} />`}
    ${hidden > 0 && html`<div class="bar"><button type="button" aria-expanded=${isAll} onClick=${() => setAll(!isAll)}>${isAll ? "Show fewer" : `Show ${number(hidden)} more`}</button></div>`}
    ${leftOut(found).map(([code, count]) => html`<p class="quiet">${number(count)} more problems of the kind ${code} are not listed.</p>`)}
  </div>`;
}

export function Overview() {
  const first = useRef(null);
  const state = usePoll(async (signal) => {
    const [found, topics, cluster] = await Promise.all([
      health(signal), listTopics({ sort: "appended_bytes", limit: 10 }, signal), get("/v1/cluster", {}, {}, { signal }),
    ]);
    const now = Date.now();
    const sums = new Map(topics.topics.filter((topic) => topic.stats).map((topic) => [topic.topic, topic.stats]));
    if (!first.current) first.current = { at: now, sums };
    return { found, topics, cluster, seconds: (now - first.current.at) / 1000 };
  }, []);
  const rate = (topic, seconds) => {
    const before = first.current?.sums.get(topic.topic);
    if (!before || !topic.stats || seconds < 1) return null;
    return Math.max(0, topic.stats.appended_records - before.appended_records) / seconds;
  };
  return html`<div><${Head} title="Overview" />
    <${Loaded} state=${state}>${({ found, topics, cluster, seconds }) => html`
      <${Figures} figures=${[
        ["Cluster", html`<${Status} kind=${KINDS[found.status]}>${found.status}<//>`, found.status === "well" ? "no problems" : `${number(problemsOf(found))} problems`],
        ["Nodes", number(found.nodes.length), found.silent.length ? `no answer: ${found.silent.join(", ")}` : "all answer"],
        ["Topics", found.topics === undefined ? `${number(topics.topics.length)}${topics.next ? " and more" : ""}` : number(found.topics)],
        ["Partitions", number(found.partitions)],
        ["Leader of the catalog", cluster.catalog_leader || "none"],
      ]} />
      ${cluster.insecure && html`<p><${Status} kind="warning">This node can be reached from other machines without TLS or without tokens.<//></p>`}
      <${Problems} found=${found} />
      <h2>${topics.hasStats ? "Busiest topics" : "Topics"}</h2>
      ${isEmpty(topics) && html`<${Empty} command="laminar topic create orders --partitions 4">There is no topic yet. Make the first:<//>`}
      ${topics.topics.length > 0 && html`<${Table} caption="Topics" rows=${topics.topics} keyOf=${(row) => row.topic} columns=${[
          { title: "Topic", cell: (row) => html`<a href=${href("topics", row.topic)}>${row.topic}</a>` },
          { title: "Partitions", is: "number", cell: (row) => number(row.partitions) },
          ...(topics.hasStats ? [
            { title: "Records", is: "number", cell: (row) => number(row.stats?.records) },
            { title: "Size", is: "number", cell: (row) => bytes(row.stats?.bytes) },
            { title: "Records/s since this page was opened", is: "number", cell: (row) => { const found = rate(row, seconds); return found === null ? "–" : found.toFixed(1); } },
          ] : []),
        ]} />`}
    `}<//></div>`;
}
