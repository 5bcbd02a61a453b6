// The list of runs: what each does now, and why it ended so.
import { html, useMemo, useState } from "./vendor/preact.js";
import { keepInAddress, useFresh } from "./app.js";
import { number, usd } from "./data.js";

const STATES = ["running", "queued", "starting", "waiting", "succeeded", "failed", "gone", "stopped", "cancelled"];
const SHOWN = 200;

const value = (row) => (row.reward == null ? (row.loss == null ? "–" : `loss ${number(row.loss)}`) : number(row.reward));
const percent = (row, score) => (row.metric === "accuracy" ? `${(100 * score).toFixed(1)} %` : number(score));
const scores = (row) => (row.after == null ? (row.before == null ? "–" : `${percent(row, row.before)} before`) : row.before == null ? percent(row, row.after) : `${percent(row, row.before)} → ${percent(row, row.after)}`);

/** What a run is doing, told apart: slow is not stalled, and a vanished process is not running. */
export const stateOf = (row) => (row.state === "running" && row.liveness === "stalled" ? "stalled" : row.state);

export function Runs({ query, tell }) {
  const [found, problem] = useFresh("runs", 3000, tell);
  const [text, setText] = useState(query.get("q") ?? "");
  const [state, setState] = useState(query.get("state") ?? "");
  const [chosen, setChosen] = useState([]);
  const [all, setAll] = useState(false);
  const rows = useMemo(() => {
    const wanted = text.toLowerCase();
    return (found?.runs ?? []).filter((row) => (!state || stateOf(row) === state || row.state === state) && (!wanted || `${row.title} ${row.run} ${row.recipe} ${row.verdict} ${row.error} ${row.target ?? ""} ${row.project ?? ""}`.toLowerCase().includes(wanted)));
  }, [found, text, state]);
  if (!found) return html`<main id="content" tabindex="-1"><p class="quiet" role="status">${problem || "Reading the runs …"}</p></main>`;
  if (!found.runs.length)
    return html`<main id="content" tabindex="-1"><div class="card empty"><h1>No run yet</h1>
      <p>Runs in <code>${found.directory}</code> appear here as soon as they begin.</p>
      <p><code>tandem init</code> asks what you want to train and writes a spec; <code>tandem train SPEC</code> runs it, <code>tandem submit SPEC</code> on a control server.</p></div></main>`;
  const choose = (name, on) => setChosen(on ? [...chosen, name].slice(-8) : chosen.filter((each) => each !== name));
  const counts = Object.fromEntries(STATES.map((each) => [each, found.runs.filter((row) => row.state === each).length]));
  return html`<main id="content" tabindex="-1">
    <h1 class="sr">Runs</h1>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <div class="tools" role="search">
      <label class="sr" for="filter">Filter runs</label>
      <input id="filter" type="search" placeholder="Filter by name, verdict or error" value=${text}
        onInput=${(e) => (setText(e.target.value), keepInAddress({ q: e.target.value }))} />
      ${STATES.filter((each) => counts[each] || state === each).map(
        (each) => html`<button aria-pressed=${state === each} onClick=${() => (setState(state === each ? "" : each), keepInAddress({ state: state === each ? "" : each }))}>${each} ${counts[each]}</button>`,
      )}
      <button class=${chosen.length > 1 ? "main" : ""} disabled=${chosen.length < 2}
        onClick=${() => (location.hash = `#/compare?${chosen.map((each) => `run=${encodeURIComponent(each)}`).join("&")}`)}>Compare${chosen.length > 1 ? ` ${chosen.length} runs` : ": choose two"}</button>
    </div>
    <div class="card scroll" tabindex="0" role="region" aria-label="Runs">
      <table><thead><tr><th><span class="sr">Choose</span></th><th>run</th><th>state</th><th class="wide">step</th><th class="num wide">reward or loss</th><th class="num">held out</th><th class="wide">why</th></tr></thead>
      <tbody>${rows.slice(0, all ? rows.length : SHOWN).map(
        (row) => html`<tr key=${row.run}>
          <td><input type="checkbox" aria-label=${`Compare ${row.title}`} checked=${chosen.includes(row.run)} onChange=${(e) => choose(row.run, e.target.checked)} /></td>
          <td class="name"><a href=${`#/run/${encodeURIComponent(row.run)}`}>${row.title}</a><div class="quiet">${row.target ? `${row.run.slice(0, 10)} · ${row.recipe || "not begun"} on ${row.target} · ${usd(row.cost_usd)}` : row.recipe}</div></td>
          <td><span class=${`pill ${stateOf(row)}`}>${stateOf(row)}</span> ${row.verdict && html`<span class=${`pill ${row.verdict}`}>${row.verdict}</span>`}</td>
          <td class="wide">${row.steps_total ? html`${row.step.toLocaleString("en")} of ${row.steps_total.toLocaleString("en")}<span class="progress"><i style=${{ width: `${Math.min(100, (100 * row.step) / row.steps_total)}%` }}></i></span>` : "–"}</td>
          <td class="num wide">${value(row)}</td><td class="num">${scores(row)}</td>
          <td class="why wide">${row.error || (row.state === "gone" ? `its process is gone; tandem resume continues it` : row.stage || "")}</td></tr>`,
      )}</tbody></table>
      ${!rows.length && html`<p class="quiet">No run fits this filter.</p>`}
      ${rows.length > SHOWN && !all && html`<p><button onClick=${() => setAll(true)}>Show all ${rows.length.toLocaleString("en")}</button></p>`}
    </div></main>`;
}
