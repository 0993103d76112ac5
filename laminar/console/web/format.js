// How values are written: numbers, sizes, times, bytes; and rows as files.

const WHOLE = new Intl.NumberFormat("en");

export const number = (value) => (value === null || value === undefined ? "–" : WHOLE.format(value));

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  for (const [unit, size] of [["d", 86_400_000], ["h", 3_600_000], ["min", 60_000], ["s", 1000]]) {
    if (ms >= 2 * size) return `${Math.floor(ms / size)} ${unit}`;
  }
  return `${Math.round(ms)} ms`;
}

/** A time of the API, which is UTC, as people read it. */
export const time = (text) => (text ? text.replace("T", "\u00a0").replace(/(\.\d+)?Z$/, (_, fraction) => `${(fraction || "").slice(0, 4)}Z`) : "–");

export function fromBase64(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

export function toBase64(data) {
  let text = "";
  for (let at = 0; at < data.length; at += 8192) text += String.fromCharCode(...data.subarray(at, at + 8192));
  return btoa(text);
}

/** The bytes of a record's value, as far as the answer has them. */
export function valueBytes(record) {
  if (record.value !== undefined) return new TextEncoder().encode(record.value);
  return record.value_base64 === undefined ? new Uint8Array() : fromBase64(record.value_base64);
}

export function hex(data, most = 4096) {
  const lines = [];
  for (let at = 0; at < Math.min(data.length, most); at += 16) {
    const row = Array.from(data.subarray(at, at + 16));
    const codes = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const text = row.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${codes.padEnd(47)}  ${text}`);
  }
  if (data.length > most) lines.push(`… ${number(data.length - most)} bytes more`);
  return lines.join("\n");
}

/** Text of bytes; null if they are none. */
export function text(data) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    return null;
  }
}

export function keyOf(record) {
  if (record.key !== undefined) return record.key;
  return record.key_base64 === undefined ? "" : `base64:${record.key_base64}`;
}

const COLUMNS = ["partition", "offset", "timestamp", "key", "tag", "trace_id", "headers", "value", "encoding", "truncated"];

/** A cell of CSV. A spreadsheet would calculate what begins so: it gets a quote, and stays text. */
export function cell(value) {
  let shown = value === undefined || value === null ? "" : String(value);
  if (typeof value !== "number" && /^[=+\-@\t\r]/.test(shown)) shown = `'${shown}`;
  return /[",\r\n]/.test(shown) ? `"${shown.replaceAll('"', '""')}"` : shown;
}

export function csvHead() {
  return `${COLUMNS.join(",")}\r\n`;
}

export function csvRow(record) {
  const headers = { ...record.headers, ...record.headers_base64 };
  const row = {
    ...record,
    key: keyOf(record),
    headers: Object.keys(headers).length ? JSON.stringify(headers) : "",
    value: record.value ?? record.value_base64 ?? "",
    encoding: record.value_base64 === undefined ? "text" : "base64",
    truncated: record.truncated ? "yes" : "",
  };
  return `${COLUMNS.map((name) => cell(row[name])).join(",")}\r\n`;
}

/** Have the browser keep parts as a file. */
export function save(name, type, parts) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
