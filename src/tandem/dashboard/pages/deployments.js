// Models behind names: which weights answer, how they do, and a place to talk to them.
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { keepInAddress } from "./app.js";
import { Marked, Rare, Shades } from "./answers.js";
import { change, converse, number } from "./data.js";
import { Table } from "./server.js";

const at = (each) => html`<a href=${`#/run/${each.run}`}>${each.run.slice(0, 12)}…</a> step ${each.step}`;
const state = (each) => (each.ready ? "answers" : each.asleep ? "asleep" : each.state);
const share = (each) => (each.canary ? `${number(100 * each.canary, 3)} % to try it` : each.weight ? `weight ${each.weight}` : "none");
const percent = (value) => `${number(100 * value, 3)} %`;
const measured = (found, show) => (found?.count ? html`${show(found.mean)} <span class="quiet">[${show(found.low)}, ${show(found.high)}]</span>` : "–");

export function Deployments({ first, changed }) {
  if (!first.items.length) return html`<div class="empty"><h1>No model has a name yet</h1><p>Put a checkpoint behind a name: <code>tandem deploy RUN@STEP --name support</code>. OpenAI's clients ask it by that name.</p></div>`;
  return first.items.map((each) => html`<${Deployment} key=${each.id} it=${each} changed=${changed} />`);
}

function Deployment({ it, changed }) {
  const [asked, setAsked] = useState(/** @type {any} */ (null));
  const [problem, setProblem] = useState("");
  const go = async () => {
    try {
      await change(`/deployments/${encodeURIComponent(it.name)}/${asked.what}`, asked.body);
      setProblem("");
      changed();
    } catch (error) {
      setProblem(error.message);
    }
    setAsked(null);
  };
  const wholly = it.revisions.find((each) => each.weight && !it.revisions.some((other) => other !== each && other.weight));
  const ask = (what, words, body = {}) => html`<button class="small" onClick=${() => setAsked({ what, words, body })}>${words}</button>`;
  return html`<section class="card"><h2>${it.name} <a class="beside" href=${`#/playground?model=${encodeURIComponent(it.name)}`}>Try it</a></h2>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <${Table} label=${`Revisions of ${it.name}`} none="None."
      heads=${[["", "num"], ["weights of"], ["requests"], ["replica"], ["answers", "num"], ["failed", "num"], ["seconds", "num"], ["rated", "num"], ["", "num"]]}
      rows=${[...it.revisions].reverse().map((each) => [each.n, at(each), share(each), html`<span class=${`pill ${each.ready ? "succeeded" : each.state}`}>${state(each)}</span> <span class="why">${each.why}</span>`, each.errors?.count ?? "–", measured(each.errors, percent), measured(each.seconds, (value) => number(value, 3)), measured(each.feedback, (value) => number(value, 2)),
        each === wholly ? "has all requests" : ask("promote", `Promote ${each.n}`, { revision: each.n })])} />
    <div class="tools">${it.revisions.length > 1 && ask("rollback", "Roll back")}${ask("undeploy", "Take it down")}</div>
    ${asked && html`<p class="next" role="alertdialog" aria-label="Sure?">${asked.words}: ${TOLD[asked.what]} <button class="main" onClick=${go}>Yes</button> <button onClick=${() => setAsked(null)}>No</button></p>`}</section>`;
}
const TOLD = { promote: "all requests go to this revision.", rollback: "requests go where they went before.", undeploy: "its replicas end, and the name is free." };

/** Talk to one model, or to two at once. Each answer says which revision gave it, and how likely its tokens were. */
export function Playground({ first, query }) {
  const names = first.data.map((each) => each.id);
  const [models, setModels] = useState([query.get("model") ?? names[0] ?? "", ...(query.get("beside") ? [query.get("beside")] : [])]);
  const [talks, setTalks] = useState(/** @type {any[][]} */ ([[], []]));
  const [text, setText] = useState("");
  const [heat, setHeat] = useState(0.7);
  const [most, setMost] = useState(256);
  const [busy, setBusy] = useState(0);
  const ending = useRef(new AbortController());
  useEffect(() => () => ending.current.abort(), []);
  if (!names.length) return html`<div class="empty"><h1>No model has a name yet</h1><p><code>tandem deploy RUN@STEP --name support</code> puts a checkpoint behind one.</p></div>`;
  const choose = (place, name) => {
    const chosen = models.map((each, index) => (index === place ? name : each));
    setModels(chosen);
    keepInAddress({ model: chosen[0], beside: chosen[1] ?? "" });
  };
  const beside = () => {
    const other = models.length > 1 ? [models[0]] : [models[0], names.find((each) => each !== models[0]) ?? models[0]];
    setModels(other);
    keepInAddress({ model: other[0], beside: other[1] ?? "" });
    setTalks([talks[0], []]);
  };
  const put = (place, turn) => setTalks((now) => now.map((talk, index) => (index === place ? [...talk.slice(0, -1), turn] : talk)));
  const send = (event) => {
    event.preventDefault();
    if (!text.trim() || busy) return;
    ending.current = new AbortController();
    setText("");
    setBusy(models.length);
    models.forEach(async (model, place) => {
      const before = [...talks[place], { role: "user", content: text }];
      const turn = { role: "assistant", content: "", tokens: [], told: "…" };
      setTalks((now) => now.map((talk, index) => (index === place ? [...before, turn] : talk)));
      const started = performance.now();
      const tokens = [];
      let content = ""; // what the next turn is told: without special tokens
      const now = (told) => put(place, { role: "assistant", content, tokens: [...tokens], told });
      try {
        const messages = before.map(({ role, content }) => ({ role, content }));
        const found = await converse({ model, messages, temperature: heat, max_tokens: most }, ending.current.signal, (said, more) => ((content += said), tokens.push(...more), now("…")));
        now(`${found.revision || model} · ${tokens.length} tokens · ${number((performance.now() - started) / 1000, 2)} s${found.finish === "length" ? " · cut at the limit" : ""}`);
      } catch (error) {
        now(ending.current.signal.aborted ? "ended by you" : error.message);
      }
      setBusy((count) => count - 1);
    });
  };
  const shown = models.map((model, place) => html`<section class="card talk"><div class="tools"><label class="line">model <select value=${model} onChange=${(e) => choose(place, e.target.value)}>${[...new Set([model, ...names])].map((each) => html`<option value=${each}>${each}</option>`)}</select></label></div>
    <div role="log" aria-label=${`Conversation with ${model}`}>${talks[place].map((turn) => html`<div class=${`turn ${turn.role}`}><small>${turn.role === "user" ? "you" : turn.told}</small>${turn.tokens ? html`<${Marked} tokens=${turn.tokens} />` : html`<pre>${turn.content}</pre>`}</div>`)}</div>
    ${talks[place].length > 0 && html`<${Rare} tokens=${talks[place].at(-1)?.tokens ?? []} />`}</section>`);
  return html`<${Shades} />
    <div class="talks">${shown}</div>
    <form class="card" onSubmit=${send}><label for="say">Message</label>
      <textarea id="say" rows="3" value=${text} onInput=${(e) => setText(e.target.value)} onKeyDown=${(e) => e.key === "Enter" && (e.ctrlKey || e.metaKey) && send(e)}></textarea>
      <div class="tools"><button class="main" disabled=${busy > 0 || !text.trim()}>Send</button>
        <button type="button" disabled=${!busy} onClick=${() => ending.current.abort()}>Stop</button>
        <button type="button" disabled=${busy > 0} onClick=${() => setTalks([[], []])}>Begin again</button>
        <button type="button" disabled=${busy > 0} aria-pressed=${models.length > 1} onClick=${beside}>Two beside each other</button>
        <label class="line">temperature <input type="number" min="0" max="2" step="0.1" value=${heat} onChange=${(e) => setHeat(Number(e.target.value))} /></label>
        <label class="line">most tokens <input type="number" min="1" max="4096" value=${most} onChange=${(e) => setMost(Number(e.target.value))} /></label>
        <span class="quiet">Ctrl+Enter sends</span></div></form>`;
}
