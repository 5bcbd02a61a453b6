// Ask the service: with the token of this tab, and nothing else than this server.
const KEY = "tandem-token";

/** The token comes in the fragment of the address that the command prints, and stays in this tab only. */
export function takeToken() {
  const found = /[#&]token=([0-9a-zA-Z_.-]+)/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(KEY, found[1]);
  history.replaceState(null, "", location.pathname + "#/");
}
export const keepToken = (/** @type {string} */ token) => sessionStorage.setItem(KEY, token.trim());
const headers = () => ({ Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}`, Accept: "application/json" });

export class Refused extends Error {
  /** @param {number} status @param {string} text */
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** A path of the views, of the server's own API where it begins with `/`, of OpenAI's, or of the index of packages. */
const url = (/** @type {string} */ path) => (/^\/(v1|simple)\//.test(path) ? path.slice(1) : path.startsWith("/") ? `api${path}` : `api/views${path ? `/${path}` : ""}`);

/** @param {string} path @param {AbortSignal} [signal] */
export async function read(path, signal) {
  return ask(path, { headers: headers(), signal, cache: "no-store" });
}

const MOST_PAGES = 20;

/** Read a list whose end the server gives in pages. @param {string} path @param {AbortSignal} [signal] */
export async function readAll(path, signal) {
  const found = await read(path, signal);
  for (let pages = 1; found.next && pages < MOST_PAGES; pages++) {
    const more = await read(`${path}${path.includes("?") ? "&" : "?"}after=${encodeURIComponent(found.next)}`, signal);
    found.items.push(...more.items);
    found.next = more.next;
  }
  return found;
}

/** Ask for a change, once: the key lets the server recognise a repeated request.
 * @param {string} path @param {any} body */
export async function change(path, body) {
  const more = { "Content-Type": "application/json", "Idempotency-Key": crypto.getRandomValues(new Uint32Array(4)).join("-") };
  return ask(path, { method: "POST", headers: { ...headers(), ...more }, body: JSON.stringify(body) });
}

/** Ask a model, and tell its answer as it comes. Returns which revision answered, and why it ended.
 * @param {any} body @param {AbortSignal} signal @param {(text: string, tokens: [string, number][]) => void} tell */
export async function converse(body, signal, tell) {
  const more = { "Content-Type": "application/json", Accept: "text/event-stream" };
  const asked = { ...body, stream: true, logprobs: true };
  const answer = await fetched("/v1/chat/completions", { method: "POST", headers: { ...headers(), ...more }, body: JSON.stringify(asked), signal });
  let finish = "";
  for await (const { data } of blocks(answer)) {
    if (!data || data === "[DONE]") continue;
    const piece = JSON.parse(data);
    if (piece.error) throw new Refused(0, piece.error.message);
    const [choice] = piece.choices ?? [];
    finish = choice?.finish_reason ?? finish;
    const text = choice?.delta?.content ?? "";
    const tokens = choice?.logprobs?.content ?? [];
    if (text || tokens.length) tell(text, tokens.length ? tokens.map((each) => [each.token, each.logprob]) : [[text, 0]]);
  }
  return { revision: answer.headers.get("X-Tandem-Revision") ?? "", finish };
}

/** The events of a stream, each as its fields. */
async function* blocks(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n\n");
    rest = whole.pop() ?? "";
    for (const block of whole) yield Object.fromEntries(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
  }
}

async function ask(path, options) {
  return (await fetched(path, options)).json();
}

async function fetched(path, options) {
  let answer;
  try {
    answer = await fetch(url(path), options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Refused(0, "The server does not answer. The page asks again.");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, told?.error?.message ?? told?.detail ?? `The server answered with ${answer.status}.`);
}

/** Until the tab is seen. A browser has six connections to a server for all its tabs, and a hidden one needs none. */
const seen = () => new Promise((done) => (document.hidden ? document.addEventListener("visibilitychange", done, { once: true }) : done(null)));

/** Follow a stream of events for ever, from where it broke off, while the tab is seen. Returns a function that ends it.
 * @param {string} path @param {(kind: string, data: any) => void} tell @param {(on: boolean) => void} connected */
export function follow(path, tell, connected) {
  const ending = new AbortController();
  let last = "";
  const listen = async () => {
    const more = last ? { "Last-Event-ID": last } : {};
    const pause = new AbortController();
    const hide = () => document.hidden && pause.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      const signal = AbortSignal.any([ending.signal, pause.signal]);
      const answer = await fetch(url(path), { headers: { ...headers(), ...more, Accept: "text/event-stream" }, signal });
      if (!answer.ok || !answer.body) throw new Refused(answer.status, "no stream");
      connected(true);
      for await (const fields of blocks(answer)) {
        if (fields.id) last = fields.id;
        if (fields.event) tell(fields.event, JSON.parse(fields.data));
      }
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
  };
  (async () => {
    while (!ending.signal.aborted) {
      try {
        await seen();
        await listen();
      } catch {
        // asked again below
      }
      if (ending.signal.aborted) return;
      if (document.hidden) {
        await seen();
        continue;
      }
      connected(false);
      await new Promise((done) => setTimeout(done, 1000));
    }
  })();
  return () => ending.abort();
}

export const path = (/** @type {string} */ name, more = "") => `runs/${encodeURIComponent(name)}${more}`;
export const number = (/** @type {number | null | undefined} */ value, digits = 4) => {
  if (value == null) return "–";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
};
export const when = (/** @type {number} */ ms) => (ms ? new Date(ms).toISOString().slice(0, 16).replace("T", " ") : "–");
export const usd = (/** @type {number} */ value) => `${value.toFixed(2)} USD`;
export const bytes = (/** @type {number} */ count) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return `${unit === "B" ? count : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} TiB`;
};
