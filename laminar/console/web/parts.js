// What all pages are made of: polls, tables, states, dialogs, forms.

import { html, useCallback, useEffect, useRef, useState } from "./preact-htm.js";
import { number } from "./format.js";

const POLL_MS = 5000;

/** An address in the console: `href("topics", name)` is `#/topics/NAME`. */
export function href(...parts) {
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;
}

export function go(...parts) {
  location.hash = href(...parts);
}

/**
 * Load something now, and again every five seconds while the page can be seen. One request at a time; what was
 * loaded last stays when a load fails. `everyMs` 0: once, and on `reload`.
 */
export function usePoll(load, dependencies, everyMs = POLL_MS) {
  const [state, setState] = useState({ data: null, problem: null });
  const again = useRef(() => {});
  useEffect(() => {
    let timer = 0;
    let ended = false;
    let busy = false;
    let wanted = false;
    const stop = new AbortController();
    setState({ data: null, problem: null });
    const run = async () => {
      clearTimeout(timer);
      if (busy) {
        wanted = true;
        return;
      }
      busy = true;
      try {
        const data = await load(stop.signal);
        if (!ended) setState({ data, problem: null });
      } catch (problem) {
        if (!ended) setState((before) => ({ data: before.data, problem }));
      }
      busy = false;
      if (ended) return;
      if (wanted) {
        wanted = false;
        run();
      } else if (everyMs && !document.hidden) timer = setTimeout(run, everyMs);
    };
    const seen = () => {
      clearTimeout(timer);
      if (everyMs && !document.hidden) run();
    };
    again.current = run;
    document.addEventListener("visibilitychange", seen);
    run();
    return () => {
      ended = true;
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, dependencies);
  return { ...state, reload: useCallback(() => again.current(), []) };
}

/** Run an action once at a time: `[run, busy, problem, clear]`. */
export function useAction(act) {
  const [state, setState] = useState({ busy: false, problem: null });
  const run = async (...given) => {
    if (state.busy) return;
    setState({ busy: true, problem: null });
    try {
      await act(...given);
      setState({ busy: false, problem: null });
    } catch (problem) {
      setState({ busy: false, problem });
    }
  };
  return [run, state.busy, state.problem, () => setState({ busy: false, problem: null })];
}

/** The heading of a page, which is what a keyboard comes to first, and what a reader says. */
export function Head({ title, crumbs = [], children }) {
  const heading = useRef(null);
  const place = [...crumbs.map(([name]) => name), title].join(" / ");
  useEffect(() => {
    document.title = `${place} – Laminar`;
    heading.current?.focus({ preventScroll: true });
  }, [place]);
  return html`<header class="head">
    <div>
      ${crumbs.length > 0 && html`<nav class="crumbs" aria-label="Above this page">${crumbs.map(([name, to]) => html`<a href=${to}>${name}</a><span aria-hidden="true"> / </span>`)}</nav>`}
      <h1 tabindex="-1" ref=${heading}>${title}</h1>
    </div>
    <div class="actions">${children}</div>
  </header>`;
}

export function Trouble({ problem }) {
  if (!problem) return null;
  return html`<div class="trouble" role="alert">
    <b>${problem.code || (problem.status === 0 ? "no answer" : "error")}</b> ${problem.message}
    ${problem.hint && html`<div class="quiet">${problem.hint}</div>`}
  </div>`;
}

/** What a poll has: its problem, and the rest once there is data. */
export function Loaded({ state, children }) {
  return html`<div>
    <${Trouble} problem=${state.problem} />
    ${state.problem && state.data && html`<p class="quiet">What follows is from before.</p>`}
    ${state.data ? children(state.data) : !state.problem && html`<p class="quiet" role="status">Loading …</p>`}
  </div>`;
}

const SIGNS = { good: "●", warning: "▲", bad: "■", idle: "○" };

export function Status({ kind, children }) {
  return html`<span class="status ${kind}"><span aria-hidden="true">${SIGNS[kind]}\u00a0</span>${children}</span>`;
}

/**
 * `columns`: {title, cell(row), is: "number"?, by(row)?}. With `by` a heading sorts. `below(row)` is shown across.
 *
 * Each component here and in the pages is one element: Preact would lose the place of one that is several.
 */
export function Table({ caption, columns, rows, keyOf, most = 500, below }) {
  const [sort, setSort] = useState(null);
  let shown = rows;
  if (sort) {
    const by = columns[sort.column].by;
    const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (sort.down ? -1 : 1);
    shown = [...rows].sort((a, b) => order(by(a), by(b)));
  }
  const heading = (column, index) => {
    const direction = sort?.column === index ? (sort.down ? "descending" : "ascending") : undefined;
    const turn = () => setSort(direction === "descending" ? { column: index, down: false } : { column: index, down: true });
    return html`<th scope="col" class=${column.is || ""} aria-sort=${direction}>
      ${column.by ? html`<button type="button" class="sort" onClick=${turn}>${column.title}<span aria-hidden="true">${direction ? (sort.down ? " ▾" : " ▴") : ""}</span></button>` : column.title}
    </th>`;
  };
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="hidden">${caption}</caption>
      <thead><tr>${columns.map(heading)}</tr></thead>
      <tbody>${shown.slice(0, most).flatMap((row) => [
        html`<tr key=${keyOf(row)}>${columns.map((column, index) => (index === 0
          ? html`<th scope="row" class=${column.is || ""}>${column.cell(row)}</th>`
          : html`<td class=${column.is || ""}>${column.cell(row)}</td>`))}</tr>`,
        ...(below?.(row) ? [html`<tr class="below" key=${`${keyOf(row)} below`}><td colspan=${columns.length}>${below(row)}</td></tr>`] : []),
      ])}
      </tbody>
    </table>
    ${rows.length > most && html`<p class="quiet">${number(most)} of ${number(rows.length)} are shown.</p>`}
  </div>`;
}

/** Nothing is here yet, and the command that makes the first. */
export function Empty({ children, command }) {
  return html`<div class="empty"><p>${children}</p>${command && html`<${Command} text=${command} />`}</div>`;
}

export function Command({ text }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
  };
  return html`<div class="command"><code>${text}</code>
    ${navigator.clipboard && html`<button type="button" onClick=${copy}>${copied ? "Copied" : "Copy"}</button>`}</div>`;
}

/** A modal dialog: the browser keeps the keyboard in it, closes it with Escape, and gives the focus back. */
export function Dialog({ title, onClose, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-label=${title}>
    <h2>${title}</h2>${children}
  </dialog>`;
}

/** Ask before a change. With `name` it has to be typed; `children` say what is lost. */
export function Confirm({ title, name, verb, act, onClose, onDone, children }) {
  const [typed, setTyped] = useState("");
  const [run, busy, problem] = useAction(async () => {
    await act();
    (onDone || onClose)();
  });
  const submit = (event) => {
    event.preventDefault();
    if (!name || typed === name) run();
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <form onSubmit=${submit}>
      ${children}
      ${name && html`<${Field} label=${`Type ${name} to go on`}><input value=${typed} autocomplete="off" spellcheck=${false} onInput=${(event) => setTyped(event.target.value)} /><//>`}
      <${Trouble} problem=${problem} />
      <div class="buttons">
        <button type="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class=${name ? "danger" : "primary"} disabled=${busy || (name && typed !== name)}>${verb}</button>
      </div>
    </form>
  <//>`;
}

export function Field({ label, hint, children }) {
  return html`<label class="field"><span>${label}</span>${children}${hint && html`<small>${hint}</small>`}</label>`;
}

export function Choice({ label, value, options, onChange }) {
  return html`<${Field} label=${label}><select value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${options.map(([option, name]) => html`<option value=${option} selected=${option === value}>${name}</option>`)}
  </select><//>`;
}

export function Input({ label, hint, value, onChange, ...rest }) {
  return html`<${Field} label=${label} hint=${hint}><input value=${value} onInput=${(event) => onChange(event.target.value)} autocomplete="off" spellcheck=${false} ...${rest} /><//>`;
}

export function Tabs({ label, tabs, current }) {
  return html`<nav class="tabs" aria-label=${label}>${tabs.map(([name, to, title]) => html`
    <a href=${to} aria-current=${name === current ? "page" : undefined}>${title}</a>`)}</nav>`;
}

/** Figures in a row: `[name, value, note]`. */
export function Figures({ figures }) {
  return html`<dl class="figures">${figures.map(([name, value, note]) => html`
    <div><dt>${name}</dt><dd>${value}${note && html`<small>${note}</small>`}</dd></div>`)}</dl>`;
}
