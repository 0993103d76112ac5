// Requests to the node that this page came from, and who makes them.
//
// A token is typed in and kept for this tab alone. It goes out as a header that no browser adds by itself, so a page
// of another site cannot use it. It is forgotten when a node refuses it, and after half an hour without a person.

const ROOT = new URL("../", document.baseURI);
const TOKEN = "laminar-token";
const SEEN = "laminar-seen";
export const IDLE_MS = 30 * 60_000;

/** An answer of 400 and above, or none: `status` is 0 when the node did not answer. */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `HTTP ${status}`);
    this.status = status;
    this.code = body.code || "";
    this.hint = body.hint || "";
    this.body = body;
  }

  /** Whether the node has no such route: it is older than this page expects. */
  get isNoRoute() {
    return this.code === "not_found" || this.code === "method_not_allowed";
  }
}

const listeners = new Set();
let token = "";

/** Have `listener(reason)` called when the token is forgotten. */
export function onSignOut(listener) {
  listeners.add(listener);
}

export function signIn(text) {
  token = text.trim();
  sessionStorage.setItem(TOKEN, token);
  touch();
}

export function signOut(reason = "") {
  token = "";
  sessionStorage.removeItem(TOKEN);
  for (const listener of listeners) listener(reason);
}

export function isSignedIn() {
  return token !== "";
}

/** Note that a person is here. */
export function touch() {
  sessionStorage.setItem(SEEN, String(Date.now()));
}

/** The time until the token is forgotten, in ms. */
export function leftMs() {
  return Number(sessionStorage.getItem(SEEN) || 0) + IDLE_MS - Date.now();
}

token = leftMs() > 0 ? sessionStorage.getItem(TOKEN) || "" : "";
if (!token) sessionStorage.removeItem(TOKEN);

/** A name for a request, which is carried out once however often it is sent. */
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function address(template, params, query) {
  const path = template.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(params[name]));
  const url = new URL(path.slice(1), ROOT);
  for (const [name, value] of Object.entries(query || {})) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

async function ask(method, template, params, { query, json, body, headers, signal } = {}) {
  const sent = { ...headers };
  if (token) sent.Authorization = `Bearer ${token}`;
  if (json !== undefined) {
    sent["Content-Type"] = "application/json";
    body = JSON.stringify(json);
  }
  const usedToken = token;
  let answer;
  try {
    answer = await fetch(address(template, params, query), {
      method, headers: sent, body, signal, credentials: "same-origin", cache: "no-store", redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { detail: "The node does not answer." });
  }
  if (answer.status < 400) return answer;
  let document = {};
  try {
    document = await answer.json();
  } catch {
    document = { detail: `HTTP ${answer.status} ${answer.statusText}` };
  }
  const problem = new Problem(answer.status, document);
  if (answer.status === 401 && usedToken === token) signOut(usedToken ? problem.message : "");
  throw problem;
}

/** Ask, and return the JSON document of the answer. */
export async function get(template, params = {}, query = {}, options = {}) {
  const answer = await ask("GET", template, params, { query, ...options });
  return answer.json();
}

/** Ask for a document and its ETag. */
export async function getTagged(template, params = {}) {
  const answer = await ask("GET", template, params);
  return { document: await answer.json(), etag: answer.headers.get("ETag") };
}

/** Ask for bytes. */
export async function getBytes(template, params = {}, options = {}) {
  const answer = await ask("GET", template, params, options);
  return new Uint8Array(await answer.arrayBuffer());
}

/** Change something; `ifMatch` is the ETag of what the person saw. Returns the document of the answer, if any. */
export async function send(method, template, params = {}, { ifMatch, key, ...options } = {}) {
  const headers = { ...options.headers };
  if (ifMatch !== undefined) headers["If-Match"] = ifMatch;
  if (key !== undefined) headers["Idempotency-Key"] = key;
  const answer = await ask(method, template, params, { ...options, headers });
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

// What nodes of this version lack, as far as an answer has said so.
const lacking = new Set();

/** Ask by `newer`; by `older` where the node does not know it. `knows(problem)`: whether a refusal means that. */
export async function either(name, newer, older, isLacking = (problem) => problem.isNoRoute) {
  if (!lacking.has(name)) {
    try {
      return await newer();
    } catch (problem) {
      if (!(problem instanceof Problem) || !isLacking(problem)) throw problem;
      lacking.add(name);
    }
  }
  return older();
}

export function lacks(name) {
  return lacking.has(name);
}

// -- Rights: they hide what would be refused, and nothing depends on them ------------------------------------

const GIVEN_BY = { describe: ["read", "write", "admin"], read: ["read", "admin"], write: ["write", "admin"], admin: ["admin"] };

/** Whether grants allow `what` on a name; the empty name stands for everything. */
export function allows(grants, what, name = "") {
  const isSystem = name.startsWith("_");
  const roles = GIVEN_BY[isSystem ? "admin" : what];
  const on = isSystem ? "" : name;
  return grants.some((grant) => roles.includes(grant.role) && on.startsWith(grant.prefix));
}
