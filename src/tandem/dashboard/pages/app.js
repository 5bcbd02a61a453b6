// The pages and how one leads to another. An address after `#` names a page, so that each can be kept and sent.
import { html, render, useEffect, useState } from "./vendor/preact.js";
import { keepToken, read, takeToken } from "./data.js";
import { Compare } from "./compare.js";
import { Run } from "./run.js";
import { Runs } from "./runs.js";
import { PAGES, ServerPage } from "./server.js";

const PLACES = { compare: "Compare" };

takeToken();

const place = () => {
  const [path, query] = location.hash.slice(1).split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query ?? "") };
};

/** Change one part of the address without a new entry in the history. */
export function keepInAddress(/** @type {Record<string, string>} */ changes) {
  const { query } = place();
  for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name);
  const path = location.hash.slice(1).split("?")[0] || "/";
  history.replaceState(null, "", `#${path}${query.size ? `?${query}` : ""}`);
}

function AskToken({ then }) {
  const [token, setToken] = useState("");
  const [provider, setProvider] = useState("");
  useEffect(() => {
    read("/login").then((told) => setProvider(told.issuer), () => {});
  }, []);
  const enter = async (event) => {
    event.preventDefault();
    keepToken(token);
    then();
  };
  return html`<main class="shown" id="content"><form class="card" onSubmit=${enter}>
    <h1>Token</h1>
    <p class="quiet">The command <code>tandem dashboard</code> printed an address with it. A control server takes a key that may read runs: <code>tandem control key new</code>. It is kept while this tab is open.</p>
    <div class="tools"><label class="sr" for="token">Token</label>
      <input id="token" type="password" autocomplete="off" value=${token} onInput=${(e) => setToken(e.target.value)} />
      <button class="main">Open</button></div>
    ${provider && html`<p><a href="login">Sign in with ${provider}</a></p>`}</form></main>`;
}

function App() {
  const [at, setAt] = useState(place());
  const [allowed, setAllowed] = useState(true);
  const [live, setLive] = useState(true);
  const [asked, setAsked] = useState(0);
  useEffect(() => {
    const moved = () => setAt(place());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const [server, setServer] = useState({ pages: [], may: [] });
  useEffect(() => {
    read("").then(setServer, () => {});
  }, [asked]);
  useEffect(() => {
    document.title = at.parts[0] === "run" ? `${at.parts[1]} · tandem` : `${PLACES[at.parts[0]] ?? PAGES[at.parts[0]]?.title ?? "Runs"} · tandem`;
  }, [at]);
  const tell = {
    live: setLive,
    refused: (error) => (error.status === 401 ? setAllowed(false) : setLive(false)),
  };
  const links = [["", "Runs"], ...server.pages.map((page) => [page, PAGES[page].title])];
  const here = at.parts[0] in PAGES ? at.parts[0] : "";
  const deeper = at.parts[0] === "run" ? at.parts[1] : PLACES[at.parts[0]];
  const page = !allowed
    ? html`<${AskToken} then=${() => (setAllowed(true), setAsked(asked + 1))} />`
    : at.parts[0] === "run"
      ? html`<${Run} key=${`${at.parts[1]}:${asked}`} name=${at.parts[1]} tab=${at.parts[2] ?? ""} query=${at.query} may=${server.may} tell=${tell} />`
      : at.parts[0] === "compare"
        ? html`<${Compare} key=${at.query.toString()} names=${at.query.getAll("run")} tell=${tell} />`
        : at.parts[0] in PAGES
          ? html`<${ServerPage} key=${at.parts[0]} page=${at.parts[0]} query=${at.query} tell=${tell} />`
          : html`<${Runs} key=${asked} query=${at.query} tell=${tell} />`;
  return html`<a class="skip" href="#content" onClick=${(e) => (e.preventDefault(), document.getElementById("content")?.focus())}>Skip to the content</a>
    <header class="bar"><a class="brand" href="#/">tandem</a><nav class="where" aria-label="Place">${links.map(([page, label]) => html`<a href=${`#/${page}`} aria-current=${page === here ? (deeper ? "true" : "page") : undefined}>${label}</a>`)}${deeper && html`<span>/ ${deeper}</span>`}</nav>
      <span class=${`live ${live && allowed ? "on" : ""}`} role="status"><i></i>${live && allowed ? "live" : "not connected"}</span></header>
    ${page}`;
}

/** Read a path again and again while the page is open.
 * @param {string} path nothing is asked where it is empty @param {number} everyMs @param {any} tell */
export function useFresh(path, everyMs, tell, again = 0, ask = read) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    if (!path) return;
    const ending = new AbortController();
    let timer = 0;
    const askAgain = async () => {
      try {
        setFound(await ask(path, ending.signal));
        setProblem("");
        tell.live(true);
      } catch (error) {
        if (ending.signal.aborted) return;
        tell.refused(error);
        if (error.status === 401) return;
        setProblem(error.message);
      }
      if (everyMs) timer = setTimeout(askAgain, everyMs);
    };
    askAgain();
    return () => (ending.abort(), clearTimeout(timer));
  }, [path, everyMs, again]);
  return [found, problem];
}

render(html`<${App} />`, document.getElementById("app"));
